"""Selection: a threshold on masses, found bit by bit, and the bits of the entries above it."""

import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import on_device
from dit_accel.kernels._triton.packing import store_bits
from dit_accel.kernels.constants import COUNT_SLACK, SMALLEST_SHARE, UNITS

ELEMENTS = 4096  # elements of the map per program, or one row


@triton.jit
def _sum_up_to(mass, limit, offset, padding, HAS_OFFSET: tl.constexpr):
    """int64 [rows]: sum of masses up to a limit, each plus ``offset``, without ``padding`` entries, which are 0."""
    counts = mass <= limit[:, None]
    total = tl.sum(tl.where(counts, mass, 0), 1).to(tl.int64)
    if HAS_OFFSET:
        total += (tl.sum(counts.to(tl.int32), 1) - padding) * offset
    return total


@triton.jit
def _lowest_mass(mass, tau_units, offset, padding, HAS_OFFSET: tl.constexpr):
    """int32 [rows, n] -> [rows]: the largest threshold such that masses up to it sum to at most tau of the total."""
    largest = tl.max(mass, 1)
    total = _sum_up_to(mass, largest, offset, padding, HAS_OFFSET)
    budget = (total.to(tl.float64) * tau_units * 2.0**-30).to(tl.int64)
    threshold = tl.zeros_like(largest)
    for step in range(31):
        candidate = threshold | 1 << (30 - step)
        fits = _sum_up_to(mass, candidate, offset, padding, HAS_OFFSET) <= budget
        threshold = tl.where(fits, candidate, threshold)
    return threshold


@triton.jit
def _lowest_count(rank, budget):
    """int32 [rows, n] -> [rows]: the largest threshold with at most ``budget`` non-zero ranks up to it."""
    threshold = tl.zeros_like(tl.max(rank, 1))
    for step in range(31):
        candidate = threshold | 1 << (30 - step)
        count = tl.sum(((rank > 0) & (rank <= candidate[:, None])).to(tl.int32), 1)
        threshold = tl.where(count <= budget, candidate, threshold)
    return threshold


@triton.jit
def _finer(mass, UNITS: tl.constexpr):
    """int32 [rows, n] -> float32 [rows]: the largest power of two by which a row's mass can grow within UNITS."""
    quotient = UNITS // tl.maximum(tl.sum(mass, 1), 1)
    factor = tl.full(quotient.shape, 1.0, tl.float32)
    for step in tl.static_range(1, 31):
        factor = tl.where(quotient >> step > 0, factor * 2, factor)
    return factor


@triton.jit
def _exponential_minus_1(x):
    """exp(x) - 1 for 0 <= x <= 1 by the series up to x^12 / 12!, accurate for small x too."""
    total = tl.full(x.shape, 1.0, tl.float32)
    for step in tl.static_range(11):
        total = 1.0 + x * (1.0 / (12 - step)) * total
    return x * total


