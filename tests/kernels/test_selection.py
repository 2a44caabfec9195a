"""Selection keeps the tiles with most of the mass, by the ops' definitions, on every backend."""

import math

import pytest
import torch

from dit_accel.kernels import lower, pooled_map
from dit_accel.kernels.constants import UNITS
from dit_accel.kernels.packing import pack_bits, unpack_bits
from dit_accel.kernels.plans.selection import select_rows, select_tiles
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols
from tests.kernels.conftest import BACKENDS, captured, needs_gpu
from tests.pairs import every_pair

MANY_BLOCKS = 300 if torch.cuda.is_available() else 140  # rows of 256 tiles fill Triton programs too, and ragged ones
SHAPES = [(1, 1, 1), (2, 3, 13), (1, 2, 40), (1, 1, MANY_BLOCKS)]  # batch, heads, blocks
ROWS = {  # batch and heads, which fill two bytes or one, and the text's blocks of 13
    "one": (2, 9, slice(0, 1)),
    "three": (1, 3, slice(0, 3)),
    "behind-vision": (1, 3, slice(11, 13)),
}
TAUS = [0.0, 0.05, 0.5, 0.999, 1.0]


@pytest.fixture
def make_map(device):
    """``make(batch, heads, blocks, sharpness)``: rows of a softmax, many of them with equal entries."""
    generator = torch.Generator().manual_seed(2)

    def make(batch: int, heads: int, blocks: int, sharpness: float = 2.0) -> torch.Tensor:
        scores = torch.randn(batch, heads, blocks, blocks, generator=generator).mul(8).round() / 8
        return scores.mul(sharpness).softmax(-1).to(device)

    return make


def lowest(masses, tau):
    """Positions whose mass, with all masses up to it, sums to at most tau of the total. Integers, so exact."""
    budget = int(float(sum(masses)) * round(tau * UNITS) * 2.0**-30)
    return {i for i, mass in enumerate(masses) if sum(other for other in masses if other <= mass) <= budget}


def kept_tiles(row, columns, tau=None, top_k=None):
    """Tiles of a row that are kept, by the definitions; ``columns`` (or None) are kept and do not count."""
    others = [j for j in range(len(row)) if j not in (columns or ())]
    if top_k is not None:
        present = sorted((row[j] for j in others if row[j] > 0), reverse=True)
        least = present[math.ceil(round(top_k * len(present), 6)) - 1] if present else 0.0
        return set(range(len(row))) - {j for j in others if row[j] < least}
    finer = 0
    while columns is not None and others and sum(math.ceil(row[j] * UNITS) for j in others) << finer + 1 <= UNITS:
        finer += 1
    masses = [math.ceil(row[j] * UNITS * 2**finer) for j in others]
    return set(range(len(row))) - {others[n] for n in lowest(masses, tau) if masses[n] != max(masses)}


CHOICES = {f"tau-{tau}": {"tau": tau} for tau in TAUS}
CHOICES |= {f"top-{k}": {"tau": None, "top_k": k} for k in (1e-6, 0.3, 0.9)}


@pytest.fixture
def make_flags(device):
    """``make(batch, heads, blocks)``: three in ten blocks marked."""
    generator = torch.Generator().manual_seed(3)
    return lambda *shape: (torch.rand(*shape, generator=generator) < 0.3).to(device)


