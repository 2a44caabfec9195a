"""``dit-accel recommend``: the preset for a model, GPU and number of steps."""

from __future__ import annotations

from typing import Annotated

import typer

from dit_accel.cli import options
from dit_accel.serving.loras import parse_loras


def command(
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="Model id on the Hugging Face Hub, folder, demo model, or a family's name."),
    ],
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="GPU: 4090, RTX 3060, a100, h100, …", show_default="this machine's GPU")
    ] = None,
    steps: options.StepsOption = None,
    height: options.HeightOption = None,
    width: options.WidthOption = None,
    num_frames: Annotated[
        int | None,
        typer.Option("--frames", "--num-frames", min=1, max=options.MOST_FRAMES, help="Number of frames; video only."),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option("--lora", metavar="LORA[:WEIGHT]", help="LoRA to load, as in `dit-accel generate`. Repeatable."),
    ] = None,
    quantized: Annotated[bool, typer.Option("--quantized", help="The model's weights are quantised.")] = False,
    distilled: Annotated[bool, typer.Option("--distilled", help="The model is distilled for few steps.")] = False,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="Number of GPUs that share one image or video.")] = 1,
) -> None:
    """Recommend a preset, and print the lines to copy. No model is loaded.

    dit-accel recommend --model black-forest-labs/FLUX.1-dev --gpu 4090

    dit-accel recommend --model Wan-AI/Wan2.2-T2V-A14B-Diffusers --gpu a100 --height 480 --width 832 --frames 81
    """
    from rich.console import Console
    from rich.table import Column, Table

    from dit_accel.tools.advise.recommend import recommend

    found = recommend(
        model,
        gpu=gpu or _present_gpu(),
        steps=steps,
        height=height,
        width=width,
        frames=num_frames,
        loras=parse_loras(lora),
        quantized=quantized,
        distilled=distilled,
        gpus=gpus,
    )
    console = Console()
    table = Table(Column("preset", no_wrap=True), "use it as", box=None, pad_edge=False)
    for choice in found.choices:
        table.add_row(*choice)
    console.out(f"{found.model.name}: {found.model.title}\n", highlight=False)
    console.print(table)
    typer.echo()
    for note in found.notes:
        console.out(f"- {note}", highlight=False)
    typer.echo(f"\n{found.python}\n{found.shell}".rstrip())


def _present_gpu() -> str | None:
    """Return the known name of this machine's GPU; None = another GPU, or none."""
    import torch

    from dit_accel.tools.advise.cards import known_card

    return known_card(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
