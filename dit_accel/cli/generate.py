"""``dit-accel generate``: pictures and clips from a prompt, faster, and on request beside the plain ones."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dit_accel.cli import options
from dit_accel.cli.batch import Worker, make_folder, require_batches, require_one_source, run_jobs
from dit_accel.cli.comparison import Side, Sides, both_sides
from dit_accel.cli.jobs import read_jobs
from dit_accel.cli.loading import Loading
from dit_accel.cli.loras import parse_loras, with_projections
from dit_accel.cli.media import Clips, Pictures, numbered, require_plausible_output, unused
from dit_accel.cli.outputs import ForceOption, require_distinct, require_plot, require_writable
from dit_accel.cli.parallel import ParallelOption, leads, parse_degrees
from dit_accel.cli.pipelines import Setup, call_arguments, open_pipeline, read_image, start_pipeline, timed_call
from dit_accel.cli.ray_engine import ActorsOption, EngineOption, ray_engine, require_engine
from dit_accel.tools.demo import unknown_words
from dit_accel.tools.extras import require_extra
from dit_accel.tools.files import write_whole

if TYPE_CHECKING:
    from rich.console import Console

    from dit_accel.presets import Preset


def command(
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="What the picture or clip shows; this or --prompts.")
    ] = None,
    model: options.ModelOption = options.DEFAULT_MODEL,
    preset: options.PresetOption = None,
    settings: options.SetOption = None,
    call: options.CallOption = None,
    steps: options.StepsOption = None,
    seed: options.SeedOption = 0,
    height: options.HeightOption = None,
    width: options.WidthOption = None,
    guidance: Annotated[
        float | None,
        typer.Option(
            "--guidance",
            callback=options.require_finite,
            help="How strongly the prompt guides: guidance_scale of the pipeline's call; with --negative-prompt on "
            "FLUX and HunyuanVideo, and on demo models that are guided so, true_cfg_scale, which must be above 1.",
        ),
    ] = None,
    negative_prompt: Annotated[
        str | None,
        typer.Option(
            "--negative-prompt",
            help="What it should not show. On FLUX and HunyuanVideo it needs --guidance above 1.",
        ),
    ] = None,
    image: options.ImageOption = None,
    num_frames: options.FramesOption = None,
    fps: options.FpsOption = None,
    num_images: Annotated[
        int | None,
        typer.Option(
            "--num-images",
            min=1,
            max=options.MOST_IMAGES,
            help="Pictures of the prompt: NAME-0.png, NAME-1.png, …; not for video.",
        ),
    ] = None,
    dtype: options.DtypeOption = None,
    device: options.DeviceOption = None,
    offload: options.OffloadOption = "none",
    lora: options.LoraOption = None,
    quantize: options.QuantizeOption = None,
    parallel: ParallelOption = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="What to write: a picture (.png, .jpg, .webp, …); of a video model a clip (.mp4, with the "
            "extra `video`, or .gif) or, for a name without suffix, a folder of frames 0000.png, 0001.png, …",
            show_default="output.png, output-2.png, …, and .mp4 for video",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="Make one of each line of this file, into --output-dir: prompts, or in a .jsonl file objects with "
            "prompt and, where a line has its own, negative-prompt, seed, steps, height, width, num-frames, guidance.",
        ),
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir",
            help="Folder for --prompts: 0000.png, 0001.png, … (.mp4 for video) and manifest.jsonl, a line each with "
            "settings, checksum and report. The same command goes on where it was interrupted.",
        ),
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option(
            "--batch-size",
            min=1,
            max=options.MOST_IMAGES,
            help="With --prompts, without --image: most lines of one call of the pipeline; neighbours that differ in "
            "prompt, negative prompt and seed alone share one, and each prompt's own error decides its steps.",
        ),
    ] = 1,
    engine: EngineOption = "process",
    actors: ActorsOption = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Also make the plain one from the same seed; write NAME-plain and NAME-compare, the two side by side, "
            "for clips NAME-strip.png too (some frames, plain above accelerated), and print speed-up, PSNR over all "
            "frames and their mean SSIM. Both sides are warmed up before they are timed, and timed in turn.",
        ),
    ] = False,
    repeats: options.RepeatsOption = options.REPEATS,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", help="Write a figure of the run: step modes, times, forecast errors. Needs the extra `plots`."
        ),
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="Write times (seconds of the denoising loop, medians and each), metrics and the report. psnr_db is "
            "null where both are identical, and plain values are null without --compare.",
        ),
    ] = None,
    force: ForceOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Make pictures or clips with an accelerated pipeline.

    dit-accel generate --prompt "a red star over the sea" --compare

    dit-accel generate --model black-forest-labs/FLUX.1-dev --prompt "a fox" --preset quality --output fox.png

    dit-accel generate --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --prompt "a fox runs" --output fox.mp4 --compare
    """
    from rich.console import Console

    alone = {"--output": output, "--json": json_path, "--plot": plot, "--compare": compare, "--num-images": num_images}
    require_one_source(prompt, prompts, output_dir, alone)
    require_batches(batch_size, prompts, image)
    require_engine(engine, actors, {"--prompts": prompts, "--parallel": parallel, "--device": device})
    degrees = parse_degrees(parallel, {"--compare": compare, "--offload": offload != "none"})
    if not leads():
        output = plot = json_path = None
        quiet = True
    console = Console(quiet=quiet)
    if json_path is not None:
        require_writable(json_path, "--json", force=force)
    if plot is not None:
        require_plot(plot, "--plot", force=force)
        require_extra("matplotlib", "--plot")
    if output is not None:
        for file in numbered(output, num_images or 1):
            require_plausible_output(file, compare=compare, force=force)
    preset, overrides = options.named_preset(preset, model, settings)
    if preset == "none" and (compare or plot or settings):
        used = "--compare" if compare else "--plot" if plot else "--set"
        raise options.OptionError(used, "needs an accelerated run, and --preset none is plain")
    if preset == "none" and degrees.get("branches", 1) > 1:
        raise options.OptionError("--parallel", "branches are shared in an accelerated run; --preset exact will do")
    loading = Loading(device, dtype, offload, parse_loras(lora), quantize)
    overrides = with_projections(preset, overrides, loading.loras)
    picture, others = read_image(image), options.parse_call(call)
    common = {
        "negative-prompt": negative_prompt,
        "steps": steps,
        "height": height,
        "width": width,
        "num-frames": num_frames,
        "guidance": guidance,
    }
    jobs = [] if prompts is None else read_jobs(prompts, common | {"seed": seed})
    _note_unknown_words(console, model, prompt or " ".join(job.settings["prompt"] for job in jobs))
    setup = Setup(model, preset, overrides, fps, loading, degrees, others, batch_size)
    if output_dir is not None:
        make_folder(output_dir)
        facts = {"model": model, "image": image and str(image)} | ({"call": others} if others else {})
        facts |= loading.facts | {name: value for name, value in (("dtype", dtype), ("fps", fps)) if value}
        what = setup, picture, jobs
        with ray_engine(*what, actors, console) if engine == "ray" else nullcontext(Worker(*what, console)) as maker:
            run_jobs(maker, jobs, output_dir, facts, console, batch_size=batch_size, force=force)
        return
    pipe, medium, chosen = open_pipeline(setup, console)
    named = {"prompt": prompt, **common, "image": picture, "num-images": num_images}
    arguments = call_arguments(pipe, model, named, others)
    files = numbered(output or medium.default_output, num_images or 1)
    if output is None and not force:
        files = unused(medium.default_output, num_images or 1, partial(medium.files, compare=compare))
    for file in files if leads() else ():
        medium.require_output(file, compare=compare, force=force)
    written = [("--output", each) for file in files for each in medium.files(file, compare=compare)]
    beside = [(option, path) for option, path in (("--plot", plot), ("--json", json_path)) if path is not None]
    require_distinct([*written, *beside])
    if compare:
        sides = both_sides(pipe, arguments, seed, chosen, repeats, console, whole=offload != "none")
    else:
        sides = _run(pipe, arguments, seed, chosen, quiet)
    if not leads():
        return

    for path in _write(medium, sides, files):
        console.out(f"wrote {path}", highlight=False)
    summary = _summary(medium, sides)
    if plot:
        from dit_accel.tools.figures import timeline_figure

        timeline_figure(sides.report, plot)
    if json_path:
        facts = {"model": model, "preset": chosen.name if chosen else None, "prompt": prompt, "seed": seed}
        facts |= {"call": others} if others else {}
        write_whole(json_path, json.dumps({**facts, **summary}, indent=2) + "\n")
    _print_summary(console, summary, chosen, sides)


