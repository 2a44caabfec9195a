"""Checks of decodes that three ranks share, over gloo on the CPU: ``python -m tests.stages.sharing_ranks FOLDER``.
Each rank writes its results to ``FOLDER/RANK.json``; :mod:`tests.stages.test_sharing` reads them. Checks of two ranks
leave the third out. The ranks are forked, because imports take most of the time."""

import faulthandler
import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan

from dit_accel.stages import sharing
from dit_accel.stages.decode import FusedDecode
from dit_accel.stages.vae import causal, layers
from tests.stages.test_decode import RESIDUAL, autoencoder, hunyuan_autoencoder, latents, video_autoencoder
from tests.stages.vae import test_hunyuan_image, test_ltx

LONGEST = 60  # seconds of one check
RANKS = 3
RANK = 0  # set in each process
CHECKS: dict[str, tuple[int, Callable]] = {}


def check(ranks: int) -> Callable:
    """Register a check of the first ranks, which gets their group."""

    def register(function: Callable) -> Callable:
        CHECKS[function.__name__] = ranks, function
        return function

    return register


def decoded(made, given: torch.Tensor) -> torch.Tensor:
    timestep = [torch.full((len(given),), 0.05)] if made.config.get("timestep_conditioning") else []
    return made.decode(given, *timestep).sample


def compared(made, given: torch.Tensor, group: dist.ProcessGroup, calls: int = 2, alone=None) -> list[dict]:
    """Decodes of the same latents by the group, over the decode of one rank."""
    hook = FusedDecode(made, "reference")
    alone = [decoded(made, given) for _ in range(2)][-1] if alone is None else alone
    hook.leave()
    hook = FusedDecode(made, "reference", group=group)
    found = []
    for _ in range(calls):
        output = decoded(made, given)
        error = (output - alone).abs().max().item()
        found.append({"error": error, "sum": output.double().sum().item(), "remark": hook.remark})
    hook.leave()
    return found


def rows(group, **shapes) -> dict:
    found = {}
    for name, (kind, config, shape) in {
        "wan-2.1": (AutoencoderKLWan, {}, (2, 4, 4, 19, 6)),
        "wan-2.2": (AutoencoderKLWan, RESIDUAL, (1, 4, 3, 17, 6)),
        "qwen-image": (AutoencoderKLQwenImage, {}, (1, 4, 1, 16, 5)),
    }.items():
        found[name] = compared(video_autoencoder(kind, **config), latents(*shape), group)
    found["hunyuan-video"] = compared(hunyuan_autoencoder(), latents(1, 4, 3, 19, 5), group)
    with patch.object(layers, "BYTES", 4096):  # fewer frames at a time
        found["hunyuan-video in parts"] = compared(hunyuan_autoencoder(), latents(1, 4, 3, 17, 5), group)
    found["hunyuan-image"] = compared(test_hunyuan_image.autoencoder(), latents(1, 8, 17, 6), group)
    return found | {"image": compared(autoencoder(), latents(1, 4, 17, 6), group)}


@check(2)
def bands_of_two(group) -> dict:
    return rows(group)


@check(3)
def bands_of_three(group) -> dict:
    with patch.object(sharing, "LEAST_ROWS", 1):
        return rows(group) | {
            "one row each": compared(video_autoencoder(AutoencoderKLWan), latents(1, 4, 2, 4, 6), group)
        }


@check(2)
def tiles_of_bands(group) -> dict:
    """Wan in tiles, each of which is shared; other tiles are not known at first."""
    made, given = video_autoencoder(AutoencoderKLWan), latents(1, 4, 2, 40, 6)
    compared(made, given, group)
    made.enable_tiling(tile_sample_min_height=160, tile_sample_stride_height=160)
    return {"tiles": compared(made, given, group)}


@check(2)
def too_few_rows(group) -> dict:
    return {"wan": compared(video_autoencoder(AutoencoderKLWan), latents(1, 4, 2, 15, 6), group)}


@check(2)
def calls(group) -> dict:
    frames, both = hunyuan_autoencoder(), hunyuan_autoencoder()
    for made in (frames, both):
        made.tile_sample_min_num_frames, made.tile_sample_stride_num_frames = 8, 4
    both.enable_tiling(tile_sample_min_height=16, tile_sample_min_width=16)
    timed = test_ltx.autoencoder(*test_ltx.CASES["ltx-0.9.5"])
    return images(group) | {
        "frames": compared(frames, latents(1, 4, 4, 3, 4), group),
        "tiles of frames": compared(both, latents(1, 4, 4, 3, 3), group),
        "timestep": compared(timed, latents(2, 6, 2, 2, 3), group),
        "single": compared(autoencoder(), latents(1, 4, 6, 8), group),
    }


