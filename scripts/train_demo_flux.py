"""Trains the demo model from nothing in about nine minutes on one H200, and writes it as a FluxPipeline folder.

    python scripts/train_demo_flux.py --output dit_accel/tools/assets/demo-flux --results docs/results/demo-flux
    python scripts/train_demo_flux.py ... --state STATE                    # also keep what training can go on from
    python scripts/train_demo_flux.py ... --resume STATE --parts OUTPUT    # go on with the transformer alone
    python scripts/train_demo_flux.py --output /tmp/demo --smoke           # every step at toy size, on any CPU

Writes the pipeline to --output; a sheet of held-out prompts, the log and the prompt-following table to --results.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import diffusers
import torch
from demo_models.autoencoder import make_autoencoder, reconstruction_psnr, set_latent_statistics, train_autoencoder
from demo_models.drawing import draw_bank
from demo_models.exporting import assemble_pipeline, contact_sheet, load_state, paint_prompts, save_pipeline, save_state
from demo_models.flow import (
    LONG_TEXT,
    Bank,
    PromptedFlow,
    encode_pictures,
    fill_compile_cache,
    make_model,
    train_flow,
)
from demo_models.prompts import held_out_prompts
from demo_models.reading import agreement, read_pictures
from demo_models.rendering import pack_pictures, render
from demo_models.scenes import draw_picture
from demo_models.text_encoders import make_clip_tokenizer, make_t5_tokenizer, tokenize_prompts
from demo_models.training import Pace
from diffusers import AutoencoderKL, FluxPipeline


@dataclass(frozen=True)
class Sizes:
    """How large everything is; `steps` limits both trainings where it is set, instead of the clock."""

    pictures: int
    vae_channels: tuple[int, ...]
    vae_groups: int
    vae_batch: int
    vae_size: int
    vae_seconds: float
    vae_rate: float
    blocks: tuple[int, int]
    heads: int
    batches: dict[int, int]
    flow_rate: float
    finish_seconds: float
    sample_steps: int
    prompts: int
    steps: int | None = None


FULL = Sizes(
    pictures=30_000,
    vae_channels=(32, 48, 64, 80),
    vae_groups=2,
    vae_batch=24,
    vae_size=256,
    vae_seconds=110,
    vae_rate=2e-3,
    blocks=(2, 5),
    heads=4,
    batches={512: 128, 256: 256},
    flow_rate=1e-3,
    finish_seconds=28,
    sample_steps=50,
    prompts=128,
)

SMOKE = Sizes(
    pictures=6,
    vae_channels=(8, 8, 8, 8),
    vae_groups=2,
    vae_batch=1,
    vae_size=32,
    vae_seconds=1,
    vae_rate=1e-3,
    blocks=(1, 1),
    heads=1,
    batches={32: 1, 16: 1},
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
    sizes = SMOKE if options.smoke else FULL
    device = torch.device("cpu" if options.smoke else "cuda")
    torch.backends.cuda.enable_cudnn_sdp(False)  # torch 2.11's cuDNN attention faults in backward at these shapes
    torch.set_float32_matmul_precision("high")
    log: dict[str, object] = {
        "device": "cpu" if options.smoke else torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "diffusers": diffusers.__version__},
        "command": " ".join(sys.argv),
    }

    parallel = not options.smoke
    prompts, numbers = draw_bank(draw_picture, pack_pictures, sizes.pictures, options.seed, parallel=parallel)
    numbers = numbers.to(device)
    compiler = None
    if not options.smoke:
        arguments = (sizes.blocks, sizes.heads, sizes.batches)
        compiler = get_context("spawn").Process(target=fill_compile_cache, args=arguments)
        compiler.start()
    _say(started, f"drew {len(prompts)} scenes")

    if options.resume:
        vae = AutoencoderKL.from_pretrained(options.parts, subfolder="vae", torch_dtype=torch.bfloat16).to(device)
    else:
        vae = make_trained_autoencoder(numbers, sizes, options.seed, log)
    vae.requires_grad_(False).eval()
    log["vae_psnr_db"] = {size: held_out_psnr(vae, size, device) for size in sizes.batches}
    _say(started, f"autoencoder: {log['vae_psnr_db']} dB, scale {vae.config.scaling_factor:.4f}")

    tokenizers = make_clip_tokenizer(), make_t5_tokenizer()
    clip_ids, t5_ids = (ids.to(device) for ids in tokenize_prompts(["", *prompts], tokenizers))
    bank = Bank({size: encode_pictures(vae, numbers, size) for size in sizes.batches}, clip_ids, t5_ids)
    if compiler:
        compiler.join(timeout=60)
    _say(started, f"bank of {len(prompts)} pictures at {' and '.join(str(size) for size in sizes.batches)}; compiled")

    seconds = options.minutes * 60 - sizes.finish_seconds - (time.monotonic() - started)
    model = make_trained_flow(bank, tokenizers, sizes, seconds, options, log)
    vae.to(memory_format=torch.contiguous_format)
    pipe = assemble_pipeline(vae, model.transformer, tokenizers, (model.clip, model.t5))
    log["folder_bytes"] = save_pipeline(pipe, options.output)
    _say(started, f"saved {log['folder_bytes'] / 1e6:.2f} MB")
    if options.results:
        report(pipe, options.results, sizes)
        log["seconds"] = round(time.monotonic() - started, 1)
        (options.results / "training.json").write_text(json.dumps(log, indent=1) + "\n")
    _say(started, "done")


def make_trained_autoencoder(numbers: torch.Tensor, sizes: Sizes, seed: int, log: dict) -> AutoencoderKL:
    """A new autoencoder, trained on the pictures of `numbers`, that knows its latents' shift and scale."""
    torch.manual_seed(seed)
    vae = make_autoencoder(sizes.vae_channels, sizes.vae_groups)
    vae = vae.to(numbers.device, torch.bfloat16).to(memory_format=torch.channels_last)
    pace = Pace("vae", sizes.vae_seconds, sizes.vae_rate, most_steps=sizes.steps)
    train_autoencoder(vae, numbers, pace, batch=sizes.vae_batch, size=sizes.vae_size)
    log["vae"] = pace.losses
    with torch.no_grad():
        set_latent_statistics(vae, render(numbers[:64], max(sizes.batches)).bfloat16())
    return vae