def _note_unknown_words(console: Console, model: str, prompt: str) -> None:
    """Says which words a demo model makes nothing of."""
    unknown, known = unknown_words(model, prompt)
    if unknown:
        told = ", ".join(map(repr, unknown[:8])) + (", …" if len(unknown) > 8 else "")
        console.print(f"note: {model} does not know {told}. Its words: {', '.join(known)}", markup=False)


def _run(pipe: Any, arguments: dict[str, Any], seed: int, preset: Preset | None, quiet: bool) -> Sides:
    """The plain side without a preset, else the accelerated one."""
    start_pipeline(pipe, preset, quiet)
    made = Side.of(timed_call(pipe, arguments, seed))
    return Sides(None, made, pipe.dit_accel.report()) if preset else Sides(made, None, None)


def _write(medium: Pictures | Clips, sides: Sides, files: list[Path]) -> list[Path]:
    """Writes what was made, and beside it the comparison where there are both sides; the paths, in that order."""
    written = []
    plain, fast = sides.plain, sides.fast
    made = fast or plain
    for index, (result, file) in enumerate(zip(made.output.results, files, strict=True)):
        medium.write(result, file)
        written.append(file)
        if plain and fast:
            labels = f"plain, {plain.seconds:.1f} s", f"accelerated, {fast.seconds:.1f} s"
            written += medium.write_comparison(plain.output.results[index], result, labels, file)
    return written


