"""Train a demo model from scratch in ten minutes on one H200, and write it as a diffusers pipeline folder.

    python -m scripts.demo_training.train --model demo-wan --output dit_accel/tools/assets/demo-wan --results RESULTS
    python -m scripts.demo_training.train ... --state STATE        # also keep the pipeline in float32, to resume from
    python -m scripts.demo_training.train ... --resume STATE       # resume the transformer and the text encoders
    python -m scripts.demo_training.train ... --resume STATE --vae-seconds 60               # ... and the autoencoder
    python -m scripts.demo_training.train ... --vae-seconds 60 --freeze-encoder  # its decoder: the latents stay
    python -m scripts.demo_training.train ... --resume STATE --vae OTHER         # with the autoencoder of OTHER
    python -m scripts.demo_training.train --model demo-wan --output /tmp/demo --smoke  # toy size, on any CPU

Writes the pipeline to --output; a sheet of held-out prompts, the log and the prompt-following table to --results.
"""

import argparse
import copy
import sys
import time
from functools import partial
from pathlib import Path

import diffusers
import torch
from diffusers import DiffusionPipeline
from torch import nn

from scripts.demo_training.flow import Bank, train_flow
from scripts.demo_training.hunyuan import Hunyuan
from scripts.demo_training.image_demo import ImageDemo
from scripts.demo_training.loading import load
from scripts.demo_training.texture_demo import CollageDemo, TextureDemo
from scripts.demo_training.training import Pace, configure_torch, draw_bank, put_in_bf16, take_weights, trained_weights
from scripts.demo_training.video_demo import VideoDemo
from scripts.demo_training.wan import Wan
from scripts.tables import as_json

DEMOS = {
    "demo-flux": ImageDemo,
    "demo-wan": partial(VideoDemo, Wan()),
    "demo-hunyuan": partial(VideoDemo, Hunyuan()),
    "demo-textures": TextureDemo,
    "demo-pictures": CollageDemo,
}
SHARD_SIZE = "14MB"  # of the state's files

Log = dict[str, object]
Demo = ImageDemo | VideoDemo


def train_demo(demo: Demo, options: argparse.Namespace) -> None:
    """Train, export, and report, all within `options.minutes`; an autoencoder may take all of it."""
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {text}", flush=True)

    device = torch.device("cpu" if options.smoke else "cuda")
    configure_torch()
    log: Log = {
        "device": "cpu" if options.smoke else torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "diffusers": diffusers.__version__},
        "command": " ".join(sys.argv),
    }
    family, sizes = demo.family, demo.sizes

    prompts, numbers = draw_bank(demo.draw, demo.pack, sizes.scenes, options.seed, parallel=not options.smoke)
    numbers = numbers.to(device)
    end = started + options.minutes * 60 - sizes.finish_seconds  # of the training
    say(f"generated {len(prompts)} scenes")

    resumed = load(options.resume) if options.resume else None
    vae = load(options.vae).vae if options.vae else resumed and resumed.vae
    vae = make_trained_autoencoder(demo, vae, numbers, options, log)
    quick_vae = demo.quick(copy.deepcopy(vae), device)
    log["vae_psnr_db"] = demo.autoencoder_psnr(quick_vae, device)
    say(f"autoencoder: {log['vae_psnr_db']} dB")

    tokenizers = family.tokenizers_of(resumed) if resumed else family.make_tokenizers(demo.words)
    torch.manual_seed(options.seed)
    flow = family.flow_of(resumed) if resumed else family.make_flow(tokenizers, small=options.smoke)
    if time.monotonic() < end:
        text = tuple(ids.to(device) for ids in family.tokenize(tokenizers, ["", *prompts]))
        bank = demo.make_bank(quick_vae, numbers, text)
        log[f"bank_{demo.unit}"] = sum(map(len, bank.latents.values()))
        say(f"bank of {log[f'bank_{demo.unit}']} {demo.unit}")
        flow = make_trained_flow(demo, flow, bank, end - time.monotonic(), options, log)
    pipe = family.assemble(vae, flow, tokenizers)
    if options.state:
        pipe.save_pretrained(options.state, max_shard_size=SHARD_SIZE)
    for part in (vae, flow):
        part.to(torch.bfloat16)
    log["folder_bytes"] = demo.save(pipe, options.output)
    say(f"saved {log['folder_bytes'] / 1e6:.2f} MB")
    if options.results:
        options.results.mkdir(parents=True, exist_ok=True)
        log["seconds"] = round(time.monotonic() - started, 1)
        (options.results / "training.json").write_text(as_json(log))
        report(demo, load(options.output, torch.bfloat16).to(device), options.results)
    say("done")


