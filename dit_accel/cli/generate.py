"""``dit-accel generate``: pictures from a prompt, faster, and on request beside the plain ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dit_accel.cli import options
from dit_accel.cli.pipelines import Output, call_arguments, load_pipeline, read_image, require_images, timed_call

if TYPE_CHECKING:
    from PIL import Image
    from rich.console import Console

    from dit_accel.presets import Preset
    from dit_accel.report import RunReport


def command(
    prompt: options.PromptOption,
    model: options.ModelOption = options.DEFAULT_MODEL,
    preset: options.PresetOption = None,
    settings: options.SetOption = None,
    steps: options.StepsOption = None,
    seed: options.SeedOption = 0,
    height: options.HeightOption = None,
    width: options.WidthOption = None,
    guidance: Annotated[
        float | None,
        typer.Option(
            "--guidance",
            help="guidance_scale; together with --negative-prompt on FLUX and HunyuanVideo true_cfg_scale, above 1.",
        ),
    ] = None,
    negative_prompt: Annotated[
        str | None,
        typer.Option("--negative-prompt", help="What the picture does not show. FLUX: needs --guidance > 1."),
    ] = None,
    image: options.ImageOption = None,
    num_images: Annotated[
        int | None, typer.Option("--num-images", min=1, help="Pictures of the prompt: NAME-0.png, NAME-1.png, …")
    ] = None,
    dtype: options.DtypeOption = None,
    device: options.DeviceOption = None,
    offload: options.OffloadOption = "none",
    output: Annotated[Path, typer.Option("--output", "-o", help="Picture file to write.")] = Path("output.png"),
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Also make the plain picture from the same seed; write NAME-plain.png and NAME-compare.png, and print "
            "speed-up, PSNR and SSIM. Both sides are warmed up before they are timed.",
        ),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write a figure of the run: step modes, times and forecast errors.")
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="Write times (seconds of the denoising loop), metrics and the report. psnr_db is null for identical "
            "pictures, and plain values are null without --compare.",
        ),
    ] = None,
    quiet: options.QuietOption = False,
) -> None:
    """Make pictures with an accelerated pipeline.

    dit-accel generate --prompt "a red star over the sea" --compare

    dit-accel generate --model black-forest-labs/FLUX.1-dev --prompt "a fox" --preset flux-quality --output fox.png
    """
    from rich.console import Console

    console = Console(quiet=quiet)
    for path, option in ((output, "--output"), (plot, "--plot"), (json_path, "--json")):
        if path is not None:
            options.require_writable(path, option)
    options.require_picture_suffix(output, "--output")
    plain_only = preset == "none"
    if plain_only and (compare or plot or settings):
        used = "--compare" if compare else "--plot" if plot else "--set"
        raise options.OptionError(used, "needs an accelerated run, and --preset none is plain")
    overrides = options.parse_overrides(settings)
    if preset is not None and not plain_only:
        options.choose_preset(preset, overrides)  # a misspelt preset should not wait for the model to load
    picture = read_image(image) if image else None

    pipe = load_pipeline(model, device=device, dtype=dtype, offload=offload, console=console)
    require_images(pipe)
    chosen = None if plain_only else options.choose_preset(preset, overrides, pipe)
    given = {
        "prompt": prompt,
        "negative-prompt": negative_prompt,
        "steps": steps,
        "height": height,
        "width": width,
        "guidance": guidance,
        "image": picture,
        "num-images": num_images,
    }
    arguments = call_arguments(pipe, model, given)
    plain, fast, report = _run(pipe, arguments, seed, chosen, compare=compare, quiet=quiet)

    for index, written in enumerate((fast or plain).images):
        file = _numbered(output, index, len((fast or plain).images))
        written.save(file)
        console.out(f"wrote {file}", highlight=False)
        if plain and fast:
            _write_comparison(file, plain, fast, index, console)
    summary = _summary(plain, fast, report)
    if plot:
        from dit_accel.visualize import timeline_figure

        timeline_figure(report, plot)
    if json_path:
        facts = {"model": model, "preset": chosen.name if chosen else None, "prompt": prompt, "seed": seed}
        json_path.write_text(json.dumps({**facts, **summary}, indent=2) + "\n", encoding="utf-8")
    _print_summary(console, summary, chosen)


def _run(
    pipe: Any, arguments: dict[str, Any], seed: int, preset: Preset | None, *, compare: bool, quiet: bool
) -> tuple[Output | None, Output | None, RunReport | None]:
    """The plain output, the accelerated output, and the accelerated run's report; None for what was not asked."""
    from dit_accel import accelerate_pipeline, accelerated

    if preset is not None:
        with accelerated(pipe, preset):
            pass  # raises now, and not after a plain run of minutes, if the preset does not fit the pipeline

    def call(label: str, **changes: Any) -> Output:
        pipe.set_progress_bar_config(disable=quiet, desc=label)
        return timed_call(pipe, {**arguments, **changes}, seed)

    plain = None
    if compare:
        call("warm-up", num_inference_steps=1)
    if compare or preset is None:
        plain = call("plain")
    if preset is None:
        return plain, None, None
    accelerate_pipeline(pipe, preset)
    if compare and pipe._execution_device.type == "cuda":
        call("compiling kernels")  # Triton compiles at first use, and only a whole run is sure to reach every kernel
    fast = call("accelerated")
    return plain, fast, pipe.dit_accel.report()


