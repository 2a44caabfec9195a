"""Output of `dit-accel recommend`."""

import shlex

import torch
import typer

from dit_accel.cli import app
from dit_accel.cli.presets import span


def test_recommend_prints_presets_notes_and_lines(run):
    """The table has the presets, the notes name the page of figures, and the last lines can be copied."""
    result = run("recommend", "--model", "black-forest-labs/FLUX.1-dev", "--gpu", "4090")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert any(line.startswith("balanced") and "first choice" in line for line in lines)
    assert "docs/guide/choosing.md" in result.stdout and "The RTX 4090 has 23" in result.stdout
    assert lines[-2].startswith("result = pipe(") and 'pipe.to("cuda")' in lines
    compile("\n".join(lines[lines.index("import torch") : -1]), "lines of Python", "exec")
    words = shlex.split(lines[-1])[1:]
    typer.main.get_command(app).commands[words.pop(0)].make_context("generate", words)


def test_loras_pass_into_both_lines(run):
    """--lora and its weight are in the command; Python loads the same file with the same weight."""
    result = run("recommend", "--model", "Tongyi-MAI/Z-Image-Turbo", "--lora", "owner/name/style.safetensors:0.8")
    *_, loads, weighs, _, _, _, shell = result.stdout.splitlines()
    assert loads == 'pipe.load_lora_weights("owner/name", adapter_name="lora-0", weight_name="style.safetensors")'
    assert weighs == 'pipe.set_adapters(["lora-0"], [0.8])'
    assert shell.endswith("--steps 8 --guidance 0 --lora owner/name/style.safetensors:0.8")


def test_gpu_that_is_there_is_the_default(run, monkeypatch):
    """Without --gpu the card's own name decides; an unlisted card gets no options."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cards = dict.fromkeys(("NVIDIA H200", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA RTX 6000 Ada Generation"), "")
    cards |= {"NVIDIA GeForce RTX 4090": "The RTX 4090 has", "RTX 4070 Ti SUPER": "The RTX 4070 Ti Super has"}
    for name, fitting in cards.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        result = run("recommend", "--model", "black-forest-labs/FLUX.1-dev", "--steps", "50")
        assert fitting in result.stdout and ("--offload" in result.stdout) == bool(fitting), name


def test_ranges_are_one_number_where_both_ends_are_shown_alike():
    shown = [span((0.301, 0.304), 2), span((0.301, 0.309), 2), span((39.6, 55.2), 0)]
    assert shown == ["0.30", "0.30 to 0.31", "40 to 55"]
