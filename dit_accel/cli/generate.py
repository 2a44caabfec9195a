"""``dit-accel generate``: accelerated images and videos from a prompt, compared with the plain ones on request."""

from __future__ import annotations

import json
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from dit_accel.cli import options as shared
from dit_accel.cli.batch import run_jobs
from dit_accel.cli.comparison import Side, Sides, both_sides, print_summary, summary_of, write_results
from dit_accel.cli.options import RunOptions, named_loras, option, parse_call, require_engine, takes_options
from dit_accel.cli.parallel import parse_degrees
from dit_accel.errors import ArgumentError
from dit_accel.serving.input_images import read_image
from dit_accel.serving.media import Medium, numbered, require_plausible_output, size_note, unused
from dit_accel.serving.outputs import make_folder, require_distinct, require_plot, require_writable
from dit_accel.serving.pipelines import Setup, call_arguments, open_pipeline, start_pipeline, timed_call
from dit_accel.serving.processes import leads
from dit_accel.serving.prompts import read_jobs
from dit_accel.serving.ray_engine import ray_engine
from dit_accel.serving.worker import Worker
from dit_accel.tools.demo import unknown_words
from dit_accel.tools.extras import require_extra
from dit_accel.tools.files import write_whole

if TYPE_CHECKING:
    from dit_accel.presets import Preset


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(RunOptions):
    prompt: str | None = option("Text prompt of the image or video; this or --prompts.", "--prompt", "-p")
    guidance: float | None = option(
        "Guidance scale: guidance_scale of the pipeline's call. On demo-hunyuan it sets true_cfg_scale. With "
        "--negative-prompt on FLUX and HunyuanVideo it also sets true_cfg_scale, and must be above 1.",
        callback=shared.require_finite,
    )
    negative_prompt: str | None = option("Negative prompt. On FLUX and HunyuanVideo it needs --guidance above 1.")
    fps: float | None = option(
        "Frames per second of the written video; models with sound also generate at it.",
        min=1,
        max=100,
        callback=shared.require_finite,
        show_default="the model's",
    )
    num_images: int | None = option(
        "Number of images, written as NAME-0.png, NAME-1.png, …; not for video.", min=1, max=shared.MOST_IMAGES
    )
    parallel: str | None = option(
        "Split the work among the processes of torchrun: ulysses=2 splits the tokens, branches=2 the two "
        "branches of guidance, ulysses=2,branches=2 both. Example: torchrun --nproc-per-node 2 -m dit_accel "
        "generate --parallel ulysses=2 …",
        metavar="WAY=COUNT,…",
    )
    output: Path | None = option(
        "File to write. Image models: .png, .jpg, .webp, … Video models: .mp4 (needs the extra `video`), "
        ".gif or a folder (no suffix) of frames 0000.png, …; these two have their sound in NAME.wav.",
        "--output",
        "-o",
        show_default="output.png, output-2.png, …, and .mp4 for video",
    )
    prompts: Path | None = option(
        "File with one prompt per line; one output per line goes to --output-dir. Lines of a .jsonl file are objects "
        "with prompt and, optionally, negative-prompt, seed, steps, height, width, num-frames, guidance, loras, "
        "preset, target_error, target_psnr, computed_steps, max_seconds."
    )
    output_dir: Path | None = option(
        "Folder for the outputs of --prompts and their manifest.jsonl. Run the same command again to resume."
    )
    batch_size: int = option(
        "With --prompts, without --image: maximum number of lines in one call. Neighbouring lines "
        "share a call if they differ only in prompt, negative prompt and seed.",
        default=1,
        min=1,
        max=shared.MOST_IMAGES,
    )
    engine: Literal["process", "ray"] = shared.engine_option("lines of --prompts run: in this process")
    actors: int | None = shared.actors_option()
    loras: list[str] | None = option("LoRA that lines of JSON choose by name. Repeatable.", metavar="NAME=LORA|FOLDER")
    stream: bool = option("Append each chunk to the .mp4 once it is decoded (Helios).", "--stream", default=False)
    compare: bool = option(
        "Also run the plain pipeline with the same seed. Write NAME-plain and NAME-compare (both side by side), "
        "for videos also NAME-strip.png (frames, plain above accelerated). Print speed-up, PSNR over all "
        "frames, mean SSIM, and SI-SDR of sound. Both sides are warmed up, then timed alternately.",
        "--compare",
        default=False,
    )
    repeats: int = shared.repeats_option()
    plot: Path | None = option("Write a plot of the run: step modes, times, forecast errors. Needs the extra `plots`.")
    json_path: Path | None = option(
        "Write a JSON file with times (seconds of the denoising loop: medians and all repeats; of each stage of the "
        "call), metrics and the report. psnr_db is null if both outputs are identical; plain values are null without "
        "--compare.",
        "--json",
    )

    @property
    def arguments(self) -> dict[str, Any]:
        return {"negative-prompt": self.negative_prompt, **self.sizes, "guidance": self.guidance}