def _summary(medium: Pictures | Clips, sides: Sides) -> dict[str, Any]:
    """What --json holds about the run."""
    plain, fast, report = sides.plain, sides.fast, sides.report
    quality: dict[str, Any] = {"psnr_db": None, "ssim": None, "identical": None}
    if plain and fast:
        quality = medium.quality(plain.output.results, fast.output.results)
    return {
        "plain_seconds": plain and plain.seconds,
        "plain_seconds_each": plain and plain.repeats,
        "accelerated_seconds": fast and fast.seconds,
        "accelerated_seconds_each": fast and fast.repeats,
        "speedup": sides.speedup and sides.speedup.median,
        "speedup_spread": sides.speedup and [sides.speedup.least, sides.speedup.most],
        "plain_call_seconds": plain and plain.output.seconds,
        "accelerated_call_seconds": fast and fast.output.seconds,
        **quality,
        "computed_fraction": report.computed_fraction if report else 1.0,
        "report": report.to_json() if report else None,
    }


def _print_summary(console: Console, summary: dict[str, Any], preset: Preset | None, sides: Sides) -> None:
    from rich.table import Table

    titles = {"plain": "plain", "accelerated": preset.name if preset else ""}
    shown = [side for side in titles if summary[f"{side}_seconds"] is not None]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for side in shown:
        table.add_column(titles[side], justify="right")
    rows = {
        "denoising": [f"{summary[f'{side}_seconds']:.2f} s" for side in shown],
        "whole call": [f"{summary[f'{side}_call_seconds']:.2f} s" for side in shown],
    }
    if preset:
        rows["computed fraction"] = [f"{summary['computed_fraction']:.3f}"]
    if sides.speedup is not None:
        rows["speed-up"] = [str(sides.speedup)]
        rows["PSNR"] = ["identical" if summary["identical"] else f"{summary['psnr_db']:.1f} dB"]
        rows["SSIM"] = [f"{summary['ssim']:.4f}"]
    for label, values in rows.items():
        table.add_row(label, *[""] * (len(shown) - len(values)), *values)
    console.print(table)
    report = summary["report"]
    notes = [*report["notes"]] if report else []
    # Where the run has notes of its own they say why.
    if report and not notes and preset.schedule.control == "adaptive" and "dispatch" not in report["steps_by_mode"]:
        notes.append("every step was computed; a run of more --steps leaves more to skip")
    for note in [*notes, *sides.remarks()]:
        console.out(f"note: {note}", highlight=False)
