"""``dit-accel bench``: how fast the kernels are here, beside what else a user could run."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, help="Measure speed.")


# The options are those of `python -m dit_accel.tools.bench`, which runs where typer is missing; one parser serves both.
@app.command(
    "kernels", add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def kernels_command(context: typer.Context) -> None:
    """Check every kernel against float64, then time it beside cuDNN, FlashAttention, FlexAttention and F.linear."""
    from dit_accel.tools.bench.kernels import main

    raise typer.Exit(main(context.args, "dit-accel bench kernels"))
