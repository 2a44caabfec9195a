"""``dit-accel inspect``: plot one accelerated run: computed steps, layers, and parts of the image."""

import json
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from dit_accel.cli.options import RunOptions, option, parse_call, preset_option, takes_options
from dit_accel.errors import ArgumentError, ShapeError, shown
from dit_accel.serving.input_images import read_image
from dit_accel.serving.loading import load_pipeline
from dit_accel.serving.media import Clips, medium_of, size_note
from dit_accel.serving.outputs import make_folder, require_writable
from dit_accel.serving.pipelines import call_arguments, timed_call
from dit_accel.tools.demo import model_fps
from dit_accel.tools.extras import require_extra
from dit_accel.tools.files import write_whole


@dataclass(frozen=True, kw_only=True)
class InspectOptions(RunOptions):
    preset: str | None = preset_option()  # `none` is refused
    prompt: str = option("Text prompt of the image or video.", "--prompt", "-p", default=MISSING)
    output: Path = option("Folder to write into; created if missing.", "--output", "-o", default=MISSING)
    layer: str | None = option(
        "Block whose computed parts are shown over the image; for presets of level head.", show_default="the middle one"
    )


@takes_options()
def command(options: InspectOptions) -> None:
    """Run once and plot the computed steps, layers and parts of the image.

    Writes picture.png or clip.mp4, timeline.png (step modes, times, forecast errors), density.png (computed share by
    layer and step), report.json and, for presets of level head, symbols-LAYER.png (for videos, of the middle frame).
    """
    from dit_accel import accelerate_pipeline
    from dit_accel.pipeline import preset_for
    from dit_accel.tools.media.figures import density_figure, timeline_figure

    console = Console(quiet=options.quiet)
    require_extra("matplotlib", "dit-accel inspect, which writes plots,")
    plain = "a plain run has nothing to inspect; choose a preset"
    preset, overrides, loading = options.preset_and_loading(plain)
    output, named = options.output, {"prompt": options.prompt, **options.sizes, "image": read_image(options.image)}
    others = parse_call(options.call)
    make_folder(output, "output")
    figures = [output / name for name in ("timeline.png", "density.png", "report.json")]
    for path in (*figures, *output.glob("symbols-*.png")):
        require_writable(path, "output", force=options.force)

    pipe = load_pipeline(options.model, loading, console)
    medium = medium_of(pipe, model_fps(options.model))
    file = output / ("clip.mp4" if isinstance(medium, Clips) else "picture.png")
    medium.require_output(file, compare=False, force=options.force)
    arguments = call_arguments(pipe, options.model, named, others)
    accelerate_pipeline(pipe, preset_for(pipe, preset, **overrides))
    run = timed_call(pipe, arguments, options.seed)
    result, report = run.results[0], pipe.dit_accel.report()
    if options.layer is not None:
        _require_symbols(pipe, options.layer)

    with console.status("plotting"):
        medium.write(result, file, run.sound(0))
        timeline, density, facts = figures
        timeline_figure(report, timeline)
        density_figure(report, density)
        write_whole(facts, json.dumps(report.to_json(), indent=2) + "\n")
        _draw_symbols(pipe, result, options.layer, output, console)
    console.out(str(report), highlight=False)
    if note := size_note(named, result):
        console.out(f"note: {note}", highlight=False)
    console.out(f"wrote {file.name}, timeline.png, density.png and report.json to {output}", highlight=False)


def _require_symbols(pipe: Any, layer: str) -> None:
    symbols = pipe.dit_accel.symbols()
    if layer not in symbols:
        valid = ", ".join(symbols) or "none in this run; use a preset of level head, and more --steps"
        raise ArgumentError("layer", f"no symbols for layer {shown(layer)}; layers: {valid}")


def _draw_symbols(pipe: Any, result: Any, layer: str | None, output: Path, console: Console) -> None:
    from dit_accel.tools.media.figures import symbol_map

    if not (symbols := pipe.dit_accel.symbols()):
        level = pipe.dit_accel.preset.forecast.level
        console.out(f"no symbol map: this run has no symbols (level {level})", highlight=False)
        return
    drawn = layer or list(symbols)[len(symbols) // 2]
    path = output / f"symbols-{drawn}.png"
    picture, frame, frames = _middle(pipe, result)
    place = {"frame": frame, "frames": frames, "order": pipe.dit_accel.token_order}
    try:
        symbol_map(picture, pipe.dit_accel.layout, symbols[drawn], path, title=drawn, **place)
    except ShapeError as error:
        console.out(f"no symbol map: {error}", highlight=False)
    else:
        console.out(f"wrote {path}", highlight=False)


def _middle(pipe: Any, result: Any) -> tuple[Any, int, int]:
    """Return an image or a video's middle frame, the index of its latent frame, and the number of latent frames."""
    from PIL import Image

    if isinstance(result, Image.Image):
        return result, 0, 1
    factor = pipe.vae_scale_factor_temporal  # frames per latent frame; the first latent frame is one frame
    frames = (len(result) - 1) // factor + 1
    return Image.fromarray(result[frames // 2 * factor]), frames // 2, frames
