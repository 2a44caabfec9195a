"""Output of `dit-accel recommend`."""

import shlex

import pytest
import torch
import typer

from dit_accel.cli import app
from dit_accel.cli.presets import span


def test_recommend_prints_figures_notes_and_lines(run):
    """The table has the presets, the notes list missing measurements, and the last lines can be copied."""
    result = run("recommend", "--model", "black-forest-labs/FLUX.1-dev", "--gpu", "4090")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert any(line.startswith("balanced") and "first choice" in line for line in lines)
    assert "Speed was not measured" in result.stdout and "the RTX 4090" in result.stdout
    assert lines[-2].startswith("result = pipe(")
    compile("\n".join(lines[-4:-1]), "lines of Python", "exec")
    words = shlex.split(lines[-1])[1:]
    command = typer.main.get_command(app).commands[words.pop(0)]
    command.make_context("generate", words)


@pytest.mark.parametrize(
    "options, message",
    [
        (("--model", "nothing"), "model must be an id such as"),
        (("--model", "flux", "--gpu", "voodoo2"), "gpu must be one of t4, v100, 3060"),
        (("--model", "stabilityai/stable-diffusion-xl-base-1.0"), "which denoises with a UNet"),
    ],
)
def test_mistakes_exit_with_2(run, options, message):
    """An unknown model or card gives a one-line error with the known ones."""
    result = run("recommend", *options)
    assert result.exit_code == 2 and message in result.stderr


def test_loras_pass_into_both_lines(run):
    """--lora and its weight are in the command; Python loads the same file with the same weight."""
    result = run("recommend", "--model", "Tongyi-MAI/Z-Image-Turbo", "--lora", "owner/name/style.safetensors:0.8")
    *_, loads, weighs, _, _, shell = result.stdout.splitlines()
    assert loads == 'pipe.load_lora_weights("owner/name", adapter_name="lora-0", weight_name="style.safetensors")'
    assert weighs == 'pipe.set_adapters(["lora-0"], [0.8])'
    assert shell.endswith("--steps 8 --guidance 0 --lora owner/name/style.safetensors:0.8")


def test_gpu_that_is_there_is_the_default(run, monkeypatch):
    """Without --gpu the card's own name decides; an unlisted card gives no figures."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cards = {
        "NVIDIA H200": "4.61 times",
        "NVIDIA GeForce RTX 4090": "on the RTX 4090",
        "NVIDIA A100-SXM4-40GB": "on the A100 of 40 GB",
        "NVIDIA GeForce RTX 4090 Laptop GPU": "on your GPU",
        "NVIDIA GH200 480GB": "on your GPU",
        "NVIDIA H200 NVL": "on your GPU",
        "NVIDIA RTX A1000": "on your GPU",
        "NVIDIA H100 PCIe": "on your GPU",
        "NVIDIA H100 80GB HBM3": "1 x H100",
        "NVIDIA RTX 6000 Ada Generation": "on the RTX 6000 Ada",
    }
    for name, said in cards.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        result = run("recommend", "--model", "black-forest-labs/FLUX.1-dev", "--steps", "50")
        assert said in result.stdout, name


def test_ranges_are_one_number_where_both_ends_are_shown_alike():
    assert [span((0.301, 0.304), 2), span((0.301, 0.309), 2), span((39.6, 55.2), 0)] == [
        "0.30",
        "0.30 to 0.31",
        "40 to 55",
    ]
