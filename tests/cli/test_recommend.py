"""What `dit-accel recommend` prints."""

import shlex

import pytest
import torch
import typer

from dit_accel.cli import app
from dit_accel.cli.recommend import span


def test_recommend_prints_figures_notes_and_lines(run):
    """The table has the preset's figures, the notes say what was not measured, and the last lines can be copied."""
    result = run("recommend", "--model", "black-forest-labs/FLUX.1-dev", "--gpu", "4090")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    row = next(line for line in lines if line.startswith("balanced"))
    assert "0.24 to 0.33" in row and "39 to 55" in row and "first choice" in row
    assert "Nothing was timed on the RTX 4090" in result.stdout and "docs/results/conditions.md" in result.stdout
    compile(lines[-2], "line of Python", "exec")
    words = shlex.split(lines[-1])[1:]
    command = typer.main.get_command(app).commands[words.pop(0)]
    command.make_context("generate", words)


@pytest.mark.parametrize(
    "options, message",
    [
        (("--model", "nothing"), "model must be an id such as"),
        (("--model", "flux", "--gpu", "voodoo2"), "gpu must be one of t4, 3090"),
    ],
)
def test_mistakes_exit_with_2(run, options, message):
    """An unknown model or card is told in one line, with what is known."""
    result = run("recommend", *options)
    assert result.exit_code == 2 and message in result.stderr


def test_gpu_that_is_there_is_the_default(run, monkeypatch):
    """Without --gpu the card's own name decides; of one that is not in the list nothing is known."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert "Nothing was timed" not in run("recommend", "--model", "flux").stdout
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 4090")
    assert "Nothing was timed on the RTX 4090" in run("recommend", "--model", "flux").stdout
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-40GB")
    assert "Nothing was timed on the A100 of 40 GB" in run("recommend", "--model", "flux").stdout
    for other in ("NVIDIA Quadro", "NVIDIA GeForce RTX 4090 Laptop GPU"):  # half of the card of that name
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda other=other: other)
        assert "Nothing was timed on your card" in run("recommend", "--model", "flux").stdout
    for name in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA Quadro"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert "Nothing was timed on your card" in run("recommend", "--model", "flux").stdout
    assert "Nothing was timed on your card" in run("recommend", "--model", "flux").stdout


def test_ranges_are_one_number_where_both_ends_are_shown_alike():
    assert [span((0.301, 0.304), 2), span((0.301, 0.309), 2), span((39.6, 55.2), 0)] == [
        "0.30",
        "0.30 to 0.31",
        "40 to 55",
    ]
