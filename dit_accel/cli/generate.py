"""``dit-accel generate``: images and videos from a prompt, accelerated, and compared with the plain ones on request."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dit_accel.cli.batch import make_folder, run_jobs
from dit_accel.cli.comparison import Side, Sides, both_sides, print_summary, summary_of, write_results
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
    arguments: dict[str, Any]  # of the call, by option; None = not given
    jobs: list[Job]  # of --prompts


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
    many, on_ray = given.prompts is not None, given.engine == "ray"
    single = {"--output": given.output, "--json": given.json_path, "--plot": given.plot, "--compare": given.compare}
    if not many and given.prompt is None:
        raise OptionError("--prompt", "needs a text; or name a file of prompts with --prompts")
    if many and given.prompt is not None:
        raise OptionError("--prompts", "can't be given beside --prompt; give one of the two")
    if many and given.output_dir is None:
        raise OptionError("--output-dir", "must name a folder for what --prompts makes")
    if not many and given.output_dir is not None:
        raise OptionError("--output-dir", "is for --prompts; name the file of one --prompt with --output")
    for name in (each for each, value in {**single, "--num-images": given.num_images}.items() if value and many):
        raise OptionError(name, "is for one --prompt; --prompts writes all into --output-dir")
    if given.batch_size > 1 and not many:
        raise OptionError("--batch-size", "goes with --prompts; --num-images makes several of one prompt")
    # img2img of FLUX draws other noise, and FLUX.2 takes all images for each prompt
    if given.batch_size > 1 and given.image is not None:
        raise OptionError("--batch-size", "can't be used with --image: pipelines differ in what a batch makes of it")
    if not on_ray and given.actors is not None:
        raise OptionError("--actors", "goes with --engine ray")
    if on_ray:
        _require_ray(given)


def _require_ray(given: Options) -> None:
    """Checks that Ray is there and goes with the other options."""
    require_extra("ray", "--engine ray")
    if given.prompts is None:
        raise OptionError("--engine", "ray is for --prompts; one --prompt is made by this process")
    if given.parallel is not None:
        raise OptionError("--parallel", "can't be used with --engine ray, which has each device make lines of its own")
    if given.device not in (None, "cuda", "cpu"):
        raise OptionError("--device", f"must be cuda or cpu with --engine ray, got {given.device}")


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
    for path in write_results(medium, sides, files):
        console.out(f"wrote {path}", highlight=False)
    summary = summary_of(medium, sides)
    if given.plot:
        from dit_accel.tools.figures import timeline_figure

        timeline_figure(sides.report, given.plot)
    if given.json_path:
        facts = {"model": given.model, "preset": preset and preset.name, "prompt": given.prompt, "seed": given.seed}
        facts |= {"call": request.setup.call} if request.setup.call else {}
        write_whole(given.json_path, json.dumps({**facts, **summary}, indent=2) + "\n")
    print_summary(console, summary, preset, sides)


def _note_unknown_words(console: Console, model: str, prompt: str) -> None:
    """Says which words a demo model makes nothing of."""
    unknown, known = unknown_words(model, prompt)
    if unknown:
        told = ", ".join(map(repr, unknown[:8])) + (", …" if len(unknown) > 8 else "")
        console.print(f"note: {model} does not know {told}. Its words: {', '.join(known)}", markup=False)
