"""``dit-accel inspect``: one accelerated run, drawn: when it computed, which layers, and which parts of the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dit_accel.cli import options
from dit_accel.cli.pipelines import call_arguments, load_pipeline, read_image, require_images, timed_call
from dit_accel.errors import ShapeError

if TYPE_CHECKING:
    from PIL import Image
    from rich.console import Console


def command(
    prompt: options.PromptOption,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write into; made if it does not exist.")],
    model: options.ModelOption = options.DEFAULT_MODEL,
    preset: options.PresetOption = None,
    settings: options.SetOption = None,
    layer: Annotated[
        str | None,
        typer.Option("--layer", help="Layer whose symbols are drawn over the picture.", show_default="the middle one"),
    ] = None,
    steps: options.StepsOption = None,
    seed: options.SeedOption = 0,
    height: options.HeightOption = None,
    width: options.WidthOption = None,
    image: options.ImageOption = None,
    dtype: options.DtypeOption = None,
    device: options.DeviceOption = None,
    offload: options.OffloadOption = "none",
    quiet: options.QuietOption = False,
) -> None:
    """Run once and draw what was computed.

    Writes picture.png, timeline.png (step modes, times, forecast errors), density.png (computed share by layer and
    step), report.json and, for presets of scope head, symbols-LAYER.png.
    """
    from rich.console import Console

    from dit_accel import accelerate_pipeline
    from dit_accel.visualize import density_figure, timeline_figure

    console = Console(quiet=quiet)
    if preset == "none":
        raise options.OptionError("--preset", "a plain run has nothing to inspect; choose a preset")
    overrides = options.parse_overrides(settings)
    if preset is not None:
        options.choose_preset(preset, overrides)  # a misspelt preset should not wait for the model to load
    given = {"prompt": prompt, "steps": steps, "height": height, "width": width}
    given["image"] = read_image(image) if image else None
    _make_folder(output)

    pipe = load_pipeline(model, device=device, dtype=dtype, offload=offload, console=console)
    require_images(pipe)
    arguments = call_arguments(pipe, model, given)
    accelerate_pipeline(pipe, options.choose_preset(preset, overrides, pipe))
    picture = timed_call(pipe, arguments, seed).images[0]
    report = pipe.dit_accel.report()

    with console.status("drawing"):
        picture.save(output / "picture.png")
        timeline_figure(report, output / "timeline.png")
        density_figure(report, output / "density.png")
        (output / "report.json").write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
        _draw_symbols(pipe, picture, layer, output, console)
    console.out(str(report), highlight=False)
    console.out(f"wrote picture.png, timeline.png, density.png and report.json to {output}", highlight=False)


def _draw_symbols(pipe: Any, picture: Image.Image, layer: str | None, output: Path, console: Console) -> None:
    from dit_accel.visualize import symbol_map

    symbols = pipe.dit_accel.symbols()
    scope = pipe.dit_accel.preset.forecast.scope
    if layer is not None and layer not in symbols:
        valid = (
            f"layers: {', '.join(symbols)}" if symbols else f"scope {scope} has no symbols; use a preset of scope head"
        )
        raise options.OptionError("--layer", f"no symbols of layer {layer!r}; {valid}")
    if not symbols:
        console.out(f"no symbol map: this run has no symbols (scope {scope})", highlight=False)
        return
    drawn = layer or list(symbols)[len(symbols) // 2]
    path = output / f"symbols-{drawn}.png"
    try:
        symbol_map(picture, pipe.dit_accel.layout, symbols[drawn], path, title=drawn)
    except ShapeError as error:
        console.out(f"no symbol map: {error}", highlight=False)
    else:
        console.out(f"wrote {path}", highlight=False)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise options.OptionError("--output", f"{folder} can't be made: {error.strerror}") from None
    options.require_writable(folder / "report.json", "--output")
