"""Figures: the numbers behind them, their geometry, and every kind of run."""

import numpy as np
import pytest
import torch
from PIL import Image

from dit_accel.errors import ShapeError
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.loop.report import AttentionRecord, RunReport, StepRecord
from dit_accel.tools.media import figures


def symbols_of(computed: np.ndarray, block: int = 64) -> SparseSymbols:
    """Symbols from a bool mask ``[B, Tq, H]``."""
    bits = torch.from_numpy(np.packbits(computed, axis=-1, bitorder="little"))
    return SparseSymbols(bits, None, computed.shape[2], computed.shape[1] * block, block)


def test_heads_computed_is_the_mean_over_heads_and_batch():
    """Padding bits of the last byte don't count, and heads are read least significant bit first."""
    mask = np.zeros((2, 3, 12), bool)
    mask[:, 0] = True
    mask[0, 1, 0] = mask[1, 1, 11] = mask[1, 1, 10] = True
    np.testing.assert_allclose(figures.heads_computed(symbols_of(mask)), [1.0, 3 / 24, 0.0])


def test_token_grid_has_the_pictures_shape():
    """Rows × columns are the vision tokens in the image's proportions; reference tokens and other lengths fit none."""
    for vision, width, height, grid in (
        (1024, 512, 512, (32, 32)),
        (96, 128, 192, (12, 8)),
        (4096 + 2048, 1536, 1024, (64, 96)),
    ):
        assert figures.token_grid(TokenLayout(64, vision), width, height) == grid
    for vision, frames in ((1000, 1), (2048, 1), (2048, 3)):
        with pytest.raises(ShapeError, match=f"{vision} vision tokens don't fill"):
            figures.token_grid(TokenLayout(64, vision), 512, 512, frames)


def painted(path, layout, rows, **options) -> tuple[float, float]:
    """Brightness of the upper and the lower half of a map whose blocks of tokens have computed rows or not."""
    symbols = symbols_of(np.repeat(np.array(rows)[None, :, None], 12, axis=2))
    picture = Image.fromarray(np.full((320, 320, 3), 100, np.uint8))
    figures.symbol_map(picture, layout, symbols, path, title="blocks.0", **options)
    drawn = np.asarray(Image.open(path).convert("L")).astype(float)
    column = drawn[:, int(drawn.shape[1] * 0.7)]
    return column[int(len(column) * 0.25)], column[int(len(column) * 0.75)]


HALVES = [False, False, True, True]  # an image's upper half is reused, its lower half computed
FRAMES = [False] * 4 + [True] * 4  # of two latent frames the first is reused
SECOND = {"frame": 1, "frames": 2}


@pytest.mark.parametrize(
    ("layout", "rows", "options", "bright"),
    [
        (TokenLayout(64, 256, 64, True), [True, *HALVES], {}, (False, True)),
        (TokenLayout(64, 256, 64, False), [*HALVES, True], {}, (False, True)),
        (TokenLayout(0, 512, 64), FRAMES, SECOND, (True, True)),
        (TokenLayout(0, 512, 64), FRAMES, {**SECOND, "order": torch.arange(512).roll(256)}, (False, False)),
    ],
    ids=["text-first", "text-last", "second-frame", "second-frame-first"],
)
def test_symbol_map_paints_the_blocks_where_their_tokens_are(tmp_path, layout, rows, options, bright):
    """Computed blocks are bright, wherever the text is, in the frame asked for and in the tokens' order."""
    halves = painted(tmp_path / "map.png", layout, rows, **options)
    assert tuple(half > 120 for half in halves) == bright, halves


def report_of(steps: int, layers: int, errors: list[float | None]) -> RunReport:
    modes = ["full" if index < 2 else "update" if index % 4 == 0 else "dispatch" for index in range(steps)]
    records = [StepRecord(i, 1000.0 - i, modes[i], errors[i % len(errors)], 0.1) for i in range(steps)]
    density = [[float(mode != "dispatch") for mode in modes] for _ in range(layers)]
    return RunReport("balanced", "flux", [f"blocks.{i}" for i in range(layers)], records, density, 0.4)


@pytest.mark.parametrize(("layers", "errors"), [(1, [None]), (30, [None, 0.1, 0.0])], ids=["unmeasured", "measured"])
def test_every_run_can_be_drawn(tmp_path, layers, errors):
    """Any run gives a figure: without a checked step, with an exact one, with one layer or many, with a probe."""
    report = report_of(12, layers, errors)
    for draw, name in ((figures.timeline_figure, "timeline.png"), (figures.density_figure, "density.png")):
        draw(report, tmp_path / name)
        assert np.asarray(Image.open(tmp_path / name)).std() > 5
    if layers > 1:
        report.attentions = [AttentionRecord("blocks.0", step, 0.5, 0.01 * step or None) for step in range(0, 12, 2)]
        figures.timeline_figure(report, tmp_path / "probe.png")
        assert (tmp_path / "probe.png").read_bytes() != (tmp_path / "timeline.png").read_bytes()


def test_best_settings_leave_out_what_a_faster_setting_reaches():
    """Ties in fraction keep the better one, and equal quality at a larger fraction is no gain."""
    settings = [(0.5, 40.0), (0.2, 30.0), (0.3, 28.0), (0.5, 41.0), (0.6, 41.0), (0.8, 50.0)]
    assert figures.best_settings(settings) == [(0.2, 30.0), (0.5, 41.0), (0.8, 50.0)]
