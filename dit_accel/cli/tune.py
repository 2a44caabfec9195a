"""``dit-accel tune``: the fastest preset for a model that reaches a given quality."""

import os
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from dit_accel.cli.options import RunOptions, option, parse_call, preset_option, takes_options
from dit_accel.cli.progress import progress_bar
from dit_accel.errors import ArgumentError, BatchError
from dit_accel.serving.failures import explained_failures
from dit_accel.serving.input_images import read_image
from dit_accel.serving.loading import load_pipeline
from dit_accel.serving.outputs import require_writable
from dit_accel.serving.pipelines import call_arguments
from dit_accel.serving.prompts import read_prompts
from dit_accel.tools.demo import tuning_prompts
from dit_accel.tools.extras import require_extra


@dataclass(frozen=True, kw_only=True)
class TuneOptions(RunOptions):
    preset: str | None = preset_option()  # `none` is refused
    target_psnr: float | None = option("Minimum mean PSNR against plain runs, in dB. Give this or --target-error.")
    target_error: float | None = option("Maximum mean relative error of the final latents, e.g. 0.05.")
    coverage: float | None = option(
        "Share of unseen prompts that must reach the target, such as 0.9, instead of the mean. 0.9 needs "
        "--tuning-prompts 9 --held-out-prompts 9."
    )
    output: Path = option(
        "Preset to write. NAME.png, a plot, and NAME-tuning, a folder from which an interrupted tuning resumes, go "
        "to the same folder.",
        "--output",
        "-o",
        default=Path("tuned.yaml"),
    )
    prompts: Path | None = option(
        "File with one prompt per line; prompts after the first --tuning-prompts are held out to confirm the result.",
        show_default="the demo model's own, otherwise general prompts",
    )
    tuning_count: int = option("Number of prompts that each setting runs on.", "--tuning-prompts", default=4, min=1)
    held_out_count: int = option("Number of prompts that confirm the result.", "--held-out-prompts", default=4, min=1)
    evaluations: int = option("Maximum number of settings to try before each confirmation.", default=24, min=1)


@takes_options()
def command(options: TuneOptions) -> None:
    """Search a preset's thresholds for a quality that you set, and confirm it on prompts that the search did not use.

    dit-accel tune --target-psnr 40

    dit-accel tune --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --preset wan21-sparge --target-psnr 30 --output mine.yaml
    """
    from rich.table import Table

    from dit_accel.pipeline import preset_for
    from dit_accel.presets.keywords import nested
    from dit_accel.tools.measure.tune import Target, split_prompts, tune

    console, output = Console(quiet=options.quiet), options.output
    target = Target.of(options.target_psnr, options.target_error, options.coverage)
    plot, state = output.with_suffix(".png"), output.with_name(f"{output.stem}-tuning")
    _require_output(options, plot, state)
    require_extra("matplotlib", "dit-accel tune, which plots its results,")
    preset, overrides, loading = options.preset_and_loading("a plain run has no thresholds; choose a preset")
    listed = tuning_prompts(options.model) if options.prompts is None else read_prompts(options.prompts)
    target.require_prompts(*map(len, split_prompts(listed, options.tuning_count, options.held_out_count)))
    named, others = {**options.sizes, "image": read_image(options.image)}, parse_call(options.call)

    pipe = load_pipeline(options.model, loading, console)
    arguments = call_arguments(pipe, options.model, named, others)
    base = preset or preset_for(pipe).name
    with explained_failures(type(pipe)), progress_bar(console, "tuning", "runs at most") as progress:

        def tell(what: str, done: int, expected: int) -> None:
            progress.expect(expected, done)
            progress.begin(what, share=1.0)

        result = tune(
            progress.watch(pipe),
            base,
            prompts=listed,
            target_psnr=options.target_psnr,
            target_error=options.target_error,
            coverage=options.coverage,
            tuning_prompts=options.tuning_count,
            held_out_prompts=options.held_out_count,
            arguments=arguments,
            seed=options.seed,
            evaluations=options.evaluations,
            state=state,
            progress=tell,
            **nested(overrides),
        )
    result.write(output)
    result.plot(plot)
    table = Table(box=None, pad_edge=False, show_header=False)
    for key, value in {**result.setting, **result.figures()}.items():
        table.add_row(key, str(value))
    console.print(table)
    console.out(f"wrote {output} and {plot}", highlight=False)
    if not result.met:
        missed = f"no setting saves work and meets {result.target} on the held-out prompts"
        raise BatchError(f"{missed}; {output} comes closest, and its header has the figures")


def _require_output(options: TuneOptions, plot: Path, state: Path) -> None:
    output = options.output
    if output.suffix not in (".yaml", ".yml"):
        raise ArgumentError("output", f"{output} must end in .yaml: the output is a preset")
    if options.preset is not None and os.path.realpath(options.preset) == os.path.realpath(output):
        raise ArgumentError("output", f"{output} is the preset to start from; name another file")
    for path in (output, plot):
        require_writable(path, "output", force=options.force or os.path.isdir(state))