@triton.jit
def _select_tiles(
    probabilities, whole_rows, whole_columns, skip_bits, rows, blocks, row_bytes, tau_units,
    first_always, stop_always, UNITS: tl.constexpr, COUNT_SLACK: tl.constexpr, BY_COUNT: tl.constexpr,
    HAS_ROWS: tl.constexpr, HAS_COLUMNS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [rows, 1]
    tile = tl.arange(0, TILES)[None, :]
    valid = (row < rows) & (tile < blocks)
    row_block = row % blocks
    is_always = ((row_block >= first_always) & (row_block < stop_always)) | (
        (tile >= first_always) & (tile < stop_always)
    )
    share = tl.load(probabilities + row * blocks + tile, valid, other=0.0)
    if HAS_ROWS:
        is_always |= tl.load(whole_rows + row, row < rows, other=0) != 0
    if HAS_COLUMNS:
        in_column = tl.load(whole_columns + (row - row_block) + tile, valid, other=0) != 0
        is_always |= in_column
        share = tl.where(in_column, 0.0, share)
    if BY_COUNT:
        mass = share.to(tl.int32, bitcast=True)  # bits of positive floats sort like the floats
        count = tl.sum((mass > 0).to(tl.int64), 1)
        threshold = _lowest_count(mass, (count * tau_units + COUNT_SLACK) // UNITS)
    else:
        mass = tl.ceil(share * UNITS).to(tl.int32)
        if HAS_COLUMNS:
            mass = tl.ceil(share * (UNITS * _finer(mass, UNITS))[:, None]).to(tl.int32)
        threshold = _lowest_mass(mass, tau_units, 0, 0, HAS_OFFSET=False)
    keep = is_always | (mass > threshold[:, None]) | (mass == tl.max(mass, 1)[:, None])
    store_bits(skip_bits, keep & (tile < blocks), row, rows, row_bytes, ROWS, TILES)


@triton.jit
def _select_rows(
    probabilities, cache_bits, heads, blocks, head_bytes, units, tau_units,
    first_text, stop_text, first_vision, stop_vision,
    UNITS: tl.constexpr, SMALLEST_SHARE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Select rows; one program per byte of heads."""
    batch = (tl.program_id(0) // head_bytes).to(tl.int64)
    head_byte = tl.program_id(0) % head_bytes
    block = tl.arange(0, BLOCKS)[None, :]  # [1, blocks]
    is_vision = (block >= first_vision) & (block < stop_vision)
    entries = stop_vision - first_vision
    packed = tl.zeros([1, BLOCKS], tl.int32)
    for bit in range(tl.minimum(heads - head_byte * 8, 8)):
        map_of_head = probabilities + (batch * heads + head_byte * 8 + bit) * blocks * blocks
        contribution = tl.zeros([1, BLOCKS], tl.int32)
        share = tl.zeros([1, BLOCKS], tl.float32)  # share of the softmax without the part that all blocks share
        common = tl.zeros([1], tl.float32)
        for text in range(first_text, stop_text):
            to_text = tl.load(map_of_head + text * blocks + block, is_vision, other=0.0)
            contribution += tl.ceil(to_text * units).to(tl.int32)
            from_text = tl.load(map_of_head + block * blocks + text, is_vision, other=0.0)
            excess = _exponential_minus_1(from_text)
            scale = 1.0 / (entries + tl.sum(excess, 1))
            common += scale
            share += excess * scale[:, None]
        share_units = UNITS / tl.maximum(tl.sum(share, 1), common * SMALLEST_SHARE)
        guidance = tl.where(is_vision, tl.ceil(share * share_units[:, None]).to(tl.int32) + 1, 0)
        offset = tl.ceil(common * share_units).to(tl.int64) - 1  # each mass contains 1 of it: 0 marks no entry
        contributes = contribution > _lowest_mass(contribution, tau_units, 0, 0, HAS_OFFSET=False)[:, None]
        threshold = _lowest_mass(guidance, tau_units, offset, BLOCKS - entries, HAS_OFFSET=True)
        packed |= tl.where(is_vision, (contributes | (guidance > threshold[:, None])).to(tl.int32), 1) << bit
    tl.store(cache_bits + (batch * blocks + block) * head_bytes + head_byte, packed.to(tl.uint8), block < blocks)


def select_tiles_into(skip_bits, probabilities, units, first_always, stop_always, by_count, rows, columns) -> None:
    batch, heads, blocks, row_bytes = skip_bits.shape
    tiles = max(triton.next_power_of_2(blocks), 8)
    rows_a_program = max(ELEMENTS // tiles, 1)
    with on_device(probabilities):
        _select_tiles[(triton.cdiv(batch * heads * blocks, rows_a_program),)](
            probabilities, rows, columns, skip_bits, batch * heads * blocks, blocks, row_bytes, units,
            first_always, stop_always, UNITS=UNITS, COUNT_SLACK=COUNT_SLACK, BY_COUNT=by_count,
            HAS_ROWS=rows is not None, HAS_COLUMNS=columns is not None, ROWS=rows_a_program, TILES=tiles,
        )  # fmt: skip


def select_rows_into(cache_bits, probabilities, units, tau_units, text, vision) -> None:
    batch, heads, blocks, _ = probabilities.shape
    head_bytes = cache_bits.shape[-1]
    with on_device(probabilities):
        _select_rows[(batch * head_bytes,)](
            probabilities, cache_bits, heads, blocks, head_bytes, float(units), tau_units,
            text.start, text.stop, vision.start, vision.stop,
            UNITS=UNITS, SMALLEST_SHARE=SMALLEST_SHARE, BLOCKS=triton.next_power_of_2(blocks),
        )  # fmt: skip
