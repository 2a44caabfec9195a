"""Plots of `dit-accel inspect`: the middle of a video and of the blocks, in the order of the tokens."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from dit_accel.cli import inspect
from dit_accel.errors import ArgumentError, ShapeError
from dit_accel.tools.media import figures


@pytest.mark.parametrize(
    ("frames", "latents", "latent"), [(1, 1, 0), (5, 2, 1), (9, 3, 1), (13, 4, 2), (81, 21, 10)], ids=str
)
def test_the_middle_frame_of_a_clip_is_that_of_its_latents(frames, latents, latent):
    """The first latent frame is one frame and each other is four, of which the map shows the first."""
    clip = np.zeros((frames, 8, 8, 3), dtype=np.uint8) + np.arange(frames, dtype=np.uint8)[:, None, None, None]
    picture, place, count = inspect._middle(SimpleNamespace(vae_scale_factor_temporal=4), clip)
    assert (place, count) == (latent, latents) and picture.getpixel((0, 0))[0] == 4 * latent
    assert 4 * (latents - 1) + 1 == frames


@pytest.fixture
def pipe():
    symbols = {f"blocks.{index}": object() for index in range(3)}
    preset = SimpleNamespace(forecast=SimpleNamespace(level="head"))
    run = SimpleNamespace(symbols=lambda: symbols, preset=preset, layout="layout", token_order="order")
    return SimpleNamespace(dit_accel=run, vae_scale_factor_temporal=4)


@pytest.mark.parametrize("layer, drawn", [(None, "blocks.1"), ("blocks.2", "blocks.2")])
def test_the_map_is_of_the_block_that_is_asked_for(pipe, monkeypatch, tmp_path, layer, drawn):
    """The default is the middle block; the map has the run's layout and order of tokens."""
    seen = []
    monkeypatch.setattr(figures, "symbol_map", lambda *given, **named: seen.append((given[1:], named)))
    inspect._draw_symbols(pipe, Image.new("RGB", (8, 8)), layer, tmp_path, Console(quiet=True))
    ((layout, symbols, path), named) = seen[0]
    assert layout == "layout" and symbols is pipe.dit_accel.symbols()[drawn]
    assert path == tmp_path / f"symbols-{drawn}.png"
    assert named == {"title": drawn, "frame": 0, "frames": 1, "order": "order"}


def test_symbols_that_fit_no_picture_are_told(pipe, monkeypatch, tmp_path, capsys):
    """The run is whole without a map."""

    def fail(*_, **__):
        raise ShapeError("144 tokens are no square")

    monkeypatch.setattr(figures, "symbol_map", fail)
    inspect._draw_symbols(pipe, Image.new("RGB", (8, 8)), None, tmp_path, Console())
    assert "no symbol map: 144 tokens are no square" in capsys.readouterr().out
    pipe.dit_accel.symbols().clear()
    inspect._draw_symbols(pipe, Image.new("RGB", (8, 8)), None, tmp_path, Console())
    assert "no symbol map: this run has no symbols (level head)" in capsys.readouterr().out


def test_a_layer_without_symbols_says_what_would_help(pipe):
    with pytest.raises(ArgumentError, match=r"no symbols for layer 'nope'; layers: blocks\.0, blocks\.1, blocks\.2"):
        inspect._require_symbols(pipe, "nope")
    inspect._require_symbols(pipe, "blocks.0")
    pipe.dit_accel.symbols().clear()
    with pytest.raises(ArgumentError, match="use a preset of level head, and more --steps"):
        inspect._require_symbols(pipe, "blocks.0")
