"""Selection keeps what carries the mass, by the ops' definitions, on every backend alike."""

import math

import pytest
import torch

from dit_accel.errors import ShapeError
from dit_accel.kernels import lower, pooled_map
from dit_accel.kernels.packing import unpack_bits
from dit_accel.kernels.selection import UNITS, select_rows, select_tiles
from dit_accel.symbols import AttentionPlan, SparseSymbols

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA kernels need a GPU")
every_backend = pytest.mark.parametrize("backend", ["reference", "triton", pytest.param("cuda", marks=needs_gpu)])

SHAPES = [(1, 1, 1), (2, 3, 13), (1, 9, 40), (1, 1, 300)]  # batch, heads, blocks
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


def naive_tiles(probabilities, tau, always):
    tiles = torch.ones_like(probabilities, dtype=torch.bool)
    blocks = probabilities.shape[-1]
    for b, h, i in torch.cartesian_prod(*map(torch.arange, probabilities.shape[:3])).tolist():
        masses = [math.ceil(p * UNITS) for p in probabilities[b, h, i].tolist()]
        for j in lowest(masses, tau) - {j for j in range(blocks) if masses[j] == max(masses)}:
            tiles[b, h, i, j] = i in range(blocks)[always] or j in range(blocks)[always]
    return tiles


@every_backend
@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_equal_a_naive_loop(shape, tau, backend, make_map):
    always = slice(1, 3)
    probabilities = make_map(*shape)
    bits = select_tiles(probabilities, tau, always=always, backend=backend)
    assert bits.shape == (*shape, -(-shape[-1] // 8))
    expected = naive_tiles(probabilities, tau, always)
    assert torch.equal(unpack_bits(bits, shape[-1], backend="reference"), expected)


@every_backend
def test_bits_beyond_the_last_block_and_head_are_zero(backend, make_map):
    probabilities = make_map(1, 3, 13)
    assert (select_tiles(probabilities, 0.0, always=slice(0, 13), backend=backend)[..., 1] == 0b11111).all()
    rows = select_rows(probabilities, 0.0, text=slice(0, 2), vision=slice(2, 13), backend=backend)
    assert (rows == 0b111).all()


@every_backend
def test_rows_of_nothing_and_rows_of_one_tile(backend, device):
    """A row without a distribution keeps all; one with a single positive entry keeps that, whatever it may lose."""
    probabilities = torch.zeros(1, 1, 3, 3, device=device)
    probabilities[..., 1, 2] = 1.0
    probabilities[..., 2, 0] = 1e-30
    tiles = unpack_bits(select_tiles(probabilities, 1.0, backend=backend), 3)
    assert tiles[0, 0].tolist() == [[True] * 3, [False, False, True], [True, False, False]]


@every_backend
def test_equal_tiles_go_or_stay_together(backend, device):
    probabilities = torch.tensor([0.1, 0.1, 0.1, 0.7], device=device).expand(1, 1, 4, 4)
    kept = [unpack_bits(select_tiles(probabilities, tau, backend=backend), 4)[0, 0, 0].tolist() for tau in (0.29, 0.31)]
    assert kept == [[True] * 4, [False, False, False, True]]


def naive_rows(probabilities, tau, text, vision):
    """By equation 1, in float64 but for the integer masses."""
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


@every_backend
@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("text", [slice(0, 1), slice(0, 3), slice(11, 13)], ids=["one", "three", "behind-vision"])
def test_rows_equal_a_naive_loop(text, tau, backend, make_map):
    probabilities = make_map(2, 11, 13)
    vision = slice(0, 11) if text.start else slice(text.stop, 12)
    bits = select_rows(probabilities, tau, text=text, vision=vision, backend=backend)
    rows = unpack_bits(bits, 11, backend="reference").transpose(1, 2)
    assert torch.equal(rows.cpu(), naive_rows(probabilities.cpu(), tau, text, vision))


@pytest.mark.parametrize(("text", "vision"), [(slice(0, 0), slice(0, 13)), (slice(0, 13), slice(13, 13))], ids=str)
def test_without_text_or_vision_every_row_computes(text, vision, make_map):
    bits = select_rows(make_map(2, 3, 13), 1.0, text=text, vision=vision)
    assert unpack_bits(bits, 3).all()


@needs_gpu
@pytest.mark.parametrize("blocks", [64, 132, 258, 591, 929, 2100])
def test_backends_agree_at_full_size(blocks, make_map):
    """Tiles are exact. Rows may differ where exponentials round to another integer: one in a thousand at most."""
    probabilities = make_map(1, 3, blocks)
    expected = select_tiles(probabilities, 0.3, always=slice(0, 2), backend="reference")
    text, vision = slice(0, 4), slice(4, blocks)
    rows = select_rows(probabilities, 0.5, text=text, vision=vision, backend="reference")
    for backend in ("auto", "triton"):
        assert torch.equal(select_tiles(probabilities, 0.3, always=slice(0, 2), backend=backend), expected)
        other = select_rows(probabilities, 0.5, text=text, vision=vision, backend=backend)
        assert (unpack_bits(other, 3) != unpack_bits(rows, 3)).sum() <= 1 + 3 * blocks // 1000


@needs_gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_nothing_from_q_and_k_to_the_plan_waits_for_the_gpu(backend, make_tensor):
    """The whole prediction can be captured in a CUDA graph, which a synchronisation would break."""
    q, k = make_tensor(1, 700, 3, 64, dtype=torch.bfloat16), make_tensor(1, 700, 3, 64, dtype=torch.bfloat16)

    def predict() -> AttentionPlan:
        probabilities = pooled_map(q, k, 64, backend=backend).probabilities
        rows = select_rows(probabilities, 0.5, text=slice(0, 2), vision=slice(2, 11), backend=backend)
        tiles = select_tiles(probabilities, 0.3, always=slice(0, 2), backend=backend)
        return lower(SparseSymbols(rows, tiles, 3, 700, 64), backend=backend)

    expected = predict()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = predict()
    graph.replay()
    assert torch.equal(plan.mask64, expected.mask64)
    assert torch.equal(plan.kv_count, expected.kv_count)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3, 3), 0.5), r"probabilities must have shape \[B, H, T, T\], got \[3, 3\]"),
        ((torch.zeros(1, 1, 2, 3), 0.5), r"probabilities must have shape \[B, H, 3, 3\], got \[1, 1, 2, 3\]"),
        ((torch.zeros(1, 1, 3, 3).half(), 0.5), "probabilities must have dtype torch.float32, got torch.float16"),
        ((torch.zeros(1, 1, 3, 3), 1.5), "tau must be between 0 and 1, got 1.5"),
    ],
    ids=["axes", "square", "dtype", "tau"],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ShapeError, match=message):
        select_tiles(*arguments)
    with pytest.raises(ShapeError, match=message):
        select_rows(*arguments, text=slice(0, 1), vision=slice(1, 3))
