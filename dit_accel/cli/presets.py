"""``dit-accel presets``: what ships, what is in it, and whether a file of one's own is valid."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dit_accel.cli.options import OptionError
from dit_accel.cli.outputs import ForceOption, require_writable
from dit_accel.cli.recommend import TITLES, figures

app = typer.Typer(no_args_is_help=True, help="List, show and check presets.")


@app.command("list")
def list_command(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="List those for a model: its id, its folder, or a family's name."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="List the methods of papers, too.")] = False,
) -> None:
    """List presets with what 50 steps of them measured: share of the work computed, PSNR, and speed-up on an H200."""
    from rich.console import Console
    from rich.table import Column, Table

    from dit_accel.presets import load_preset, preset_names
    from dit_accel.tools.identify import identify
    from dit_accel.tools.recommend import choice_of

    identity = None if model is None else identify(model)
    table = Table(
        *(Column(title, no_wrap=True) for title in ("name", "model", *TITLES)),
        "description",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    for name in preset_names():
        preset = load_preset(name)
        if identity is not None and not identity.takes(preset):
            continue
        if everything or preset.schedule.control == "adaptive":
            family = identity.family if identity else None
            choice = choice_of(name, steps=50, use=preset.description, family=family)
            table.add_row(name, preset.model, *figures(choice), choice.use)
    Console().print(table)
    typer.echo("What each was measured on: dit-accel presets show NAME; which to take: dit-accel recommend", err=True)


@app.command("show")
def show_command(name: Annotated[str, typer.Argument(help="Name of a shipped preset.")]) -> None:
    """Print a preset's file, comments and all."""
    from dit_accel.presets import preset_path

    if Path(name).suffix in (".yaml", ".yml"):
        raise OptionError("NAME", f"must be a shipped preset, got the file {name}; see dit-accel presets check {name}")
    typer.echo(preset_path(name).read_text(encoding="utf-8"), nl=False)


@app.command("check")
def check_command(file: Annotated[Path, typer.Argument(help="A preset's YAML file.")]) -> None:
    """Check a preset file, and print it with its base and all defaults filled in."""
    import yaml

    from dit_accel.presets import load_preset, preset_names

    if str(file) in preset_names() and not file.exists():
        raise OptionError(
            "FILE", f"must be a YAML file, got the shipped preset {file}; see dit-accel presets show {file}"
        )
    preset = load_preset(file)
    typer.echo(f"# {file} is valid; with its base and all defaults it reads:")
    typer.echo(yaml.safe_dump(preset.effective(), sort_keys=False, allow_unicode=True), nl=False)


@app.command("schema")
def schema_command(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write.", show_default="print")] = None,
    force: ForceOption = False,
) -> None:
    """Print the JSON schema of preset files, for completion and checks in an editor."""
    import json

    from dit_accel.presets import preset_schema

    text = json.dumps(preset_schema(), indent=2, ensure_ascii=False) + "\n"
    if output is None:
        typer.echo(text, nl=False)
    else:
        require_writable(output, "--output", force=force)
        output.write_text(text, encoding="utf-8")
