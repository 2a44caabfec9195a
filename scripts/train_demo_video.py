"""Trains a demo video model from nothing in nine minutes on one H200, and writes it as a diffusers pipeline folder.

    python scripts/train_demo_video.py --family wan --output dit_accel/tools/assets/demo-wan --results WAN
    python scripts/train_demo_video.py ... --state STATE        # also keep the pipeline in float32, to go on from
    python scripts/train_demo_video.py ... --resume STATE       # go on with the transformer and the text encoders
    python scripts/train_demo_video.py ... --resume STATE --vae-seconds 60           # ... after the autoencoder
    python scripts/train_demo_video.py --family wan --output /tmp/demo --smoke       # all at toy size, on any CPU

Families are wan and hunyuan. Writes the pipeline to --output; a sheet of held-out prompts, the log and the
prompt-following table to --results.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import diffusers
import torch
from demo_models import clips
from demo_models.clip_prompts import vocabulary
from demo_models.clip_reading import agreement, read_clips
from demo_models.drawing import draw_bank
from demo_models.exporting import contact_sheet
from demo_models.hunyuan import Hunyuan
from demo_models.training import Pace, trained_weights
from demo_models.video_exporting import SHARD_SIZE, paint_clips, save_pipeline
from demo_models.video_family import GUIDANCE, VideoFamily
from demo_models.video_flow import Bank, compile_blocks, configure_torch, fill_compile_cache, put_in_bf16, train_flow
from demo_models.video_vae import encode_clips, latent_statistics, mean_psnr, reconstruct, train_autoencoder
from demo_models.wan import Wan
from torch import nn

FAMILIES = {family.name: family for family in (Wan(), Hunyuan())}


@dataclass(frozen=True)
class Sizes:
    """How large everything is; `steps` limits each training where it is set, instead of the clock."""

    clips: int
    frames: int
    size: int
    vae_batches: dict[int, int]
    vae_seconds: float
    vae_rate: float
    bank_seconds: float
    bank_batch: int
    flow_batch: int
    flow_rate: float
    finish_seconds: float
    sample_steps: int
    prompts: int
    steps: int | None = None


FULL = Sizes(
    clips=20_000,
    frames=17,
    size=256,
    vae_batches={64: 16, 128: 4, 256: 2},
    vae_seconds=230,
    vae_rate=2e-3,
    bank_seconds=60,
    bank_batch=16,
    flow_batch=128,
    flow_rate=1e-3,
    finish_seconds=50,
    sample_steps=50,
    prompts=64,
)

SMOKE = Sizes(
    clips=6,
    frames=5,
    size=32,
    vae_batches={16: 1, 32: 1},
    vae_seconds=1,
    vae_rate=1e-3,
    bank_seconds=1,
    bank_batch=2,
    flow_batch=2,
    flow_rate=1e-3,
    finish_seconds=0,
    sample_steps=2,
    prompts=1,
    steps=2,
)


def main() -> None:
    """Train, export, and report."""
    options = _options()
    started = time.monotonic()
    family = FAMILIES[options.family]
    sizes = SMOKE if options.smoke else FULL
    device = torch.device("cpu" if options.smoke else "cuda")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), f"inductor-demo-{family.name}")))
    configure_torch()
    log: dict[str, object] = {
        "device": "cpu" if options.smoke else torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "diffusers": diffusers.__version__},
        "command": " ".join(sys.argv),
    }

    prompts, numbers = draw_bank(clips.draw_clip, clips.pack, sizes.clips, options.seed, parallel=not options.smoke)
    numbers = numbers.to(device)
    compiler = None
    if not options.smoke:
        shape = {"frames": sizes.frames, "size": sizes.size, "batch": sizes.flow_batch}
        compiler = get_context("spawn").Process(target=fill_compile_cache, args=(family, vocabulary()), kwargs=shape)
        compiler.start()
    _say(started, f"drew {len(prompts)} scenes")

    resumed = family.load(options.resume) if options.resume else None
    vae = make_trained_autoencoder(family, resumed and resumed.vae, numbers, sizes, options, log)
    fast_vae = copy.deepcopy(vae).to(device, torch.bfloat16).requires_grad_(False).eval()
    drawn, decoded = held_out_reconstructions(fast_vae, sizes, device)
    log["vae_psnr_db"] = mean_psnr(drawn, decoded)
    _say(started, f"autoencoder: {log['vae_psnr_db']} dB")

    tokenizers = family.tokenizers_of(resumed) if resumed else family.make_tokenizers(vocabulary())
    text = tuple(ids.to(device) for ids in family.tokenize(tokenizers, ["", *prompts]))
    pace = Pace("bank", sizes.bank_seconds, 1.0, most_steps=sizes.steps)
    shape = {"frames": sizes.frames, "size": sizes.size, "batch": sizes.bank_batch}
    bank = Bank(encode_clips(family, fast_vae, numbers, pace, **shape), text)
    if compiler:
        compiler.join(timeout=90)
    log["bank_clips"] = len(bank.latents)
    _say(started, f"bank of {len(bank.latents)} clips; compiled")

    flow = family.flow_of(resumed) if resumed else family.make_flow(tokenizers, small=options.smoke)
    seconds = options.minutes * 60 - sizes.finish_seconds - (time.monotonic() - started)
    flow = make_trained_flow(family, flow, bank, sizes, seconds, options, log)
    pipe = family.assemble(vae, flow, tokenizers)
    if options.state:
        pipe.save_pretrained(options.state, max_shard_size=SHARD_SIZE)
    for part in (vae, flow):
        part.to(torch.bfloat16)
    shape = {"frames": sizes.frames, "size": sizes.size, "steps": sizes.sample_steps}
    log["folder_bytes"] = save_pipeline(family, pipe, options.output, words=len(vocabulary()), **shape)
    _say(started, f"saved {log['folder_bytes'] / 1e6:.2f} MB")
    if options.results:
        options.results.mkdir(parents=True, exist_ok=True)
        log["seconds"] = round(time.monotonic() - started, 1)
        (options.results / "training.json").write_text(json.dumps(log, indent=1) + "\n")
        pipe = family.load(options.output, torch.bfloat16).to(device)
        report(family, pipe, drawn, decoded, options.results, sizes)
    _say(started, "done")


def make_trained_autoencoder(
    family: VideoFamily,
    vae: nn.Module | None,
    numbers: torch.Tensor,
    sizes: Sizes,
    options: argparse.Namespace,
    log: dict[str, object],
) -> nn.Module:
    """A float32 autoencoder on the CPU, a new one or `vae` trained further, that knows its latents' statistics."""
    seconds = options.vae_seconds
    if seconds is None:
        seconds = 0 if vae else sizes.vae_seconds
    if vae and not seconds:
        return vae
    torch.manual_seed(options.seed)
    vae = vae or family.make_vae(small=options.smoke)
    trained = copy.deepcopy(vae).to(numbers.device, torch.bfloat16)
    masters = [weight.detach().clone().to(numbers.device) for weight in vae.parameters()]
    pace = Pace("vae", seconds, sizes.vae_rate, most_steps=sizes.steps)
    averages = train_autoencoder(
        family, trained, masters, numbers, pace, batches=sizes.vae_batches, frames=sizes.frames
    )
    log["vae"] = pace.losses
    _take_weights(list(vae.parameters()), averages)
    sample = clips.render_clips(numbers[:64], frames=sizes.frames, size=sizes.size).bfloat16()
    mean, deviation = latent_statistics(family, trained, sample)
    family.set_statistics(vae, mean.cpu(), deviation.cpu())
    return vae