@takes_options()
def command(options: GenerateOptions) -> None:
    """Generate images or videos with an accelerated pipeline.

    dit-accel generate --prompt "a red star over the sea" --compare

    dit-accel generate --model black-forest-labs/FLUX.1-dev --prompt "a fox" --preset quality --output fox.png

    dit-accel generate --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --prompt "a fox runs" --output fox.mp4 --compare
    """
    _require_consistent(options)
    if not leads():  # the first process writes and prints
        options = replace(options, output=None, plot=None, json_path=None, quiet=True)
    console, setup = Console(quiet=options.quiet), _setup(options)
    prompt = options.prompt or " ".join(job.settings["prompt"] for job in setup.jobs)
    _note_unknown_words(console, options.model, prompt)
    if options.output_dir is not None:
        _make_lines(options, setup, console)
        return
    pipe, medium, preset = open_pipeline(setup, console)
    named = {"prompt": options.prompt, **options.arguments, "image": setup.image}
    named |= {"num-images": options.num_images, "fps": options.fps}
    arguments = call_arguments(pipe, options.model, named, setup.call)
    files = _files(options, medium)
    with ExitStack() as stack:
        if options.stream:
            from dit_accel.streaming import growing_mp4, streamed

            fps, tell = getattr(medium, "fps", 1.0), partial(console.out, highlight=False)
            stack.enter_context(streamed(pipe, stack.enter_context(growing_mp4(files[0], fps, tell))))
        sides = _make(pipe, arguments, preset, options, console)
    if leads():
        _write(options, medium, sides, files, preset, console)


def _require_consistent(options: GenerateOptions) -> None:
    many, on_ray = options.prompts is not None, options.engine == "ray"
    single = {"output": options.output, "json": options.json_path, "plot": options.plot, "compare": options.compare}
    single |= {"num_images": options.num_images, "stream": options.stream}
    if not many and options.prompt is None:
        raise ArgumentError("prompt", "must be given; or give a file of prompts with --prompts")
    if many and options.prompt is not None:
        raise ArgumentError("prompts", "can't be combined with --prompt; give one of them")
    if many and options.output_dir is None:
        raise ArgumentError("output_dir", "must name a folder for the outputs of --prompts")
    if not many and options.loras:
        raise ArgumentError("loras", "needs --prompts, whose lines choose LoRAs; for one --prompt use --lora")
    if not many and options.output_dir is not None:
        raise ArgumentError("output_dir", "needs --prompts; name the file for one --prompt with --output")
    for name, value in single.items() if many else ():
        if value:
            raise ArgumentError(name, "needs --prompt; --prompts writes its outputs to --output-dir")
    if options.batch_size > 1 and not many:
        raise ArgumentError("batch_size", "needs --prompts; for several images of one --prompt use --num-images")
    # FLUX img2img would get other noise, and FLUX.2 uses all images for each prompt
    if options.batch_size > 1 and options.image is not None:
        raise ArgumentError("batch_size", "can't be used with --image: pipelines treat an image in a batch differently")
    if options.stream and (options.compare or options.parallel):
        raise ArgumentError("stream", "can't be used with --compare or --parallel")
    require_engine(options.engine, options.actors, options.device)
    if on_ray and not many:
        raise ArgumentError("engine", "ray needs --prompts; one --prompt runs in this process")
    if on_ray and options.parallel is not None:
        raise ArgumentError("parallel", "can't be used with --engine ray, where each device works on its own lines")


