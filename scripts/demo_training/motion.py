"""Motion of objects in a video: closed formulas of time, so that all frames are computed at once.

Time runs from 0 to 1 over a video, for any number of frames. Positions are in frame widths, x to the right and y down.
Every motion goes from a start to an end: once ("moves to the right"), there and back ("bounces from side to side"), or
not at all ("turns", "rests").
"""

import math
from dataclasses import astuple, dataclass

import torch

STRAIGHT = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
DIAGONAL = {"up left": (-1, -1), "up right": (1, -1), "down left": (-1, 1), "down right": (1, 1)}
BOUNCES = {"side to side": (1, 0), "up and down": (0, 1)}

TURN = math.pi / 3  # over the video, clockwise; 3.75 degrees per frame at 17 frames; no shape looks the same at the end


@dataclass(frozen=True)
class Path:
    """Path from (start_x, start_y) to (end_x, end_y) and back; the video covers `legs` one-way trips.

    The object starts tilted by `tilt` radians clockwise and turns by `turn` radians.
    """

    start_x: float
    start_y: float
    end_x: float
    end_y: float
    legs: float
    tilt: float
    turn: float

    def numbers(self) -> list[float]:
        """Pack the path for `follow`."""
        return list(astuple(self))


PATH_NUMBERS = len(Path.__dataclass_fields__)


def choose_path(motion: str, centre: tuple[float, float], *, span: float, tilt: float) -> Path:
    """Return the path of a motion, one of `clip_prompts.MOTIONS`, around `centre`; `tilt` is in radians, clockwise.

    `span` is the length of the way, along each axis of a diagonal one.
    """
    x, y = centre
    along_x, along_y = {**STRAIGHT, **DIAGONAL, **BOUNCES}.get(motion, (0, 0))
    reach = span / 2
    return Path(
        start_x=x - reach * along_x,
        start_y=y - reach * along_y,
        end_x=x + reach * along_x,
        end_y=y + reach * along_y,
        legs=2.0 if motion in BOUNCES else 1.0,
        tilt=tilt,
        turn=TURN if motion == "turns" else 0.0,
    )


def follow(paths: torch.Tensor, times: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, y and clockwise angle in radians [..., F] on packed paths [..., PATH_NUMBERS] at times [F] in 0..1."""
    start_x, start_y, end_x, end_y, legs, tilt, turn = paths[..., None, :].unbind(-1)
    walked = 1 - (1 - torch.remainder(legs * times, 2)).abs()  # 0 at the start, 1 at the end, 0 back at the start
    return torch.lerp(start_x, end_x, walked), torch.lerp(start_y, end_y, walked), tilt + turn * times
