"""The script that measures methods on recorded attentions: its metric, its curves, and a run on tiny models."""

import math
from dataclasses import replace

import pytest
import torch

from dit_accel.kernels import attention as kernel
from dit_accel.kernels import lower
from dit_accel.kernels.layout import TokenLayout
from dit_accel.presets import Skip
from dit_accel.sparse.policies import draw
from dit_accel.tools.capture import AttentionTap
from scripts.research.attention_study import curves, report
from scripts.research.attention_study.dense import DenseAttention
from tests.tiny import tiny_output, tiny_pipeline


def attention(layout: TokenLayout, batch=2, heads=3, head_dim=16, kv_len=None):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, batch, layout.tokens, heads, head_dim, generator=generator)
    return q * 2, k, v


def naive(q, k, v, layout, kept, kv_len=None):
    """Sparsity and error over vision's rows, of kept pairs bool ``[B, H, S, S]``, by their definition in float64."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    lengths = [layout.tokens] * len(q) if kv_len is None else kv_len.tolist()
    missing, size, left_out, pairs = 0.0, 0.0, 0, 0
    for b, length in enumerate(lengths):
        scores = q[b] @ k[b, :, :length].mT / math.sqrt(q.shape[-1])
        allowed = kept[b, :, :, :length]
        dense = scores.softmax(-1) @ v[b, :, :length]
        sparse = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0) @ v[b, :, :length]
        rows = slice(layout.vision_start, layout.vision_start + layout.vision)
        missing += (sparse - dense)[:, rows].abs().sum().item()
        size += dense[:, rows].abs().sum().item()
        left_out += (~allowed[:, rows]).sum().item()
        pairs += allowed[:, rows].numel()
    return [left_out / pairs, missing / size]


LAYOUTS = [
    pytest.param(TokenLayout(0, 200, 64), None, id="clip-ragged"),
    pytest.param(TokenLayout(40, 150, 64), None, id="text-first"),
    pytest.param(TokenLayout(40, 152, 64, text_first=False), [192, 170], id="text-last-padded"),
]


@pytest.mark.parametrize("block", [64, 16])
@pytest.mark.parametrize("layout, lengths", LAYOUTS)
def test_tiles_are_measured_by_the_definition(layout, lengths, block):
    """Masks of whole tiles, of any size, give the sparsity and error of their pairs."""
    q, k, v = attention(layout)
    kv_len = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    blocks = -(-layout.tokens // block)
    kept = torch.rand(2, 2, 3, blocks, blocks, generator=torch.Generator().manual_seed(1)) > 0.4
    kept[1] = True
    pairs = kept.repeat_interleave(block, -1).repeat_interleave(block, -2)[..., : layout.tokens, : layout.tokens]
    figures = DenseAttention(q, k, v, layout, kv_len).by_tiles(kept, block)
    assert figures[0].tolist() == pytest.approx(naive(q, k, v, layout, pairs[0], kv_len), rel=1e-4)
    assert figures[1].tolist() == pytest.approx([0.0, 0.0], abs=1e-5)


@pytest.mark.parametrize("layout, lengths", LAYOUTS)
def test_means_are_measured_as_the_kernel_makes_them(layout, lengths):
    """With the means of skipped tiles, the error equals that of ``attention(tile_means=True)``."""
    q, k, v = attention(layout)
    kv_len = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    symbols = draw(q, k, layout, Skip(policy="sparge", top_k=0.5), kv_len=kv_len)
    made = kernel(q, k, v, lower(symbols), kv_len=kv_len, tile_means=True)
    dense = DenseAttention(q, k, v, layout, kv_len)
    (figures,) = dense.by_tiles(curves.kept_tiles(symbols)[None], layout.block, means=True).tolist()
    exact = kernel(q, k, v, lower(replace(symbols, skip_bits=torch.full_like(symbols.skip_bits, 255))), kv_len=kv_len)
    rows = slice(layout.vision_start, layout.vision_start + layout.vision)
    error = (made - exact)[:, rows].abs().sum() / exact[:, rows].abs().sum()
    assert figures[1] == pytest.approx(error.item(), rel=1e-3)


@pytest.mark.parametrize("layout, lengths", LAYOUTS)
def test_slices_are_measured_by_the_definition(layout, lengths):
    """Masks of single keys give the sparsity and error of their pairs; a row-block without a key counts as zeros."""
    q, k, v = attention(layout)
    kv_len = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    kept = torch.rand(2, 3, layout.blocks, layout.tokens, generator=torch.Generator().manual_seed(1)) > 0.6
    kept[0, 1, 1] = False
    pairs = kept.repeat_interleave(layout.block, 2)[:, :, : layout.tokens]
    (figures,) = DenseAttention(q, k, v, layout, kv_len).by_slices([kept], layout.block)
    assert figures.tolist() == pytest.approx(naive(q, k, v, layout, pairs, kv_len), rel=1e-4)


def test_maxima_and_masses_are_those_of_the_tiles():
    """Two kinds of tokens attend only to their own: half the tiles have mass 0, in the others weights are 1 / 64."""
    kinds = torch.eye(2).repeat_interleave(64, 0) @ torch.eye(2, 16) * 40
    q = kinds.view(1, 128, 1, 16)
    dense = DenseAttention(q, q, q, TokenLayout(0, 128, 64))
    expected = torch.eye(2)[None, None]
    torch.testing.assert_close(dense.masses(64), expected)
    torch.testing.assert_close(dense.maxima(64, 64) * 64, expected)
    torch.testing.assert_close(dense.maxima(64, 1) * 64, expected.repeat_interleave(64, -1))


def test_sparsity_at_an_error_is_read_off_the_curve():
    """It is where the curve crosses the target, in any order of its points, or the end of one that stays below."""
    curve = ([0.1, 0.4, 0.8], [0.01, 0.04, 0.16])
    assert curves.sparsity_at(0.02, *curve) == pytest.approx(0.2)
    assert curves.sparsity_at(0.04, *curve) == pytest.approx(0.4)
    assert curves.sparsity_at(0.005, *curve) == pytest.approx(0.05)
    assert curves.sparsity_at(0.5, *curve) == 0.8
    assert curves.sparsity_at(0.02, *(list(reversed(each)) for each in curve)) == pytest.approx(0.2)
    assert curves.sparsity_at(0.01, [0.3, 0.3], [0.0, 0.5]) == pytest.approx(0.3)


def test_the_level_read_off_the_curve_gives_the_error_that_was_asked_for():
    """Between its levels c a curve is fine enough: a threshold interpolated like the sparsity errs by the target."""
    layout = TokenLayout(0, 256, 64)
    q, _, v = attention(layout)
    walk = q.cumsum(1) / 10  # tokens resemble their neighbours
    dense = DenseAttention(walk, walk, v, layout)
    measured = dense.by_slices((dense.maxima(64, 1) > level / 256 for level in curves.SLICE_LEVELS), 64)
    sparsity, error = measured.T.tolist()
    for target in curves.TARGETS:
        wanted = curves.sparsity_at(target, sparsity, error)
        low, high = curves.SLICE_LEVELS[0], curves.SLICE_LEVELS[-1]
        for _ in range(30):  # bisection over the level, for the wanted sparsity
            middle = math.sqrt(low * high)
            ((share, found),) = dense.by_slices([dense.maxima(64, 1) > middle / 256], 64).tolist()
            low, high = (middle, high) if share < wanted else (low, middle)
        assert found == pytest.approx(target, rel=0.06)


@pytest.mark.parametrize("name, orders, attentions", [("hunyuan", ["raster", "tiles"], 4), ("flux", ["raster"], 4)])
def test_measuring_leaves_a_run_as_it_is_and_every_curve_is_in_order(name, orders, attentions):
    """Each attention of each measured step counts once, in each order of a video; more skipping raises the error."""
    pipe = tiny_pipeline(name)
    call = {"steps": 2, "height": 96, "width": 80}
    plain = tiny_output(pipe, name, **call)
    methods = [method for method in curves.METHODS if method.name in (curves.SPARGE, curves.AVERAGE_QUERY, "top-k")]
    measurement = curves.Measurement(orders, 2, methods)
    with AttentionTap(pipe, measurement.visit):
        measured = tiny_output(pipe, name, **call)
    assert torch.equal(measured, plain)
    assert measurement.attentions == attentions
    results = measurement.results()
    assert list(dict.fromkeys(r["order"] for r in results)) == orders
    named = {method.name for method in methods} | {curves.TRUE_MASS, curves.TILES_ABOVE, curves.SLICES_ABOVE}
    named |= {name + curves.WITH_MEANS for name in curves.MEANS_OF}
    assert {r["method"] for r in results} == named
    for r in results:
        assert r["sparsity"] == sorted(r["sparsity"]), r["method"]
        assert r["sparsity_at"] == sorted(r["sparsity_at"])
        assert all(mean <= worst + 1e-6 for mean, worst in zip(r["error"], r["worst"], strict=True))
        assert max(r["error"]) in (r["error"][0], r["error"][-1]), r["method"]
    assert all(name in report.tables(results) for name in named - {curves.TILES_ABOVE})


@pytest.mark.parametrize("layout, lengths", LAYOUTS)
def test_slices_above_a_level_are_those_of_the_policy(layout, lengths):
    """In vision's rows, the policy's version of FG-Attn's exact mask keeps the keys of the largest probabilities."""
    q, k, v = attention(layout)
    kv_len = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    levels = curves.levels(DenseAttention(q, k, v, layout, kv_len), 64, 1)
    is_key = torch.arange(layout.tokens) < (layout.tokens if kv_len is None else kv_len[:, None, None, None])
    for level in (0.25, 1.0):
        config = Skip(policy="fg_attn", mask="exact", key_threshold=level)
        kept = curves.kept_keys(draw(q, k, layout, config, kv_len=kv_len))
        rows = layout.vision_blocks
        torch.testing.assert_close((kept & is_key)[:, :, rows], ((levels > level) & is_key)[:, :, rows])


def test_plots_are_written(tmp_path):
    """One file, from curves of any number of orders."""
    curve = {"thresholds": [1.0], "sparsity": [0.5], "error": [0.1], "worst": [0.2]}
    results = [{"method": curves.SPARGE, "order": order, "tile": "64 x 64", **curve} for order in ("raster", "tiles")]
    report.plot(results, "demo-wan", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
