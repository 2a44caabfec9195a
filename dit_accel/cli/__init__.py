"""The command line: ``dit-accel generate | inspect | tune | compare | presets | bench | env``.

Exit codes: 0 success, 1 failure at run time, 2 a mistake in what was asked for. Commands import torch and diffusers
when they run, so that help and completion are quick.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import dit_accel
from dit_accel.cli import bench, compare, env, generate, inspect, presets, tune
from dit_accel.cli.options import OptionError
from dit_accel.errors import BackendError, ComparisonError, DitAccelError, PresetError, TuningError, UnsupportedError

HELP = "Faster diffusion transformers for diffusers: fewer computed steps, sparse attention, nearly the same picture."

MISTAKES = (OptionError, PresetError, UnsupportedError, BackendError, TuningError, ComparisonError)


class _Commands(TyperGroup):
    """Turns errors raised on purpose into one line and an exit code; others are defects and keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DitAccelError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2 if isinstance(error, MISTAKES) else 1) from None


app = typer.Typer(
    cls=_Commands,
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate.command)
app.command("inspect")(inspect.command)
app.command("tune")(tune.command)
app.command("compare")(compare.command)
app.add_typer(presets.app, name="presets")
app.add_typer(bench.app, name="bench")
app.command("env")(env.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dit-accel {dit_accel.__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the ``dit-accel`` script."""
    sys.exit(app())