@check(3)
def images(group) -> dict:
    tiled = autoencoder(sample_size=16)
    tiled.enable_tiling()
    return {
        "tiles": compared(tiled, latents(1, 4, 16, 12), group),
        "batch": compared(autoencoder(), latents(3, 4, 6, 8), group),
    }


def _failing(function: Callable, rank: int, after: int) -> Callable:
    """The function, which raises on one rank from a call on; calls that only compute shapes do not count."""
    count = 0

    def call(*args, **kwargs):
        nonlocal count
        is_real = not args[0].is_meta
        count += is_real
        if rank == RANK and is_real and count > after:
            raise RuntimeError("out of luck")
        return function(*args, **kwargs)

    return call


@check(2)
def failure_in_rows(group) -> dict:
    """One rank's kernels fail at the start, in the middle and at the end of the first decode that is shared."""
    found = {}
    kernels = 3 * (2 * 7 + 1) - 1  # calls of the norm in three frames
    wan = partial(video_autoencoder, AutoencoderKLWan)
    for name, kind, page, op, after in (
        ("first norm", wan, causal, "causal_norm", 0),
        ("a norm", wan, causal, "causal_norm", 7),
        ("a later frame", wan, causal, "causal_norm", 20),
        ("last norm", wan, causal, "causal_norm", kernels - 3),
        ("an image's moments", autoencoder, layers, "group_moments", 5),
        ("a norm of frames", hunyuan_autoencoder, layers, "group_norm", 3),
    ):
        made = kind()
        given = latents(1, 4, 16, 6) if kind is autoencoder else latents(1, 4, 3, 16, 6)
        hook = FusedDecode(made, "reference", group=group)
        alone = decoded(made, given)
        with patch.object(page, op, _failing(getattr(page, op), 1, after)):
            outputs, remarks = [decoded(made, given)], [hook.remark]
        outputs.append(decoded(made, given))
        remarks.append(hook.remark)
        found[name] = {"errors": [(each - alone).abs().max().item() for each in outputs], "remarks": remarks}
    return found


@check(2)
def failure_in_calls(group) -> dict:
    """One rank's kernels fail, and then also its decoder's own code, once."""
    found = {}
    for name, also in (("kernels", False), ("all", True)):
        made, given = autoencoder(sample_size=16), latents(1, 4, 24, 20)
        made.enable_tiling()
        hook = FusedDecode(made, "reference", group=group)
        alone = decoded(made, given)
        decoder = made.decoder
        own = hook._unit
        with patch.object(layers, "group_norm", _failing(layers.group_norm, 0, 9)):
            if also:
                hook._unit = lambda *args, own=own: own(*args) if RANK else 1 / 0
            output = decoded(made, given)
        found[name] = {"errors": [(output - alone).abs().max().item()], "remarks": [hook.remark]}
        assert made.decoder is decoder
    return found


@check(2)
def other_latents(group) -> dict:
    """Ranks whose latents differ in shape decode their own."""
    made, given = autoencoder(), latents(2, 4, 6 + RANK, 8)
    video = video_autoencoder(AutoencoderKLWan)
    frames = latents(1, 4, 2, 16, 6 + RANK)
    return {"images": compared(made, given, group), "videos": compared(video, frames, group)}


@check(2)
def one_that_cannot(group) -> dict:
    """A rank whose decoder has a hook runs it, and the other decodes with kernels."""
    found = {}
    for name, made, given in (
        ("images", autoencoder(), latents(2, 4, 6, 8)),
        ("videos", video_autoencoder(AutoencoderKLWan), latents(1, 4, 2, 16, 6)),
    ):
        if RANK == 1:
            made.decoder.mid_block.register_forward_hook(lambda *_: None)
        found[name] = compared(made, given, group)
    return found


def main() -> int:
    processes = []
    for rank in range(RANKS):
        process = os.fork()
        if process == 0:
            run(rank)
            os._exit(0)
        processes.append(process)
    return max(os.waitpid(process, 0)[1] for process in processes)


def run(rank: int) -> None:
    """Run the checks as one rank."""
    global RANK
    RANK = rank
    folder, chosen = Path(sys.argv[1]), sys.argv[2:] or list(CHECKS)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=LONGEST))
    groups = {count: dist.new_group(list(range(count))) for count in (2, 3)}
    found = {}
    for name in chosen:
        ranks, function = CHECKS[name]
        faulthandler.dump_traceback_later(LONGEST, exit=True)
        if ranks > RANK:
            try:
                found[name] = function(groups[ranks])
            except Exception:
                found[name] = {"failed": traceback.format_exc()}
    (folder / f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
