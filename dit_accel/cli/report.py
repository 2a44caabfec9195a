"""``dit-accel report``: a comparison with fixed prompts, presets and methods, in a folder that others can check."""

from dataclasses import dataclass, replace
from pathlib import Path

import typer

from dit_accel.cli.compare import CompareOptions, compare
from dit_accel.cli.options import option, takes_options
from dit_accel.serving.outputs import make_folder
from dit_accel.tools.demo import tuning_prompts

FIXED = ("preset", "overrides", "presets", "peers", "settings", "images", "repeats")
FIXED += ("prompt", "prompts", "call", "seed", "force")


@dataclass(frozen=True, kw_only=True)
class ReportOptions(CompareOptions):
    minutes: float = option("Time limit: presets, then as many prompts and methods as fit.", default=20.0, min=0.1)
    output: Path = option(
        "Folder of the report; an interrupted report goes on in it.", "--output", "-o", default=Path("report")
    )
    check: Path | None = option("Measure nothing: check the report in this folder.", "--check")


@takes_options(without=FIXED)
def command(options: ReportOptions) -> None:
    """Measure presets and usual caches on your model, in a folder that others can check.

    dit-accel report --model black-forest-labs/FLUX.1-dev

    dit-accel report --check report

    Size, steps and guidance are the pipeline's own unless you change them.
    """
    from dit_accel.tools.measure import kit

    if options.check is not None:
        found = kit.problems(options.check)
        typer.echo("\n".join(found) or f"whole; its figures fit its images\n{kit.row(options.check / 'report.json')}")
        if found:
            raise typer.Exit(1)
        return
    make_folder(options.output, "output")
    compare(
        replace(options, output=options.output / kit.STEM, peers=kit.PEERS, settings=1, images=True, repeats=1),
        tuning_prompts(options.model),
        options.minutes,
    )
    kit.seal(options.output)