def _setup(options: GenerateOptions) -> Setup:
    """Check the options as far as possible without the model; read the image and the prompts."""
    degrees = parse_degrees(options.parallel, {"compare": options.compare, "offload": options.offload != "none"})
    if options.json_path is not None:
        require_writable(options.json_path, "json", force=options.force)
    if options.plot is not None:
        require_plot(options.plot, "plot", force=options.force)
        require_extra("matplotlib", "--plot")
    if options.output is not None:
        for file in numbered(options.output, options.num_images or 1):
            require_plausible_output(file, compare=options.compare, force=options.force)
    if options.preset == "none" and (options.compare or options.plot or options.overrides):
        used = "compare" if options.compare else "plot" if options.plot else "set"
        raise ArgumentError(used, "needs an accelerated run, but --preset none runs the plain pipeline")
    if options.preset == "none" and degrees.get("branches", 1) > 1:
        raise ArgumentError("parallel", "branches need an accelerated run; use --preset exact instead of none")
    preset, overrides, loading = options.preset_and_loading()
    loading = replace(loading, named_loras=named_loras(options.loras))
    image, call = read_image(options.image), parse_call(options.call)
    jobs = [] if options.prompts is None else read_jobs(options.prompts, options.arguments | {"seed": options.seed})
    return Setup(options.model, preset, overrides, options.fps, loading, degrees, call, options.batch_size, image, jobs)


def _make_lines(options: GenerateOptions, setup: Setup, console: Console) -> None:
    make_folder(options.output_dir, "output_dir")
    facts: dict[str, Any] = {"model": options.model, "image": options.image and str(options.image)}
    facts |= ({"call": setup.call} if setup.call else {}) | setup.loading.facts
    facts |= {name: value for name, value in (("dtype", options.dtype), ("fps", options.fps)) if value}
    on_ray, size = options.engine == "ray", options.batch_size
    with ray_engine(setup, options.actors, console) if on_ray else nullcontext(Worker(setup, console)) as engine:
        run_jobs(engine, setup.jobs, options.output_dir, facts, console, batch_size=size, force=options.force)


def _files(options: GenerateOptions, medium: Medium) -> list[Path]:
    count = options.num_images or 1
    files = numbered(options.output or medium.default_output, count)
    if options.output is None and not options.force:
        files = unused(medium.default_output, count, partial(medium.files, compare=options.compare))
    for file in files if leads() else ():
        medium.require_output(file, compare=options.compare, force=options.force)
    written = [("output", path) for file in files for path in medium.files(file, compare=options.compare)]
    others = [(field, path) for field, path in (("plot", options.plot), ("json", options.json_path)) if path]
    require_distinct([*written, *others])
    return files


def _make(pipe: Any, arguments: dict, preset: Preset | None, options: GenerateOptions, console: Console) -> Sides:
    """Run the pipeline: both sides with --compare, otherwise accelerated, or plain without a preset."""
    if options.compare:
        from dit_accel import restore_pipeline

        plain, whole = restore_pipeline(pipe), options.offload != "none"
        return both_sides(plain, arguments, options.seed, preset, options.repeats, console, whole=whole)
    start_pipeline(pipe, preset, options.quiet)
    side = Side.of(timed_call(pipe, arguments, options.seed))
    return Sides(None, side, pipe.dit_accel.report()) if preset else Sides(side, None, None)


def _write(
    options: GenerateOptions, medium: Medium, sides: Sides, files: list[Path], preset: Preset | None, console: Console
) -> None:
    for path in write_results(medium, sides, files):
        console.out(f"wrote {path}", highlight=False)
    if note := size_note(options.sizes, (sides.fast or sides.plain).output.results[0]):
        console.out(f"note: {note}", highlight=False)
    summary = summary_of(sides)
    if options.plot:
        from dit_accel.tools.media.figures import timeline_figure

        timeline_figure(sides.report, options.plot)
    if options.json_path:
        facts = {"model": options.model, "preset": preset and preset.name}
        facts |= {"prompt": options.prompt, "seed": options.seed}
        facts |= {"call": parse_call(options.call)} if options.call else {}
        write_whole(options.json_path, json.dumps({**facts, **summary}, indent=2) + "\n")
    print_summary(console, summary, preset, sides)
    for path in filter(None, (options.plot, options.json_path)):
        console.out(f"wrote {path}", highlight=False)


def _note_unknown_words(console: Console, model: str, prompt: str) -> None:
    unknown, known = unknown_words(model, prompt)
    if unknown:
        words = ", ".join(map(repr, unknown[:8])) + (", …" if len(unknown) > 8 else "")
        console.print(f"note: {model} does not know {words}. Its words: {', '.join(known)}", markup=False)