def make_trained_autoencoder(
    demo: Demo, vae: nn.Module | None, numbers: torch.Tensor, options: argparse.Namespace, log: Log
) -> nn.Module:
    """Return a float32 autoencoder on the CPU, new or continued from `vae`, with its latents' statistics set."""
    seconds = options.vae_seconds
    if seconds is None:
        seconds = 0 if vae else demo.sizes.vae_seconds
    if vae and not seconds:
        return vae
    if options.freeze_encoder:
        for part in (vae.encoder, vae.quant_conv):
            if part is not None:  # FLUX's layout has no convolution there
                part.requires_grad_(False)
    torch.manual_seed(options.seed)
    vae = vae or demo.family.make_vae(small=options.smoke)
    pace = Pace("vae", seconds, demo.sizes.vae_rate, most_steps=demo.sizes.steps)
    demo.train_autoencoder(vae, numbers, pace)
    log["vae"] = pace.losses
    return vae


def make_trained_flow(
    demo: Demo, flow: nn.Module, bank: Bank, seconds: float, options: argparse.Namespace, log: Log
) -> nn.Module:
    """Return the float32 model on the CPU, trained for `seconds`."""
    torch.manual_seed(options.seed)
    trained = copy.deepcopy(flow)
    masters = put_in_bf16(trained, torch.device("cpu" if options.smoke else "cuda"))
    if not options.smoke:
        demo.family.compile_blocks(trained)
    pace = Pace("flow", seconds, demo.sizes.flow_rate, most_steps=demo.sizes.steps)
    averages = train_flow(demo.family, trained, masters, bank, pace, demo.turns(), demo.flow_seed(options.seed))
    log["flow"] = pace.losses
    log[f"flow_{demo.unit}"] = pace.pictures
    take_weights([weight for _, weight in trained_weights(flow)], averages)
    return flow.requires_grad_(False).eval()


def report(demo: Demo, pipe: DiffusionPipeline, results: Path) -> None:
    """Sample held-out prompts; write a sheet and the prompt-following table, with rendered scenes for comparison."""
    batches = demo.paint(pipe, demo.held_out(demo.sizes.prompts, "reporting"))
    if not all(batch.isfinite().all() for batch, _ in batches.values()):
        raise FloatingPointError("the pipeline returns values that are not finite")
    demo.sheet(batches).save(results / "samples.webp", quality=80)
    table = {}
    for name, (batch, prompts) in batches.items():
        scenes = [item.scene for item in prompts]
        table[name] = {demo.unit: len(batch), **demo.agreement(demo.read(batch.to(pipe.device)), scenes)}
        print(f"{name:36s} " + "  ".join(f"{key} {value}" for key, value in table[name].items()), flush=True)
    (results / "prompt_following.json").write_text(as_json(table))


def main() -> None:
    """Train, export, and report."""
    options = _options()
    train_demo(DEMOS[options.model](small=options.smoke), options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(DEMOS), required=True)
    parser.add_argument("--output", type=Path, required=True, help="folder of the pipeline")
    parser.add_argument("--results", type=Path, help="folder of the sheet, the log and the table")
    parser.add_argument("--minutes", type=float, default=10.0, help="wall-clock budget of everything")
    parser.add_argument("--vae-seconds", type=float, help="of them for the autoencoder; default: 0 with --resume")
    parser.add_argument("--seed", type=int, default=0, help="use another one with --resume for other scenes")
    parser.add_argument("--state", type=Path, help="folder to keep the float32 pipeline in")
    parser.add_argument("--resume", type=Path, help="folder of an earlier --state")
    parser.add_argument("--vae", type=Path, help="folder of an earlier --state, whose autoencoder replaces --resume's")
    parser.add_argument("--freeze-encoder", action="store_true", help="with --resume: train the decoder alone")
    parser.add_argument("--smoke", action="store_true", help="two steps of everything at toy size on the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
