"""``dit-accel tune``: a preset for one's own model, as cheap as the quality asked for allows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dit_accel.cli import options
from dit_accel.cli.failures import explained_failures
from dit_accel.cli.loading import Loading, load_pipeline
from dit_accel.cli.loras import parse_loras, with_projections
from dit_accel.cli.outputs import ForceOption, require_writable
from dit_accel.cli.pipelines import call_arguments, read_image
from dit_accel.cli.progress import progress_bar
from dit_accel.tools.demo import tuning_prompts
from dit_accel.tools.extras import require_extra

if TYPE_CHECKING:
    from rich.console import Console

    from dit_accel.tools.tune import TuneResult


def command(
    target_psnr: Annotated[
        float | None,
        typer.Option("--target-psnr", help="dB: least mean PSNR against plain runs. Give this or --target-error."),
    ] = None,
    target_error: Annotated[
        float | None, typer.Option("--target-error", help="Most mean relative error of the last latents, e.g. 0.05.")
    ] = None,
    model: options.ModelOption = options.DEFAULT_MODEL,
    preset: options.PresetOption = None,
    settings: options.SetOption = None,
    call: options.CallOption = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="Preset to write; NAME.png, a plot, and NAME-tuning, a folder by which an interrupted tuning goes on, "
            "lie beside it.",
        ),
    ] = Path("tuned.yaml"),
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="File with one prompt a line; those behind the first --tuning-prompts are held out to confirm with.",
            show_default="a demo model's own, else of all kinds",
        ),
    ] = None,
    tuning_count: Annotated[int, typer.Option("--tuning-prompts", min=1, help="Prompts that settings run on.")] = 4,
    held_out_count: Annotated[
        int, typer.Option("--held-out-prompts", min=1, help="Prompts that confirm what was found.")
    ] = 4,
    evaluations: Annotated[
        int, typer.Option("--evaluations", min=1, help="Most settings that are tried before each confirmation.")
    ] = 24,
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
    """Search a preset's thresholds for a quality that you name, and confirm it on prompts that the search never saw.

    dit-accel tune --target-psnr 40

    dit-accel tune --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --preset wan21-sparge --target-psnr 30 --output mine.yaml
    """
    from rich.console import Console

    from dit_accel.tools.tune import Target, split_prompts, tune

    console = Console(quiet=quiet)
    Target.of(target_psnr, target_error)
    if output.suffix not in (".yaml", ".yml"):
        raise options.OptionError("--output", f"{output} must end in .yaml: it is to be a preset")
    if preset is not None and os.path.realpath(preset) == os.path.realpath(output):
        raise options.OptionError("--output", f"{output} is the preset to start from, which it would replace")
    plot, state = output.with_suffix(".png"), output.with_name(f"{output.stem}-tuning")
    goes_on = os.path.isdir(state)  # and replaces its own files
    for path in (output, plot):
        require_writable(path, "--output", force=force or goes_on)
    require_extra("matplotlib", "dit-accel tune, which plots what it tries,")
    plain = "a plain run has no thresholds; choose a preset"
    preset, overrides = options.named_preset(preset, model, settings, plain)
    loading = Loading(device, dtype, offload, parse_loras(lora), quantize)
    overrides = with_projections(preset, overrides, loading.loras)
    listed = tuning_prompts(model) if prompts is None else options.read_prompts(prompts)
    split_prompts(listed, tuning_count, held_out_count)
    given = {"steps": steps, "height": height, "width": width, "num-frames": num_frames}
    given["image"] = read_image(image)
    others = options.parse_call(call)

    pipe = load_pipeline(model, loading, console)
    arguments = call_arguments(pipe, model, given, others)
    base = preset or options.choose_preset(None, {}, pipe).name
    with explained_failures(type(pipe)), progress_bar(console, "tuning", "runs at most") as progress:

        def tell(what: str, made: int, expected: int) -> None:
            progress.expect(expected, made)
            progress.begin(what, share=1.0)

        result = tune(
            progress.watch(pipe),
            base,
            prompts=listed,
            target_psnr=target_psnr,
            target_error=target_error,
            tuning_prompts=tuning_count,
            held_out_prompts=held_out_count,
            arguments=arguments,
            seed=seed,
            evaluations=evaluations,
            state=state,
            progress=tell,
            **overrides,
        )
    result.write(output)
    result.plot(plot)
    _print_summary(console, result)
    console.out(f"wrote {output} and {plot}", highlight=False)
    if not result.met:
        typer.echo(
            f"error: no setting that saves anything meets {result.target} on the held-out prompts; {output} comes "
            "closest, and its header has the figures",
            err=True,
        )
        raise typer.Exit(1)


def _print_summary(console: Console, result: TuneResult) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    for key, value in {**result.setting, **result.figures()}.items():
        table.add_row(key, str(value))
    console.print(table)
