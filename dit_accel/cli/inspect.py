"""``dit-accel inspect``: one accelerated run, drawn: when it computed, which layers, and which parts of the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dit_accel.cli import options
from dit_accel.cli.loading import Loading, load_pipeline
from dit_accel.cli.loras import parse_loras, with_projections
from dit_accel.cli.media import Clips, medium_of
from dit_accel.cli.outputs import ForceOption, require_writable
from dit_accel.cli.pipelines import call_arguments, read_image, timed_call
from dit_accel.errors import ShapeError, shortened, shown
from dit_accel.tools.demo import model_fps
from dit_accel.tools.extras import require_extra
from dit_accel.tools.files import write_whole

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image
    from rich.console import Console


def command(
    prompt: options.PromptOption,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write into; made if it does not exist.")],
    model: options.ModelOption = options.DEFAULT_MODEL,
    preset: options.PresetOption = None,
    settings: options.SetOption = None,
    call: options.CallOption = None,
    layer: Annotated[
        str | None,
        typer.Option(
            "--layer",
            help="Block whose symbols, what it computes, are drawn over the picture; presets of level head.",
            show_default="the middle one",
        ),
    ] = None,
    steps: options.StepsOption = None,
    seed: options.SeedOption = 0,
    height: options.HeightOption = None,
    width: options.WidthOption = None,
    num_frames: options.FramesOption = None,
    image: options.ImageOption = None,
    dtype: options.DtypeOption = None,
    device: options.DeviceOption = None,
    offload: options.OffloadOption = "none",
    lora: options.LoraOption = None,
    quantize: options.QuantizeOption = None,
    force: ForceOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Run once and draw what was computed.

    Writes picture.png or clip.mp4, timeline.png (step modes, times, forecast errors), density.png (computed share by
    layer and step), report.json and, for presets of level head, symbols-LAYER.png (of a clip, its middle frame).
    """
    from rich.console import Console

    from dit_accel import accelerate_pipeline
    from dit_accel.tools.figures import density_figure, timeline_figure

    console = Console(quiet=quiet)
    require_extra("matplotlib", "dit-accel inspect, which draws figures,")
    plain = "a plain run has nothing to inspect; choose a preset"
    preset, overrides = options.named_preset(preset, model, settings, plain)
    loading = Loading(device, dtype, offload, parse_loras(lora), quantize)
    overrides = with_projections(preset, overrides, loading.loras)
    given = {"prompt": prompt, "steps": steps, "height": height, "width": width, "num-frames": num_frames}
    given["image"] = read_image(image)
    others = options.parse_call(call)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise options.OptionError("--output", f"{shortened(str(output))} can't be made: {reason}") from None
    figures = [output / name for name in ("timeline.png", "density.png", "report.json")]
    for path in (*figures, *output.glob("symbols-*.png")):
        require_writable(path, "--output", force=force)

    pipe = load_pipeline(model, loading, console)
    medium = medium_of(pipe, model_fps(model))
    file = output / ("clip.mp4" if isinstance(medium, Clips) else "picture.png")
    medium.require_output(file, compare=False, force=force)
    arguments = call_arguments(pipe, model, given, others)
    accelerate_pipeline(pipe, options.choose_preset(preset, overrides, pipe))
    made = timed_call(pipe, arguments, seed).results[0]
    report = pipe.dit_accel.report()
    if layer is not None:
        _require_symbols(pipe, layer)

    with console.status("drawing"):
        medium.write(made, file)
        timeline, density, facts = figures
        timeline_figure(report, timeline)
        density_figure(report, density)
        write_whole(facts, json.dumps(report.to_json(), indent=2) + "\n")
        _draw_symbols(pipe, made, layer, output, console)
    console.out(str(report), highlight=False)
    console.out(f"wrote {file.name}, timeline.png, density.png and report.json to {output}", highlight=False)


def _require_symbols(pipe: Any, layer: str) -> None:
    """Checks that the run has symbols of a layer."""
    symbols = pipe.dit_accel.symbols()
    if layer not in symbols:
        level = pipe.dit_accel.preset.forecast.level
        fix = "run more --steps" if level == "head" else "use a preset of level head"
        none = f"a run of level {level} has no symbols here; {fix}"
        valid = f"layers: {', '.join(symbols)}" if symbols else none
        raise options.OptionError("--layer", f"no symbols of layer {shown(layer)}; {valid}")


def _draw_symbols(pipe: Any, made: Image.Image | np.ndarray, layer: str | None, output: Path, console: Console) -> None:
    from dit_accel.tools.figures import symbol_map

    symbols = pipe.dit_accel.symbols()
    if not symbols:
        level = pipe.dit_accel.preset.forecast.level
        console.out(f"no symbol map: this run has no symbols (level {level})", highlight=False)
        return
    drawn = layer or list(symbols)[len(symbols) // 2]
    path = output / f"symbols-{drawn}.png"
    picture, frame, frames = _middle(pipe, made)
    place = {"frame": frame, "frames": frames, "order": pipe.dit_accel.token_order}
    try:
        symbol_map(picture, pipe.dit_accel.layout, symbols[drawn], path, title=drawn, **place)
    except ShapeError as error:
        console.out(f"no symbol map: {error}", highlight=False)
    else:
        console.out(f"wrote {path}", highlight=False)


def _middle(pipe: Any, made: Image.Image | np.ndarray) -> tuple[Image.Image, int, int]:
    """A picture itself or a clip's middle one, the latent frame that it belongs to, and the number of latent frames."""
    from PIL import Image

    if isinstance(made, Image.Image):
        return made, 0, 1
    factor = pipe.vae_scale_factor_temporal  # the first latent frame is one frame, and each other this many
    frames = (len(made) - 1) // factor + 1
    return Image.fromarray(made[frames // 2 * factor]), frames // 2, frames
