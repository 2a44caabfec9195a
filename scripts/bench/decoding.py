#!/usr/bin/env python3
"""Times decoding, and encoding, at full size with random weights: with fused kernels, and by diffusers' own code.

    python -m scripts.bench.decoding --output docs/results/decoding.json
    python -m scripts.bench.decoding --tiny                       # the same paths on the CPU, in seconds
    torchrun --nproc-per-node 2 -m scripts.bench.decoding         # by one GPU and shared by two, with fused kernels

Both sides have the same input and the same weights. The error of each is the relative L2 error over
the float32 decoder without TF32, of the first latent frames; memory is the peak above what weights and latents take.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from torch import nn

from dit_accel.stages.decode import FUSED, FusedDecode, FusedEncode
from dit_accel.tools.measure.origin import describe_run
from scripts.bench.call_speed.pipelines import AUTOENCODERS
from scripts.bench.model_speed.measures import peak_memory, stopwatch
from scripts.bench.model_speed.models import as_loaded
from scripts.bench.model_speed.ranks import join
from scripts.tables import write_result

FLUX, LTX2, TINY_H3 = AUTOENCODERS["flux"].config, AUTOENCODERS["ltx2"].config, AUTOENCODERS["minimax-h3"].tiny
TINY = {"block_out_channels": (8, 8, 16, 16), "layers_per_block": 1, "latent_channels": 16, "norm_num_groups": 4}
TINY_FLUX2 = {**TINY, "latent_channels": 32}
TINY_VIDEO = {"base_dim": 8}
TILED = {"tiles": True}
HUNYUAN_IMAGE = {"in_channels": 3, "out_channels": 3, "latent_channels": 64, "layers_per_block": 2, "sample_size": 384}
HUNYUAN_IMAGE |= {"block_out_channels": (128, 256, 512, 512, 1024, 1024), "spatial_compression_ratio": 32}
TINY_HUNYUAN = {"block_out_channels": (32, 32, 64, 64, 128, 128), "layers_per_block": 1}
LTX = {  # 0.9.5 to 0.9.8
    "decoder_block_out_channels": (256, 512, 1024),
    "decoder_layers_per_block": (5, 5, 5, 5),
    "decoder_spatio_temporal_scaling": (True,) * 3,
    "decoder_inject_noise": (False,) * 4,
    "upsample_residual": (True,) * 3,
    "upsample_factor": (2,) * 3,
    "timestep_conditioning": True,
}
TINY_LTX = {"block_out_channels": (8,) * 4, "layers_per_block": (1,) * 5}
TINY_LTX |= {"decoder_block_out_channels": (16, 32, 64), "decoder_layers_per_block": (1,) * 4}
CASES = (  # class after AutoencoderKL, config, toy config, what is decoded, shape of the latents, dtypes
    ("", FLUX, TINY, "FLUX.1, 1024 x 1024", (1, 16, 128, 128), "bf16 fp16 fp32"),
    ("", FLUX, TINY, "FLUX.1, 2048 x 2048", (1, 16, 256, 256), "bf16 fp32"),
    ("", FLUX, TINY, "FLUX.1, 4 of 1024 x 1024", (4, 16, 128, 128), "bf16"),
    ("Flux2", {}, TINY_FLUX2, "FLUX.2, 1024 x 1024", (1, 32, 128, 128), "bf16"),
    ("QwenImage", {}, TINY_VIDEO, "Qwen-Image, 1024 x 1024", (1, 16, 1, 128, 128), "bf16"),
    ("Wan", {}, TINY_VIDEO, "Wan 2.1, 81 frames of 480 x 832", (1, 16, 21, 60, 104), "bf16 fp32"),
    ("HunyuanVideo", {}, TINY, "HunyuanVideo, 81 frames of 480 x 832", (1, 16, 21, 60, 104), "bf16"),
    ("HunyuanVideo", TILED, TINY, "HunyuanVideo in tiles, the same", (1, 16, 21, 60, 104), "bf16"),
    ("HunyuanVideo15", TILED, TINY_HUNYUAN, "HunyuanVideo 1.5 tiled, the same", (1, 32, 21, 30, 52), "bf16"),
    ("CogVideoX", {}, TINY, "CogVideoX, 49 frames of 480 x 720", (1, 16, 13, 60, 90), "bf16"),
    ("HunyuanImage", HUNYUAN_IMAGE, TINY_HUNYUAN, "HunyuanImage, 2048 x 2048", (1, 64, 64, 64), "bf16"),
    ("LTXVideo", LTX, TINY_LTX, "LTX-Video, 97 frames of 512 x 704", (1, 128, 13, 16, 22), "bf16 fp32"),
    ("LTX2Video", LTX2, TINY_LTX, "LTX-2, 121 frames of 512 x 768", (1, 128, 16, 16, 24), "bf16"),
    ("MiniMaxH3", {}, TINY_H3, "MiniMax-H3, 124 frames of 480 x 832", (1, 24, 37, 30, 52), "bf16"),
)
ENCODED = (  # the same of images and videos
    ("", FLUX, TINY, "FLUX.1, 1024 x 1024", (1, 3, 1024, 1024), "bf16"),
    ("Wan", {}, TINY_VIDEO, "Wan 2.1, 81 frames of 480 x 832", (1, 3, 81, 480, 832), "bf16 fp32"),
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
RUNS = 3
FRAMES = 5  # whose error is measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--only", default="", help="part of the name of what is decoded, e.g. Wan")
    parser.add_argument("--tiny", action="store_true", help="toy size, on the CPU")
    options = parser.parse_args()
    with ExitStack() as stack:
        rank, ranks = join(options.tiny, stack) if "WORLD_SIZE" in os.environ else (0, 1)
        return _run(options, rank == 0, ranks)


def _run(options: argparse.Namespace, is_first: bool, ranks: int) -> int:
    device = "cpu" if options.tiny else "cuda"
    rows: list[dict[str, Any]] = []
    cases = [(FusedDecode, "decoded", 3, *case) for case in CASES if options.only in case[3]]
    if ranks == 1:
        cases += [(FusedEncode, "encoded", 9, *case) for case in ENCODED if options.only in case[3]]
    for stage, verb, least, suffix, config, tiny, what, shape, dtypes in cases:
        config = {**config, **(tiny if options.tiny else {})}
        shape = (*shape[:2], *(min(item, least) for item in shape[2:])) if options.tiny else shape
        for name in dtypes.split():
            torch.manual_seed(0)  # all ranks have the same weights
            with torch.device(device):
                kind = getattr(diffusers, f"AutoencoderKL{suffix}")
                autoencoder = kind(**{key: value for key, value in config.items() if key not in TILED})
            if config.get("tiles"):
                autoencoder.enable_tiling()
            rows.append({verb: what, "dtype": name, **measure(stage, autoencoder, shape, DTYPES[name], device, ranks)})
            if is_first:
                print(json.dumps(rows[-1]), flush=True)
                write_result(options.output, {**describe_run(device), "rows": rows})
    return 0 if all(row["ran"].startswith(FUSED) for row in rows) else 1


@torch.no_grad()
def measure(
    stage: type[FusedDecode],
    autoencoder: nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    ranks: int = 1,
) -> dict[str, Any]:
    """Milliseconds, GiB and errors of both ways to decode or encode; with several ranks, of one and of all of them."""
    autoencoder = autoencoder.to(device).eval()
    for module in autoencoder.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim and weight.shape[1:].numel() == 1:  # of norms, and biases
                nn.init.normal_(weight, 1.0 if name in ("weight", "gamma") else 0.0, 0.3)
    values = torch.randn(shape, device=device).to(dtype)
    compared = values[:, :, :FRAMES] if values.ndim == 5 else values
    run = partial(_coded, autoencoder, stage.method)
    autoencoder.to(dtype).float()
    exact = _exact(run, compared.float())
    as_loaded(autoencoder.to(dtype))
    backend, before = "auto" if device == "cuda" else "reference", "diffusers"
    row: dict[str, Any] = {}
    if ranks == 1:
        row[before] = _measured(run, values, compared, exact)
    fused = stage(autoencoder, backend)
    row["fused"] = _measured(run, values, compared, exact)
    fused.leave()
    after, remark = "fused", fused.remark
    if ranks > 1:
        shared = FusedDecode(autoencoder, backend, group=dist.group.WORLD)
        row["shared"] = {"ranks": ranks, **_measured(run, values, compared, exact)}
        before, after, remark = "fused", "shared", shared.remark
        shared.leave()
    return {**row, "speed_up": row[before]["ms"] / row[after]["ms"], "ran": remark}


def _coded(autoencoder: nn.Module, method: str, latents: torch.Tensor) -> torch.Tensor:
    if method == "encode":
        return autoencoder.encode(latents, return_dict=False)[0].parameters
    timestep = [latents.new_full((len(latents),), 0.05)] if autoencoder.config.get("timestep_conditioning") else []
    return autoencoder.decode(latents, *timestep, return_dict=False)[0]


def _exact(run: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """The results in float32, without TF32, one by one."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return torch.cat([run(item[None]).cpu() for item in values])
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def _measured(
    run: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor, compared: torch.Tensor, exact: torch.Tensor
) -> dict[str, float]:
    result = [run(compared) for _ in range(2)][-1].float().cpu()  # rows are shared the second time
    error = ((result - exact).norm() / exact.norm()).item()
    run(values)
    held, times = torch.cuda.memory_allocated() / 2**30 if values.is_cuda else 0.0, []
    with peak_memory(values.device) as memory:
        for _ in range(RUNS):
            elapsed = stopwatch(values.device)
            run(values)
            times.append(elapsed())
    return {"ms": statistics.median(times), "gib": (memory["peak_gib"] or 0.0) - held, "error": error}


if __name__ == "__main__":
    sys.exit(main())
