"""``dit-accel recommend``: the preset for a model, GPU and number of steps."""

from dataclasses import MISSING, dataclass

import typer

from dit_accel.cli.options import MOST_FRAMES, SizeOptions, option, parse_loras, takes_options


@dataclass(frozen=True, kw_only=True)
class RecommendOptions(SizeOptions):
    model: str = option(
        "Model id on the Hugging Face Hub, folder, demo model, or a family's name.", "--model", "-m", default=MISSING
    )
    gpu: str | None = option("GPU: 4090, RTX 3060, a100, h100, …", show_default="this machine's GPU")
    num_frames: int | None = option("Number of frames; video only.", "--frames", "--num-frames", min=1, max=MOST_FRAMES)
    lora: list[str] | None = option("LoRA to load, as in `dit-accel generate`. Repeatable.", metavar="LORA[:WEIGHT]")
    quantized: bool = option("The model's weights are quantised.", "--quantized", default=False)
    distilled: bool = option("The model is distilled for few steps.", "--distilled", default=False)
    gpus: int = option("Number of GPUs that share one image or video.", default=1, min=1)


@takes_options()
def command(options: RecommendOptions) -> None:
    """Recommend a preset, and print the lines to copy. No model is loaded.

    dit-accel recommend --model black-forest-labs/FLUX.1-dev --gpu 4090

    dit-accel recommend --model Wan-AI/Wan2.2-T2V-A14B-Diffusers --gpu a100 --height 480 --width 832 --frames 81
    """
    import torch

    from dit_accel.tools.advise.cards import known_card
    from dit_accel.tools.advise.recommend import recommend

    present = known_card(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    found = recommend(
        options.model,
        gpu=options.gpu or present,
        steps=options.steps,
        height=options.height,
        width=options.width,
        frames=options.num_frames,
        loras=parse_loras(options.lora),
        quantized=options.quantized,
        distilled=options.distilled,
        gpus=options.gpus,
    )
    typer.echo(f"{found.model.name}: {found.model.title}\n")
    for preset, use in (("preset", "use it as"), *found.choices):
        typer.echo(f"{preset:<14}{use}")
    notes = "\n".join(f"- {note}" for note in found.notes)
    typer.echo(f"\n{notes}\n\n{found.python}\n{found.shell}".rstrip())
