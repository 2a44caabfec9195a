"""Results of an engine, :class:`~dit_accel.serving.worker.Worker` or :class:`~dit_accel.serving.ray_engine.RayEngine`.

Each has the ``suffix`` of its files, its preset's values, and ``make_all``, which yields results in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dit_accel.errors import DitAccelError, shortened
from dit_accel.serving.prompts import Job, contracted

if TYPE_CHECKING:
    from dit_accel.presets import Preset


@dataclass(frozen=True)
class Made:
    """File of a job as bytes, and the call that generated it."""

    data: bytes
    seconds: float  # of the call's denoising loop
    report: dict[str, Any] | None  # of the accelerated run for this job; None = plain
    batch: list[int]  # indices of all jobs of the call
    stages: dict[str, float] = field(default_factory=dict)  # seconds of the whole call
    shape: tuple[int, int, int] | None = None  # frames, height and width of a video; None = image
    note: str | None = None  # on a size that the pipeline rounded
    contract: dict[str, Any] = field(default_factory=dict)  # what a request's run kept of it

    @property
    def computed_fraction(self) -> float:
        return (self.report or {}).get("computed_fraction") or 1.0


@dataclass(frozen=True)
class VideoForm:
    """Default frames per second of a pipeline's videos, and frames per latent frame; the first latent frame is one."""

    fps: float
    frames_unit: int
    in_chunks: bool = False  # True: decoded chunk by chunk while it is made

    def frames(self, seconds: float, fps: float | None = None) -> int:
        return 1 + self.frames_unit * round(seconds * (fps or self.fps) / self.frames_unit)


@dataclass(frozen=True)
class Loaded:
    form: VideoForm | None  # None = it makes images
    preset: Preset | None  # in use; None = plain
    suffix: str
    requested: Preset | None  # the same before prompts of a batch had their own steps

    def values_of(self, job: Job) -> dict[str, Any] | None:
        """Return all values of a line's preset with its targets; None = plain."""
        preset = contracted(self.requested, job.settings, self.form)
        return preset and preset.effective()


@dataclass(frozen=True)
class Failure:
    reason: str


class Cancelled(Exception):
    """Error of a cancelled request; it ends a pipeline's call between two steps."""


class DefectError(Exception):
    """Error of another process that is no :class:`DitAccelError`; its text has the type, and its note the traceback."""


def made_alone(batch: Sequence[Job], error: BaseException) -> str:
    lines = ", ".join(str(job.index + 1) for job in batch)
    return f"lines {lines} run one at a time, because one call failed: {reason_of(error)}"


def reason_of(error: BaseException) -> str:
    """Format an error in one line, without the actor ids that Ray adds in indented lines."""
    text = str(error) if isinstance(error, DitAccelError | DefectError) else f"{type(error).__name__}: {error}"
    return shortened(" ".join(line for line in text.splitlines() if not line.startswith("\t")), 600)
