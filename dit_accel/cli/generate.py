"""``dit-accel generate``: images and videos from a prompt, accelerated, and compared with the plain ones on request."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dit_accel.cli.batch import make_folder, require_batches, require_engine, require_one_source, run_jobs
from dit_accel.cli.comparison import Side, Sides, both_sides
from dit_accel.cli.options import (
    MOST_IMAGES,
    REPEATS,
    RepeatsOption,
    RunOptions,
    option,
    parse_call,
    require_finite,
    takes_options,
)
from dit_accel.cli.parallel import parse_degrees
from dit_accel.errors import OptionError
from dit_accel.serving.media import Clips, Pictures, numbered, require_plausible_output, unused
from dit_accel.serving.outputs import require_distinct, require_plot, require_writable
from dit_accel.serving.pipelines import Setup, call_arguments, open_pipeline, read_image, start_pipeline, timed_call
from dit_accel.serving.processes import leads
from dit_accel.serving.prompts import Job, read_jobs
from dit_accel.serving.ray_engine import ray_engine
from dit_accel.serving.worker import Worker
from dit_accel.tools.demo import unknown_words
from dit_accel.tools.extras import require_extra
from dit_accel.tools.files import write_whole

if TYPE_CHECKING:
    from PIL import Image
    from rich.console import Console

    from dit_accel.presets import Preset


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """All options of the command."""

    prompt: str | None = option("Text prompt of the image or video; this or --prompts.", "--prompt", "-p")
    guidance: float | None = option(
        "How strongly the prompt guides: guidance_scale of the pipeline's call; with --negative-prompt on "
        "FLUX and HunyuanVideo, and on demo models that are guided so, true_cfg_scale, which must be above 1.",
        callback=require_finite,
    )
    negative_prompt: str | None = option(
        "What it should not show. On FLUX and HunyuanVideo it needs --guidance above 1."
    )
    fps: float | None = option(
        "Frames a second of the written video.", min=1, max=100, callback=require_finite, show_default="the model's"
    )
    num_images: int | None = option(
        "Images of the prompt: NAME-0.png, NAME-1.png, …; not for video.", min=1, max=MOST_IMAGES
    )
    parallel: str | None = option(
        "Share the work among the processes of torchrun: ulysses=2 the tokens, branches=2 the two branches "
        "of guidance, ulysses=2,branches=2 both. torchrun --nproc-per-node 2 -m dit_accel generate --parallel "
        "ulysses=2 …",
        metavar="WAY=COUNT,…",
    )
    output: Path | None = option(
        "File to write: an image (.png, .jpg, .webp, …); of a video model a video (.mp4, with the "
        "extra `video`, or .gif) or, for a name without suffix, a folder of frames 0000.png, 0001.png, …",
        "--output",
        "-o",
        show_default="output.png, output-2.png, …, and .mp4 for video",
    )
    prompts: Path | None = option(
        "Make one of each line of this file, into --output-dir: prompts, or in a .jsonl file objects with "
        "prompt and, where a line has its own, negative-prompt, seed, steps, height, width, num-frames, guidance."
    )
    output_dir: Path | None = option(
        "Folder for --prompts: 0000.png, 0001.png, … (.mp4 for video) and manifest.jsonl, a line each with "
        "settings, checksum and report. The same command goes on where it was interrupted."
    )
    batch_size: int = option(
        "With --prompts, without --image: most lines of one call of the pipeline. Neighbours share a call if "
        "they differ in prompt, negative prompt and seed alone; each prompt's own error decides its steps.",
        default=1,
        min=1,
        max=MOST_IMAGES,
    )
    engine: Literal["process", "ray"] = option(
        "Where the lines of --prompts are made: in this process, or on all GPUs of a Ray cluster, that of "
        "RAY_ADDRESS or one started here; extra `ray`.",
        default="process",
    )
    actors: int | None = option(
        "With --engine ray: how many load the pipeline, a GPU each, or a CPU where there is none.",
        min=1,
        show_default="the number of GPUs",
    )
    compare: bool = option(
        "Also make the plain one from the same seed; write NAME-plain and NAME-compare, the two side by side, "
        "for videos NAME-strip.png too (some frames, plain above accelerated), and print speed-up, PSNR over all "
        "frames and their mean SSIM. Both sides are warmed up before they are timed, and timed in turn.",
        "--compare",
        default=False,
    )
    repeats: RepeatsOption = REPEATS
    plot: Path | None = option(
        "Write a figure of the run: step modes, times, forecast errors. Needs the extra `plots`."
    )
    json_path: Path | None = option(
        "Write times (seconds of the denoising loop, medians and each), metrics and the report. psnr_db is "
        "null where both are identical, and plain values are null without --compare.",
        "--json",
    )


@dataclass(frozen=True)
class Request:
    """What the options ask for, checked as far as that needs no model."""

    setup: Setup
    image: Image.Image | None
    arguments: dict[str, Any]
    jobs: list[Job]


@takes_options()
def command(given: Options) -> None:
    """Make images or videos with an accelerated pipeline.

    dit-accel generate --prompt "a red star over the sea" --compare

    dit-accel generate --model black-forest-labs/FLUX.1-dev --prompt "a fox" --preset quality --output fox.png

    dit-accel generate --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --prompt "a fox runs" --output fox.mp4 --compare
    """
    from rich.console import Console

    _require_consistent(given)
    if not leads():  # another process writes and prints
        given = replace(given, output=None, plot=None, json_path=None, quiet=True)
    console = Console(quiet=given.quiet)
    request = _check(given)
    _note_unknown_words(console, given.model, given.prompt or " ".join(job.settings["prompt"] for job in request.jobs))
    if given.output_dir is not None:
        _make_lines(given, request, console)
        return
    pipe, medium, preset = open_pipeline(request.setup, console)
    named = {"prompt": given.prompt, **request.arguments, "image": request.image, "num-images": given.num_images}
    arguments = call_arguments(pipe, given.model, named, request.setup.call)
    files = _files(given, medium)
    sides = _make(pipe, arguments, preset, given, console)
    if leads():
        _write(given, request, medium, sides, files, preset, console)


def _require_consistent(given: Options) -> None:
    """Checks which options were given together."""
    alone = {"--output": given.output, "--json": given.json_path, "--plot": given.plot, "--compare": given.compare}
    require_one_source(given.prompt, given.prompts, given.output_dir, alone | {"--num-images": given.num_images})
    require_batches(given.batch_size, given.prompts, given.image)
    others = {"--prompts": given.prompts, "--parallel": given.parallel, "--device": given.device}
    require_engine(given.engine, given.actors, others)


def _check(given: Options) -> Request:
    """Checks what needs no model, and reads the image and the prompts."""
    degrees = parse_degrees(given.parallel, {"--compare": given.compare, "--offload": given.offload != "none"})
    if given.json_path is not None:
        require_writable(given.json_path, "--json", force=given.force)
    if given.plot is not None:
        require_plot(given.plot, "--plot", force=given.force)
        require_extra("matplotlib", "--plot")
    if given.output is not None:
        for file in numbered(given.output, given.num_images or 1):
            require_plausible_output(file, compare=given.compare, force=given.force)
    if given.preset == "none" and (given.compare or given.plot or given.overrides):
        used = "--compare" if given.compare else "--plot" if given.plot else "--set"
        raise OptionError(used, "needs an accelerated run, and --preset none is plain")
    if given.preset == "none" and degrees.get("branches", 1) > 1:
        raise OptionError("--parallel", "branches are shared in an accelerated run; --preset exact will do")
    preset, overrides, loading = given.preset_and_loading()
    image, call = read_image(given.image), parse_call(given.call)
    setup = Setup(given.model, preset, overrides, given.fps, loading, degrees, call, given.batch_size)
    arguments = {"negative-prompt": given.negative_prompt, **given.sizes, "guidance": given.guidance}
    jobs = [] if given.prompts is None else read_jobs(given.prompts, arguments | {"seed": given.seed})
    return Request(setup, image, arguments, jobs)


def _make_lines(given: Options, request: Request, console: Console) -> None:
    """Makes every line of --prompts into --output-dir."""
    make_folder(given.output_dir)
    setup = request.setup
    facts: dict[str, Any] = {"model": given.model, "image": given.image and str(given.image)}
    facts |= ({"call": setup.call} if setup.call else {}) | setup.loading.facts
    facts |= {name: value for name, value in (("dtype", given.dtype), ("fps", given.fps)) if value}
    what = setup, request.image, request.jobs
    on_ray, size = given.engine == "ray", given.batch_size
    with ray_engine(*what, given.actors, console) if on_ray else nullcontext(Worker(*what, console)) as engine:
        run_jobs(engine, request.jobs, given.output_dir, facts, console, batch_size=size, force=given.force)


def _files(given: Options, medium: Pictures | Clips) -> list[Path]:
    """The files to write, one for each image; checks that each can be written."""
    count = given.num_images or 1
    files = numbered(given.output or medium.default_output, count)
    if given.output is None and not given.force:
        files = unused(medium.default_output, count, partial(medium.files, compare=given.compare))
    for file in files if leads() else ():
        medium.require_output(file, compare=given.compare, force=given.force)
    written = [("--output", each) for file in files for each in medium.files(file, compare=given.compare)]
    others = [(option, path) for option, path in (("--plot", given.plot), ("--json", given.json_path)) if path]
    require_distinct([*written, *others])
    return files


def _make(pipe: Any, arguments: dict[str, Any], preset: Preset | None, given: Options, console: Console) -> Sides:
    """Runs the pipeline: both sides for --compare, else the accelerated one, or the plain one without a preset."""
    if given.compare:
        whole = given.offload != "none"
        return both_sides(pipe, arguments, given.seed, preset, given.repeats, console, whole=whole)
    start_pipeline(pipe, preset, given.quiet)
    made = Side.of(timed_call(pipe, arguments, given.seed))
    return Sides(None, made, pipe.dit_accel.report()) if preset else Sides(made, None, None)


def _write(
    given: Options,
    request: Request,
    medium: Pictures | Clips,
    sides: Sides,
    files: list[Path],
    preset: Preset | None,
    console: Console,
) -> None:
    """Writes all files, and prints their names and a summary."""
    for path in _write_results(medium, sides, files):
        console.out(f"wrote {path}", highlight=False)
    summary = _summary(medium, sides)
    if given.plot:
        from dit_accel.tools.figures import timeline_figure

        timeline_figure(sides.report, given.plot)
    if given.json_path:
        facts = {"model": given.model, "preset": preset and preset.name, "prompt": given.prompt, "seed": given.seed}
        facts |= {"call": request.setup.call} if request.setup.call else {}
        write_whole(given.json_path, json.dumps({**facts, **summary}, indent=2) + "\n")
    _print_summary(console, summary, preset, sides)


def _note_unknown_words(console: Console, model: str, prompt: str) -> None:
    """Says which words a demo model makes nothing of."""
    unknown, known = unknown_words(model, prompt)
    if unknown:
        told = ", ".join(map(repr, unknown[:8])) + (", …" if len(unknown) > 8 else "")
        console.print(f"note: {model} does not know {told}. Its words: {', '.join(known)}", markup=False)


def _write_results(medium: Pictures | Clips, sides: Sides, files: list[Path]) -> list[Path]:
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