def make_trained_flow(
    bank: Bank, tokenizers: tuple, sizes: Sizes, seconds: float, options: argparse.Namespace, log: dict
) -> PromptedFlow:
    """A model trained for `seconds`, from nothing or from `options.resume`; keeps its weights in `options.state`."""
    torch.manual_seed(options.seed)
    device = bank.t5_ids.device
    model, masters = make_model(sizes.blocks, sizes.heads, tokenizers, device=device)
    names = [name for name, _ in model.named_parameters()]
    if options.resume:
        state = load_state(options.resume)
        masters = [state[name].to(device) for name in names]
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), masters)
    if not options.smoke:
        model.transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
    pace = Pace("flow", seconds, sizes.flow_rate, most_steps=sizes.steps)
    averages = train_flow(model, masters, bank, pace, batches=sizes.batches)
    log["flow"] = pace.losses
    log["flow_pictures"] = pace.pictures
    if options.state:
        save_state(names, averages, options.state)
    final, _ = make_model(sizes.blocks, sizes.heads, tokenizers, device=device)  # the same weights, not compiled
    final.load_state_dict(model.state_dict())
    return final.requires_grad_(False).eval()


def held_out_psnr(vae: AutoencoderKL, size: int, device: torch.device) -> float:
    """The autoencoder's PSNR in dB on pictures of held-out scenes."""
    rng = random.Random(7)
    pictures = [draw_picture(rng, held_out.scene) for held_out in held_out_prompts(32, "reporting")]
    return round(reconstruction_psnr(vae, render(pack_pictures(pictures).to(device), size).bfloat16()), 2)


def report(pipe: FluxPipeline, results: Path, sizes: Sizes) -> None:
    """Paint held-out prompts; write a sheet and how often they are followed, beside what drawn pictures give."""
    results.mkdir(parents=True, exist_ok=True)
    large, small = max(sizes.batches), min(sizes.batches)
    held_out = held_out_prompts(sizes.prompts, "reporting")
    painted = paint_prompts(pipe, held_out, size=large, steps=sizes.sample_steps)
    painted_small = paint_prompts(pipe, held_out, size=small, steps=sizes.sample_steps)
    long_text = paint_prompts(pipe, held_out[:32], size=large, steps=sizes.sample_steps, text=LONG_TEXT)
    rng = random.Random(8)
    drawn = (render(pack_pictures([draw_picture(rng, item.scene) for item in held_out]), large) + 1) / 2
    pictures = {
        f"painted {large}px": painted,
        f"painted {small}px": painted_small,
        f"painted {large}px, text padded to {LONG_TEXT}": long_text,
        f"drawn {large}px": drawn,
    }
    table = {}
    for name, batch in pictures.items():
        scenes = [item.scene for item in held_out[: len(batch)]]
        table[name] = {"pictures": len(batch), **agreement(read_pictures(batch.to(pipe.device)), scenes)}
        print(f"{name:36s} " + "  ".join(f"{key} {value}" for key, value in table[name].items()), flush=True)
    (results / "prompt_following.json").write_text(json.dumps(table, indent=1) + "\n")

    captions = [item.prompt for item in held_out]
    captions = [*captions[:16], *(f"{small}px: {caption}" for caption in captions[:4])]
    enlarged = torch.nn.functional.interpolate(painted_small[:4], size=large)
    sheet = contact_sheet(torch.cat((painted[:16], enlarged)), captions, columns=5, cell=160)
    sheet.save(results / "samples.png", optimize=True)


def _say(started: float, text: str) -> None:
    print(f"[{time.monotonic() - started:5.0f} s] {text}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the pipeline")
    parser.add_argument("--results", type=Path, help="folder of the sheet, the log and the table")
    parser.add_argument("--minutes", type=float, default=9.0, help="wall-clock budget of everything")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="folder to keep the float32 weights in")
    parser.add_argument("--resume", type=Path, help="folder of an earlier --state")
    parser.add_argument(
        "--parts", type=Path, help="pipeline folder whose autoencoder to go on with (default: --output)"
    )
    parser.add_argument("--smoke", action="store_true", help="two steps of everything at toy size on the CPU")
    options = parser.parse_args()
    options.parts = options.parts or options.output
    return options


if __name__ == "__main__":
    main()