def _summary(plain: Output | None, fast: Output | None, report: RunReport | None) -> dict[str, Any]:
    """What --json holds about the run."""
    from dit_accel.metrics import psnr, ssim

    quality: dict[str, Any] = {"psnr_db": None, "ssim": None, "identical": None}
    if plain and fast:
        import numpy as np

        pairs = list(zip(plain.images, fast.images, strict=True))
        decibels = psnr(*(np.stack([np.asarray(picture) for picture in side]) for side in (plain.images, fast.images)))
        quality["identical"] = math.isinf(decibels)
        quality["psnr_db"] = None if quality["identical"] else decibels
        quality["ssim"] = sum(ssim(*pair) for pair in pairs) / len(pairs)
    return {
        "plain_seconds": plain and plain.denoising_seconds,
        "accelerated_seconds": fast and fast.denoising_seconds,
        "speedup": plain.denoising_seconds / fast.denoising_seconds if plain and fast else None,
        "plain_call_seconds": plain and plain.seconds,
        "accelerated_call_seconds": fast and fast.seconds,
        **quality,
        "computed_fraction": report.computed_fraction if report else 1.0,
        "report": report.to_json() if report else None,
    }


def _print_summary(console: Console, summary: dict[str, Any], preset: Preset | None) -> None:
    from rich.table import Table

    sides = {"plain": "plain", "accelerated": preset.name if preset else ""}
    shown = [side for side in sides if summary[f"{side}_seconds"] is not None]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for side in shown:
        table.add_column(sides[side], justify="right")
    rows = {
        "denoising": [f"{summary[f'{side}_seconds']:.2f} s" for side in shown],
        "whole call": [f"{summary[f'{side}_call_seconds']:.2f} s" for side in shown],
    }
    if preset:
        rows["computed fraction"] = [f"{summary['computed_fraction']:.3f}"]
    if summary["speedup"] is not None:
        rows["speed-up"] = [f"{summary['speedup']:.2f}×"]
        rows["PSNR"] = ["identical" if summary["identical"] else f"{summary['psnr_db']:.1f} dB"]
        rows["SSIM"] = [f"{summary['ssim']:.4f}"]
    for label, values in rows.items():
        table.add_row(label, *[""] * (len(shown) - len(values)), *values)
    console.print(table)
    for note in summary["report"]["notes"] if summary["report"] else ():
        console.out(f"note: {note}", highlight=False)


def _write_comparison(file: Path, plain: Output, fast: Output, index: int, console: Console) -> None:
    """NAME-plain and NAME-compare beside the picture NAME."""
    from dit_accel.visualize import comparison_strip

    labels = f"plain, {plain.denoising_seconds:.1f} s", f"accelerated, {fast.denoising_seconds:.1f} s"
    beside: dict[str, Image.Image] = {
        "plain": plain.images[index],
        "compare": comparison_strip(plain.images[index], fast.images[index], labels),
    }
    for suffix, picture in beside.items():
        path = file.with_stem(f"{file.stem}-{suffix}")
        picture.save(path)
        console.out(f"wrote {path}", highlight=False)


def _numbered(path: Path, index: int, count: int) -> Path:
    return path if count == 1 else path.with_stem(f"{path.stem}-{index}")
