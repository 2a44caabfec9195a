"""Figures: the numbers behind them, their geometry, and every kind of run."""

import numpy as np
import pytest
import torch
from PIL import Image

from dit_accel.errors import ShapeError
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.loop.report import AttentionRecord, RunReport, StepRecord
from dit_accel.tools.media.figures import (
    LayerCurve,
    best_settings,
    density_figure,
    frontier_plot,
    heads_computed,
    symbol_map,
    timeline_figure,
    token_grid,
    tuning_figure,
)


def _picture(width: int = 320, height: int = 320, level: int = 100) -> Image.Image:
    return Image.fromarray(np.full((height, width, 3), level, np.uint8))


def _symbols(computed: np.ndarray, block: int = 64) -> SparseSymbols:
    """Symbols from a bool mask ``[B, Tq, H]``."""
    bits = torch.from_numpy(np.packbits(computed, axis=-1, bitorder="little"))
    return SparseSymbols(bits, None, computed.shape[2], computed.shape[1] * block, block)


def _report(steps: int, layers: int, errors: list[float | None]) -> RunReport:
    modes = ["full" if index < 2 else "update" if index % 4 == 0 else "dispatch" for index in range(steps)]
    records = [StepRecord(i, 1000.0 - i, modes[i], errors[i % len(errors)], 0.1) for i in range(steps)]
    density = [[float(mode != "dispatch") for mode in modes] for _ in range(layers)]
    return RunReport("balanced", "flux", [f"blocks.{i}" for i in range(layers)], records, density, 0.4)


def test_heads_computed_is_the_mean_over_heads_and_batch():
    """Padding bits of the last byte don't count, and heads are read least significant bit first."""
    mask = np.zeros((2, 3, 12), bool)
    mask[:, 0] = True
    mask[0, 1, 0] = mask[1, 1, 11] = mask[1, 1, 10] = True
    np.testing.assert_allclose(heads_computed(_symbols(mask)), [1.0, 3 / 24, 0.0])


@pytest.mark.parametrize(
    ("vision", "width", "height", "grid"),
    [(1024, 512, 512, (32, 32)), (96, 128, 192, (12, 8)), (4096 + 2048, 1536, 1024, (64, 96))],
    ids=["square", "portrait", "landscape"],
)
def test_token_grid_has_the_pictures_shape(vision, width, height, grid):
    """Rows × columns equals the vision tokens, in the image's proportions."""
    assert token_grid(TokenLayout(64, vision), width, height) == grid


@pytest.mark.parametrize(
    ("vision", "frames"), [(1000, 1), (2048, 1), (2048, 3)], ids=["no-grid", "reference-tokens", "frames"]
)
def test_token_grid_refuses_tokens_that_do_not_fill_the_picture(vision, frames):
    """Reference tokens, and videos of another length, fill no grids of the image's shape."""
    with pytest.raises(ShapeError, match=f"{vision} vision tokens don't fill"):
        token_grid(TokenLayout(64, vision), 512, 512, frames)


def painted(path, layout, symbols, **options) -> np.ndarray:
    """Brightness of a map's rows from above, in the middle of its image."""
    symbol_map(_picture(), layout, symbols, path, title="blocks.0", **options)
    drawn = np.asarray(Image.open(path).convert("L")).astype(float)
    return drawn[:, int(drawn.shape[1] * 0.7)]


@pytest.mark.parametrize("text_first", [True, False], ids=["text-first", "text-last"])
def test_symbol_map_paints_the_blocks_where_their_tokens_are(tmp_path, text_first):
    """With the image's upper half reused and its lower half computed, the map is dark above and bright below."""
    layout = TokenLayout(64, 256, 64, text_first)  # 1 text block, 4 vision blocks of 4 token rows each
    vision = np.array([False, False, True, True])
    rows = np.concatenate([[True], vision] if text_first else [vision, [True]])
    column = painted(tmp_path / "map.png", layout, _symbols(np.repeat(rows[None, :, None], 12, axis=2)))
    assert column[int(len(column) * 0.75)] > column[int(len(column) * 0.25)] + 60


@pytest.mark.parametrize("is_swapped", [False, True], ids=["raster", "second-frame-first"])
def test_symbol_map_of_a_video_paints_the_frame_asked_for(tmp_path, is_swapped):
    """With the first of two latent frames reused and the second computed, in raster order or another one."""
    layout = TokenLayout(0, 512, 64)  # 2 frames of 16 × 16 tokens, 4 blocks each
    symbols = _symbols(np.repeat(np.arange(8)[None, :, None] >= 4, 12, axis=2))
    order = torch.arange(512).roll(256) if is_swapped else None
    dark, bright = (
        painted(tmp_path / f"{frame}.png", layout, symbols, frame=frame ^ is_swapped, frames=2, order=order)
        for frame in (0, 1)
    )
    assert (bright[len(bright) // 4 : -len(bright) // 4] > dark[len(dark) // 4 : -len(dark) // 4] + 60).all()


@pytest.mark.parametrize(
    ("layers", "errors"),
    [(1, [None]), (4, [0.0]), (30, [None, 0.1, 0.02])],
    ids=["unmeasured", "exact", "measured"],
)
def test_every_run_can_be_drawn(tmp_path, layers, errors):
    """Runs without a checked step, without any error, with one layer or many all give figures with content.

    With a probe there is a second line.
    """
    report = _report(12, layers, errors)
    for draw, name in ((timeline_figure, "timeline.png"), (density_figure, "density.png")):
        draw(report, tmp_path / name)
        assert np.asarray(Image.open(tmp_path / name)).std() > 5
    report.attentions = [AttentionRecord("blocks.0", step, 0.5, 0.01 * step or None) for step in range(0, 12, 2)]
    timeline_figure(report, tmp_path / "probe.png")
    assert (tmp_path / "probe.png").read_bytes() != (tmp_path / "timeline.png").read_bytes()


def test_frontier_draws_its_points(tmp_path):
    """One line per method; an empty list is an error."""
    points = [("closed loop", 0.23, 43.2), ("closed loop", 0.36, 55.2), ("fewer steps", 0.26, 31.2)]
    frontier_plot(points, tmp_path / "frontier.png")
    assert np.asarray(Image.open(tmp_path / "frontier.png")).std() > 5
    with pytest.raises(ShapeError, match="at least one point"):
        frontier_plot([], tmp_path / "none.png")


def test_best_settings_leave_out_what_a_faster_setting_reaches():
    """Ties in fraction keep the better one, and equal quality at a larger fraction is no gain."""
    settings = [(0.5, 40.0), (0.2, 30.0), (0.3, 28.0), (0.5, 41.0), (0.6, 41.0), (0.8, 50.0)]
    assert best_settings(settings) == [(0.2, 30.0), (0.5, 41.0), (0.8, 50.0)]


@pytest.mark.parametrize("layers", [0, 3, 40], ids=["no-layers", "few", "many"])
def test_tuning_figure_draws_settings_and_layers(tmp_path, layers):
    """Layers appear with the settings, also if some have no curve or skip nothing."""
    curves = [
        LayerCurve(f"blocks.{number}", [(0.1, 0.01), (0.5, 0.1)][: number % 3], None if number else (0.1, 0.01))
        for number in range(layers)
    ]
    path = tmp_path / "tuning.png"
    tuning_figure([(0.3, 41.0), (0.2, 38.0)], (0.25, 40.5), 40.0, "PSNR (dB)", curves, 0.05 if layers else None, path)
    width, height = Image.open(path).size
    assert width / height > (2 if layers else 1)
