"""Checks of decodes that three ranks share, over gloo on the CPU: ``python -m tests.stages.sharing_ranks FOLDER``.
Each rank writes its results to ``FOLDER/RANK.json``; :mod:`tests.stages.test_sharing` reads them. Checks of two ranks
leave the third out. The ranks are forked, because imports take most of the time."""

import faulthandler
import json
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan

from dit_accel import accelerated
from dit_accel.stages import decode, sharing
from dit_accel.stages.decode import FusedDecode
from dit_accel.stages.vae import autoencoder_kl, causal, hunyuan_image, hunyuan_video, layers
from tests.forked import run_forked
from tests.stages.test_decode import RESIDUAL, autoencoder, hunyuan_autoencoder, latents, video_autoencoder
from tests.stages.vae import test_hunyuan_image
from tests.tiny import tiny_inputs, tiny_pipeline

LONGEST = 180  # seconds of one check
SHARING = (autoencoder_kl, causal, hunyuan_image, hunyuan_video)  # pages
RANKS = 3
RANK = 0  # set in each process
CHECKS: dict[str, tuple[int, Callable]] = {}


def check(ranks: int) -> Callable:
    """Register a check of the first ranks, which gets their group."""

    def register(function: Callable) -> Callable:
        CHECKS[function.__name__] = ranks, function
        return function

    return register


def compared(made, given: torch.Tensor, group: dist.ProcessGroup, calls: int = 2, alone=None) -> list[dict]:
    """Decodes of the same latents by the group, over the decode of one rank: diffusers' unless it is given."""
    alone = made.decode(given).sample if alone is None else alone
    hook = FusedDecode(made, "reference", group=group)
    found = []
    for _ in range(calls):
        output = made.decode(given).sample
        error = (output - alone).abs().max().item()
        found.append({"error": error, "sum": output.double().sum().item(), "remark": hook.remark})
    hook.leave()
    return found


def fused(made, given: torch.Tensor) -> torch.Tensor:
    """The second decode of one rank, by our kernels alone."""
    hook = FusedDecode(made, "reference")
    output = [made.decode(given).sample for _ in range(2)][-1]
    hook.leave()
    return output


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
        return {
            "wan-2.2": compared(video_autoencoder(AutoencoderKLWan, **RESIDUAL), latents(1, 4, 3, 17, 6), group),
            "image": compared(autoencoder(), latents(1, 4, 17, 6), group),
            "one row each": compared(video_autoencoder(AutoencoderKLWan), latents(1, 4, 2, 4, 6), group),
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
def few_latents(group) -> dict:
    """Of which each rank decodes all sooner."""
    with patch.object(autoencoder_kl, "SHARED_FROM", 17 * 6 + 1):
        return {"image": compared(autoencoder(), latents(1, 4, 17, 6), group)}


@check(2)
def tiles(group) -> dict:
    """Rows of tiles of an image, and of a video's tiles of frames."""
    image, video = autoencoder(sample_size=32), hunyuan_autoencoder()
    image.enable_tiling()
    video.tile_sample_min_num_frames, video.tile_sample_stride_num_frames = 8, 4
    return {
        "image": compared(image, latents(2, 4, 24, 20), group),
        "video": compared(video, latents(1, 4, 4, 16, 4), group),
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
        alone = made.decode(given).sample
        with patch.object(page, op, _failing(getattr(page, op), 1, after)):
            outputs, remarks = [made.decode(given).sample], [hook.remark]
        outputs.append(made.decode(given).sample)
        remarks.append(hook.remark)
        found[name] = {"errors": [(each - alone).abs().max().item() for each in outputs], "remarks": remarks}
    return found


@check(2)
def other_latents(group) -> dict:
    """Ranks whose latents differ in shape decode their own."""
    made, given = autoencoder(), latents(2, 4, 16 + RANK, 8)
    video = video_autoencoder(AutoencoderKLWan)
    frames = latents(1, 4, 2, 16, 6 + RANK)
    return {
        "images": compared(made, given, group, alone=fused(made, given)),
        "videos": compared(video, frames, group, alone=fused(video, frames)),
    }


@check(2)
def other_tiles(group) -> dict:
    """Ranks whose tiles differ decode their own."""
    made, given = autoencoder(sample_size=32), latents(1, 4, 24, 20)
    made.enable_tiling()
    made.tile_overlap_factor = 0.25 * (1 + RANK)
    return {"images": compared(made, given, group, alone=fused(made, given))}


@check(2)
def one_that_cannot(group) -> dict:
    """A rank whose decoder has a hook runs it, and the other decodes with kernels."""
    found = {}
    for name, made, given in (
        ("images", autoencoder(), latents(2, 4, 16, 8)),
        ("videos", video_autoencoder(AutoencoderKLWan), latents(1, 4, 2, 16, 6)),
    ):
        if RANK == 1:
            made.decoder.mid_block.register_forward_hook(lambda *_: None)
        found[name] = compared(made, given, group)
    return found


@check(2)
def pipelines(group) -> dict:
    """Ranks that share a pipeline's calls: all want frames, one wants latents, one has no autoencoder."""
    found = {}
    cases = {"frames": ("pt", "pt"), "latents": ("pt", "latent"), "without": ("pt", "latent")}
    for name, wanted in cases.items():
        pipe = tiny_pipeline("wan")
        if name == "without" and RANK == 1:
            pipe.vae = None
        with (
            accelerated(pipe, "exact", **{"stages.share": True}),
            patch.object(sharing, "LEAST_ROWS", 1),
            patch.object(sharing, "group_of", lambda _: group),
            patch.object(decode, "group_of", lambda _: group),
        ):
            if pipe.vae is not None:
                FusedDecode.on(pipe.vae)._backend = "reference"
            outputs = [pipe(**tiny_inputs("wan", steps=2) | {"output_type": wanted[RANK]})[0] for _ in range(2)]
            sums = [each.double().sum().item() for each in outputs]
            found[name] = {"remark": pipe.dit_accel.report().decoding, "sums": sums}
    return found


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
                with ExitStack() as small:
                    for page in SHARING:
                        small.enter_context(patch.object(page, "SHARED_FROM", 1))
                    found[name] = function(groups[ranks])
            except Exception:
                found[name] = {"failed": traceback.format_exc()}
    (folder / f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(run_forked(RANKS, run))
