"""Checks of decodes that three ranks share, over gloo on the CPU: ``python -m tests.stages.sharing_ranks FOLDER``.
Each rank writes its results to ``FOLDER/RANK.json``; :mod:`tests.stages.test_sharing` reads them. Checks of two ranks
leave the third out. The ranks are forked, because imports take most of the time."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist

from dit_accel import accelerated, kernels
from dit_accel.stages import decode, sharing
from dit_accel.stages.decode import FusedDecode
from dit_accel.stages.vae import autoencoder_kl, causal, hunyuan_image, hunyuan_video, layers
from tests.forked import run_checks, run_forked
from tests.stages.autoencoders import autoencoder, latents
from tests.tiny import tiny_inputs, tiny_pipeline

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


def compared(vae, values: torch.Tensor, group: dist.ProcessGroup) -> list[dict]:
    """Two decodes of the same latents by the group, compared with diffusers' own."""
    baseline = vae.decode(values).sample
    stage, found = FusedDecode(vae, "reference", group=group), []
    for _ in range(2):
        output = vae.decode(values).sample
        error = (output - baseline).abs().max().item()
        found.append({"error": error, "sum": output.double().sum().item(), "remark": stage.remark})
    stage.leave()
    return found


@check(2)
def bands_of_two(group) -> dict:
    shapes = {
        **{"wan 2.1": (2, 4, 4, 19, 6), "qwen-image": (1, 4, 1, 16, 5), "hunyuan": (1, 4, 3, 19, 5)},
        **{"hunyuan-image": (1, 4, 17, 6), "flux": (1, 4, 17, 6)},
    }
    found = {name: compared(autoencoder(name), latents(*shape), group) for name, shape in shapes.items()}
    with patch.object(layers, "BYTES", 4096):  # fewer frames at a time
        found["hunyuan in parts"] = compared(autoencoder("hunyuan"), latents(1, 4, 3, 17, 5), group)
    return found


@check(3)
def bands_of_three(group) -> dict:
    with patch.object(sharing, "LEAST_ROWS", 1):
        return {
            "wan 2.2": compared(autoencoder("wan 2.2"), latents(1, 4, 3, 17, 6), group),
            "flux": compared(autoencoder(), latents(1, 4, 17, 6), group),
            "one row each": compared(autoencoder("wan 2.1"), latents(1, 4, 2, 4, 6), group),
        }


@check(2)
def parts(group) -> dict:
    """Tiles of an image, of a video and of its frames, each of which is shared; other tiles are not known at first."""
    image, frames, video = autoencoder(sample_size=32), autoencoder("hunyuan"), autoencoder("wan 2.1")
    image.enable_tiling()
    frames.tile_sample_min_num_frames, frames.tile_sample_stride_num_frames = 8, 4
    values = latents(1, 4, 2, 40, 6)
    compared(video, values, group)
    video.enable_tiling(tile_sample_min_height=160, tile_sample_stride_height=160)
    return {
        "image": compared(image, latents(2, 4, 24, 20), group),
        "frames": compared(frames, latents(1, 4, 4, 16, 4), group),
        "video": compared(video, values, group),
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


def _narrow(x: torch.Tensor, *_, **options) -> torch.dtype:
    """The dtype on a GPU; a rank that has failed only computes shapes, without kernels."""
    return x.dtype if x.is_meta else torch.float16


@check(2)
def failure_in_rows(group) -> dict:
    """One rank's kernels fail at the start, in the middle and at the end of the first decode that is shared."""
    found = {}
    for place, name, page, op, after in (
        ("first norm", "wan 2.1", causal, "causal_norm", 0),
        ("a later frame", "wan 2.1", causal, "causal_norm", 20),
        ("narrow operands", "wan 2.1", causal, "causal_norm", 20),
        ("an image's moments", "flux", kernels, "group_moments", 5),
        ("a norm of frames", "hunyuan", kernels, "group_norm", 3),
    ):
        vae, values = autoencoder(name), latents(*((1, 4, 16, 6) if name == "flux" else (1, 4, 3, 16, 6)))
        stage, baseline = FusedDecode(vae, "reference", group=group), vae.decode(values).sample
        operands = _narrow if place == "narrow operands" else causal.operand_dtype
        with (
            patch.object(causal, "operand_dtype", operands),
            patch.object(page, op, _failing(getattr(page, op), 1, after)),
        ):
            outputs, remarks = [vae.decode(values).sample], [stage.remark]
        outputs.append(vae.decode(values).sample)
        remarks.append(stage.remark)
        found[place] = {"errors": [(item - baseline).abs().max().item() for item in outputs], "remarks": remarks}
    return found


@check(2)
def differences(group) -> dict:
    image, tiled = autoencoder(), autoencoder(sample_size=32)
    tiled.enable_tiling()
    tiled.tile_overlap_factor = 0.25 * (1 + RANK)
    cases = {"images": (image, latents(2, 4, 16 + RANK, 8)), "tiles": (tiled, latents(1, 4, 24, 20))}
    return {name: compared(*case, group) for name, case in cases.items()}


@check(2)
def one_that_cannot(group) -> dict:
    """A rank whose decoder has a hook runs it, and the other decodes with kernels."""
    vae = autoencoder("wan 2.1")
    if RANK == 1:
        vae.decoder.mid_block.register_forward_hook(lambda *_: None)
    return {"decodes": compared(vae, latents(1, 4, 2, 16, 6), group)}


@check(2)
def pipelines(group) -> dict:
    """Ranks that share a pipeline's calls: one wants latents, one has no autoencoder."""
    found = {}
    for name in ("latents", "without"):
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
            for _ in range(2):
                pipe(**tiny_inputs("wan", steps=2) | {"output_type": ("pt", "latent")[RANK]})
            found[name] = pipe.dit_accel.report().decoding
    return found


def run(rank: int) -> None:
    global RANK
    RANK = rank

    def checks() -> dict[str, Callable]:
        groups = {count: dist.new_group(list(range(count))) for count in (2, 3)}
        chosen = {name: CHECKS[name] for name in sys.argv[2:] or CHECKS}
        return {name: partial(check, groups[ranks]) for name, (ranks, check) in chosen.items() if rank < ranks}

    with ExitStack() as small:
        for page in SHARING:
            small.enter_context(patch.object(page, "SHARED_FROM", 1))
        run_checks(rank, RANKS, checks)


if __name__ == "__main__":
    sys.exit(run_forked(RANKS, run))
