"""``dit-accel presets``: what ships, what is in it, and whether a file of one's own is valid."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dit_accel.cli.outputs import ForceOption, require_writable

app = typer.Typer(no_args_is_help=True, help="List, show and check presets.")


@app.command("list")
def list_command() -> None:
    """List the presets that ship with dit-accel."""
    from rich.console import Console
    from rich.table import Table

    from dit_accel.presets import load_preset, preset_names

    table = Table("name", "model", "description", box=None, pad_edge=False, header_style="bold")
    for name in preset_names():
        preset = load_preset(name)
        table.add_row(name, preset.model, preset.description)
    Console().print(table)


@app.command("show")
def show_command(name: Annotated[str, typer.Argument(help="Name of a shipped preset.")]) -> None:
    """Print a preset's file, comments and all."""
    from dit_accel.presets import preset_path

    typer.echo(preset_path(name).read_text(encoding="utf-8"), nl=False)


@app.command("check")
def check_command(file: Annotated[Path, typer.Argument(help="A preset's YAML file.")]) -> None:
    """Check a preset file, and print it with its base and all defaults filled in."""
    import yaml

    from dit_accel.presets import load_preset

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