@every_pair(shape=SHAPES, choice=CHOICES, marks=(False, True), backend=BACKENDS)
def test_tiles_equal_a_naive_loop(shape, choice, marks, backend, make_map, make_flags):
    """Whole rows and columns are kept, and the others are chosen as if the columns were not there."""
    probabilities, always, blocks = make_map(*shape), slice(1, 3), range(shape[-1])[1:3]
    probabilities[..., -1] = 0.0
    rows, columns = (make_flags(*shape) if marks else None for _ in range(2))
    bits = select_tiles(probabilities, always=always, rows=rows, columns=columns, backend=backend, **choice)
    assert bits.shape == (*shape, -(-shape[-1] // 8))
    tiles = unpack_bits(bits, shape[-1]).cpu()
    assert torch.equal(pack_bits(tiles), bits.cpu())  # bits beyond the last block are 0
    for b, h, i in torch.cartesian_prod(*map(torch.arange, shape)).tolist():
        marked = None if columns is None else set(columns[b, h].nonzero().flatten().tolist())
        expected = kept_tiles(probabilities[b, h, i].tolist(), marked, **choice) | set(blocks)
        if i in blocks or (rows is not None and rows[b, h, i]):
            expected = set(range(shape[-1]))
        assert set(tiles[b, h, i].nonzero().flatten().tolist()) == expected


def test_little_mass_beside_a_marked_column_is_still_told_apart(backend, device):
    """A column with all but 1e-9 of the mass leaves the others as they would be without it."""
    rest = torch.tensor([0.5, 0.3, 0.15, 0.05], device=device)
    beside = torch.cat([torch.ones(1, device=device), rest * 1e-9]).expand(1, 1, 5, 5)
    columns = torch.tensor([True, False, False, False, False], device=device).expand(1, 1, 5)
    tiles = unpack_bits(select_tiles(beside, 0.21, columns=columns, backend=backend), 5)
    assert tiles[0, 0, 0].tolist() == [True, True, True, False, False]


def test_rows_of_nothing_and_rows_of_one_tile(backend, device):
    """A row without a distribution keeps all tiles; a row with one positive entry keeps it at any threshold."""
    probabilities = torch.zeros(1, 1, 3, 3, device=device)
    probabilities[..., 1, 2] = 1.0
    probabilities[..., 2, 0] = 1e-30
    tiles = unpack_bits(select_tiles(probabilities, 1.0, backend=backend), 3)
    assert tiles[0, 0].tolist() == [[True] * 3, [False, False, True], [True, False, False]]


def test_equal_tiles_go_or_stay_together(backend, device):
    probabilities = torch.tensor([0.1, 0.1, 0.1, 0.7], device=device).expand(1, 1, 4, 4)
    kept = [unpack_bits(select_tiles(probabilities, tau, backend=backend), 4)[0, 0, 0].tolist() for tau in (0.29, 0.31)]
    assert kept == [[True] * 4, [False, False, False, True]]


def naive_rows(probabilities, tau, text, vision):
    """Select rows by equation 1, in float64 except for the integer masses."""
    batch, heads, blocks, _ = probabilities.shape
    rows = torch.ones(batch, heads, blocks, dtype=torch.bool)
    texts, visions = range(blocks)[text], range(blocks)[vision]
    units = UNITS >> (len(texts) - 1).bit_length()
    for b in range(batch):
        for h in range(heads):
            p = probabilities[b, h].double()
            contribution = [sum(math.ceil(p[j, i] * units) for j in texts) for i in visions]
            guidance = p[vision, text].softmax(0).sum(1).mul(2**40).ceil().long().tolist()
            for position in lowest(contribution, tau) & lowest(guidance, tau):
                rows[b, h, visions[position]] = False
    return rows


@every_pair(case=ROWS, tau=TAUS, backend=BACKENDS)
def test_rows_equal_a_naive_loop(case, tau, backend, make_map):
    batch, heads, text = case
    probabilities = make_map(batch, heads, 13)
    vision = slice(0, 11) if text.start else slice(text.stop, 12)
    bits = select_rows(probabilities, tau, text=text, vision=vision, backend=backend)
    assert torch.equal(bits.cpu(), pack_bits(naive_rows(probabilities.cpu(), tau, text, vision).transpose(1, 2)))


@pytest.mark.parametrize(("text", "vision"), [(slice(0, 0), slice(0, 13)), (slice(0, 13), slice(13, 13))], ids=str)
def test_without_text_or_vision_every_row_computes(text, vision, make_map):
    assert unpack_bits(select_rows(make_map(2, 3, 13), 1.0, text=text, vision=vision), 3).all()


@needs_gpu
@pytest.mark.parametrize("blocks", [64, 132, 258, 591, 929, 2100])
def test_backends_agree_at_full_size(blocks, make_map, make_flags):
    """Tiles are exact. Rows may differ where exponentials round to another integer: one in a thousand at most."""
    probabilities = make_map(1, 3, blocks)
    expected = select_tiles(probabilities, 0.3, always=slice(0, 2), backend="reference")
    rows_kept, columns_kept = make_flags(1, 3, blocks), make_flags(1, 3, blocks)
    choices = {"tau": 0.3}, {"tau": None, "top_k": 0.2}
    text, vision = slice(0, 4), slice(4, blocks)
    rows = select_rows(probabilities, 0.5, text=text, vision=vision, backend="reference")
    assert torch.equal(select_tiles(probabilities, 0.3, always=slice(0, 2), backend="triton"), expected)
    for choice in choices:
        options = {"rows": rows_kept, "columns": columns_kept, **choice}
        same = select_tiles(probabilities, backend="triton", **options)
        assert torch.equal(same, select_tiles(probabilities, backend="reference", **options))
    other = select_rows(probabilities, 0.5, text=text, vision=vision, backend="triton")
    assert (unpack_bits(other, 3) != unpack_bits(rows, 3)).sum() <= 1 + 3 * blocks // 1000


@needs_gpu
def test_nothing_from_q_and_k_to_the_plan_waits_for_the_gpu(make_tensor):
    """The whole prediction can be captured in a CUDA graph."""
    q, k = make_tensor(1, 700, 3, 64, dtype=torch.bfloat16), make_tensor(1, 700, 3, 64, dtype=torch.bfloat16)

    def predict() -> AttentionPlan:
        probabilities = pooled_map(q, k, 64, backend="triton").probabilities
        rows = select_rows(probabilities, 0.5, text=slice(0, 2), vision=slice(2, 11), backend="triton")
        tiles = select_tiles(probabilities, 0.3, always=slice(0, 2), backend="triton")
        return lower(SparseSymbols(rows, tiles, 3, 700, 64), backend="triton")

    expected, plan = predict(), captured(predict)
    assert torch.equal(plan.mask64, expected.mask64) and torch.equal(plan.kv_count, expected.kv_count)
