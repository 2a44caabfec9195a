"""``dit-accel recommend | generate | serve | inspect | app | tune | compare | report | presets | env``.

Each command is one file with a function ``command``. Read :mod:`~dit_accel.cli.inspect` first: it is the shortest
command that runs a pipeline. Shared options are in :mod:`~dit_accel.cli.options`; :mod:`dit_accel.serving` opens and
calls pipelines, and :mod:`dit_accel.tools` does the work. ``generate`` has three more files: ``batch``
(--prompts and its manifest), ``comparison`` (--compare) and ``parallel`` (--parallel).

Exit codes: 0 = success, 1 = failure at run time, 2 = wrong options. Errors of :mod:`dit_accel.errors` are printed in
one line; any other error is a defect and keeps its traceback. Commands import torch when they run: help is quick.
"""

import errno
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import dit_accel
from dit_accel import errors
from dit_accel.cli import compare, env, generate, inspect, presets, recommend, report, serve, tune, web_app
from dit_accel.cli.options import option_of
from dit_accel.cli.parallel import run_to_end, tells
from dit_accel.errors import DitAccelError, UnsupportedError, shortened, shown
from dit_accel.serving.processes import silence_libraries
from dit_accel.tools.files import FULL, why_not_written

HELP = "Faster diffusion transformers for diffusers: fewer computed steps, sparse attention, nearly the same output."

MISTAKES = (UnsupportedError, errors.ArgumentError, errors.PresetError, errors.BackendError)
MISTAKES += (errors.TuningError, errors.ComparisonError)


class _Commands(TyperGroup):
    """Print errors of :mod:`dit_accel.errors` in one line and exit with a code; other errors keep their traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _reported():
            _require_text(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _reported():
            return super().invoke(ctx)


@contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
        sys.stdout.flush()
    except (DitAccelError, OSError) as error:
        message = f"{option_of(error.field)}: {error.rule}" if isinstance(error, errors.ArgumentError) else str(error)
        if not isinstance(error, DitAccelError):
            if error.errno not in (*FULL, errno.EROFS):
                raise
            message = why_not_written(error, error.filename or "output")
        if tells():
            typer.echo(f"error: {message}", err=True)
        raise typer.Exit(2 if isinstance(error, MISTAKES) else 1) from None


def _require_text(arguments: Sequence[str]) -> None:
    """Check that all arguments are UTF-8; other bytes arrive as lone surrogates."""
    for before, argument in pairwise(["", *arguments]):
        if any("\ud800" <= letter <= "\udfff" for letter in argument):
            option = next((word for word in (argument, before) if word.startswith("-")), "arguments")
            raise UnsupportedError(f"{shortened(option.partition('=')[0])}: must be UTF-8, got {shown(argument)}")


app = typer.Typer(
    cls=_Commands,
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (recommend, generate, serve, inspect, web_app, tune, compare, report):
    app.command("app" if module is web_app else module.__name__.rpartition(".")[2])(module.command)
app.add_typer(presets.app, name="presets")
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
    silence_libraries()
    run_to_end(app)
