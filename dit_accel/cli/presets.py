"""``dit-accel presets``: list and show the shipped presets, and check preset files."""

import json
from pathlib import Path
from typing import Annotated

import typer

from dit_accel.errors import UnsupportedError
from dit_accel.serving.outputs import require_writable
from dit_accel.tools.files import write_whole

ROW = "{:<26}{:<17}{:<14}{}"

app = typer.Typer(no_args_is_help=True, help="List, show and check presets.")


@app.command("list")
def list_command(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="List only presets for this model: its id, its folder, or a family's name."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also presets in 8 bits, and methods of papers.")] = False,
) -> None:
    """List presets with their computed fraction and PSNR on small models at 50 steps."""
    from dit_accel.presets import load_preset, measured, preset_names

    identity = None
    if model is not None:
        from dit_accel.tools.advise.identify import identify

        identity = identify(model)
    typer.echo(ROW.format("name", "model", "computed", "PSNR dB"))
    for name in preset_names():
        preset = load_preset(name)
        is_taken = identity is None or identity.takes(preset)
        if is_taken and (everything or (preset.schedule.measures and preset.linear.dtype is None)):
            run = next((run for run in measured(name) if run["steps"] == 50), None)
            cells = (span(run["computed"], 2), span(run["psnr"], 0)) if run else ("not measured", "not measured")
            typer.echo(ROW.format(name, preset.model, *cells))
            typer.echo(f"  {preset.description}")
    figures = "Figures are from small models. --all adds NAME-8bit, with layers in 8 bits, and methods of papers."
    typer.echo(f"{figures}\nWhich to use: dit-accel recommend --model {model or 'MODEL'}", err=True)


@app.command("show")
def show_command(name: Annotated[str, typer.Argument(help="Name of a shipped preset.")]) -> None:
    """Print a preset's file, including its comments."""
    from dit_accel.presets import preset_path

    if Path(name).suffix in (".yaml", ".yml"):
        rule = f"must be a shipped preset, got the file {name}; see dit-accel presets check {name}"
        raise UnsupportedError(f"NAME: {rule}")
    typer.echo(preset_path(name).read_text(encoding="utf-8"), nl=False)


@app.command("check")
def check_command(file: Annotated[Path, typer.Argument(help="A preset's YAML file.")]) -> None:
    """Check a preset file, and print it with all values of its base and defaults."""
    import yaml

    from dit_accel.models.presets import load_preset
    from dit_accel.presets import preset_names

    if str(file) in preset_names() and not file.exists():
        rule = f"must be a YAML file, got the shipped preset {file}; see dit-accel presets show {file}"
        raise UnsupportedError(f"FILE: {rule}")
    preset = load_preset(file)
    typer.echo(f"# {file} is valid; with all values of its base and defaults:")
    typer.echo(yaml.safe_dump(preset.effective(), sort_keys=False, allow_unicode=True), nl=False)


@app.command("schema")
def schema_command(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write.", show_default="print")] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace existing files.")] = False,
) -> None:
    """Print the JSON schema of preset files, for completion and checks in an editor."""
    from dit_accel.models.presets import preset_schema

    text = json.dumps(preset_schema(), indent=2, ensure_ascii=False) + "\n"
    if output is None:
        typer.echo(text, nl=False)
    else:
        require_writable(output, "output", force=force)
        write_whole(output, text)


def span(values: tuple[float, float], digits: int) -> str:
    least, most = (f"{value:.{digits}f}" for value in values)
    return least if least == most else f"{least} to {most}"