def make_trained_flow(
    family: VideoFamily,
    flow: nn.Module,
    bank: Bank,
    sizes: Sizes,
    seconds: float,
    options: argparse.Namespace,
    log: dict[str, object],
) -> nn.Module:
    """The float32 model on the CPU, trained for `seconds`."""
    torch.manual_seed(options.seed)
    trained = copy.deepcopy(flow)
    masters = put_in_bf16(trained, bank.latents.device)
    if not options.smoke:
        compile_blocks(trained)
    pace = Pace("flow", seconds, sizes.flow_rate, most_steps=sizes.steps)
    averages = train_flow(family, trained, masters, bank, pace, batch=sizes.flow_batch, seed=options.seed)
    log["flow"] = pace.losses
    log["flow_clips"] = pace.pictures
    _take_weights([weight for _, weight in trained_weights(flow)], averages)
    return flow.requires_grad_(False).eval()


def held_out_reconstructions(vae: nn.Module, sizes: Sizes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Clips drawn of held-out scenes in -1..1, and what the autoencoder makes of them."""
    rng = random.Random(7)
    held_out = clips.held_out_prompts(min(32, sizes.prompts), "reporting")
    numbers = clips.pack([clips.draw_clip(rng, item.scene) for item in held_out]).to(device)
    drawn = clips.render_clips(numbers, frames=sizes.frames, size=sizes.size)
    return drawn, reconstruct(vae, drawn)


def report(
    family: VideoFamily,
    pipe: diffusers.DiffusionPipeline,
    drawn: torch.Tensor,
    decoded: torch.Tensor,
    results: Path,
    sizes: Sizes,
) -> None:
    """Paint held-out prompts; write a sheet and how often they are followed, beside what drawn clips give."""
    held_out = clips.held_out_prompts(sizes.prompts, "reporting")
    shape = {"frames": sizes.frames, "size": sizes.size, "steps": sizes.sample_steps}
    painted = paint_clips(family, pipe, held_out, **shape)
    if not painted.isfinite().all():
        raise FloatingPointError("the pipeline paints values that are not finite")
    sheet = contact_sheet(clips.film_strips(painted[:16]), [item.prompt for item in held_out[:16]], columns=2, cell=720)
    sheet.save(results / "samples.png", optimize=True)
    read = {
        f"painted, guidance {GUIDANCE}": painted,
        "drawn": (drawn + 1) / 2,
        "drawn, through the autoencoder": (decoded + 1) / 2,
    }
    for guidance in (1.0, 5.0):
        read[f"painted, guidance {guidance}"] = paint_clips(
            family, pipe, held_out[: len(drawn)], **shape, guidance=guidance
        )
    table = {}
    for name, batch in read.items():
        scenes = [item.scene for item in held_out[: len(batch)]]
        table[name] = {"clips": len(batch), **agreement(read_clips(batch.to(pipe.device)), scenes)}
        print(f"{name:32s} " + "  ".join(f"{key} {value}" for key, value in table[name].items()), flush=True)
    (results / "prompt_following.json").write_text(json.dumps(table, indent=1) + "\n")


@torch.no_grad()
def _take_weights(weights: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)


def _say(started: float, text: str) -> None:
    print(f"[{time.monotonic() - started:5.0f} s] {text}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=sorted(FAMILIES), required=True)
    parser.add_argument("--output", type=Path, required=True, help="folder of the pipeline")
    parser.add_argument("--results", type=Path, help="folder of the sheet, the log and the table")
    parser.add_argument("--minutes", type=float, default=9.0, help="wall-clock budget of everything")
    parser.add_argument("--vae-seconds", type=float, help="of them, for the autoencoder; default: 0 with --resume")
    parser.add_argument("--seed", type=int, default=0, help="another one with --resume draws other clips")
    parser.add_argument("--state", type=Path, help="folder to keep the float32 pipeline in")
    parser.add_argument("--resume", type=Path, help="folder of an earlier --state")
    parser.add_argument("--smoke", action="store_true", help="two steps of everything at toy size on the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
