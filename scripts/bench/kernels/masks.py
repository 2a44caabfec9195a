"""Time masks inside tiles: OmniAttention's five mask families, at its sequence lengths and at longer ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from dit_accel import kernels
from dit_accel.kernels.layout import block_count
from dit_accel.kernels.symbols import CAUSAL_TILE, FIRST_PARTIAL_TILE, FULL_TILE, SparseSymbols, TileMasks
from dit_accel.kernels.tile_masks import mask_from_plan, symbols_of_tiles
from dit_accel.sparse.policies import static
from scripts.bench.kernels.attention import time_attention, time_baselines
from scripts.bench.kernels.baselines import DENSE, FLEX_TILE, SPARSE
from scripts.bench.kernels.cases import Attends, Case, causal, inputs_of, masked_inputs
from scripts.bench.kernels.clock import Timer, called_ms, median_ms, replayed_ms
from scripts.bench.kernels.recorder import Recorder
from scripts.bench.kernels.sizes import Sizes

DOCUMENTS, INTERLEAVED = (256, 68, 188), (133, 309, 70)  # the paper's segments of 512 tokens; the second has an image
LAUNCH_BOUND = 2048  # tokens up to which launch overhead dominates a call
LONG_GROUPS = 8  # repetitions of the paper's segments in longer sequences
CODES = {"full": FULL_TILE, "causal": CAUSAL_TILE, "partial": FIRST_PARTIAL_TILE}
RANDOM = {"full/partial": ("full", "partial"), "full/causal/partial": ("full", "causal", "partial")}
DENSE_MASK_TOKENS = 8192  # limit for dense attention with a mask over all S × S pairs


def bench_masks(recorder: Recorder, case: Case, sizes: Sizes) -> None:
    """Time every family, FlexAttention and masked SDPA; short sequences in a CUDA graph and called from Python."""
    device = recorder.device
    timers: dict[str, Timer] = {"": median_ms}
    if case.tokens <= LAUNCH_BOUND:
        timers = {", graph": replayed_ms, ", called": called_ms}
    for family in ("causal", "documents", "interleaved", *RANDOM):
        inputs = inputs_of(case, *pattern(family, case, device))
        for_flex = inputs
        if case.block < FLEX_TILE <= case.tokens:
            coarse = replace(case, block=FLEX_TILE)
            if family in RANDOM:  # random tiles of the case's own block size
                for_flex = masked_inputs(coarse, inputs.attends, device)
            else:
                for_flex = inputs_of(coarse, *pattern(family, coarse, device))
        dense = ["sdpa mask"] if device != "cpu" and case.tokens <= DENSE_MASK_TOKENS else []
        if inputs.attends is causal:
            dense += DENSE[device]
        qkv = inputs.qkv()
        for how, timer in timers.items():
            kind = f"{family} {case.block}{how}"
            place = f"attention masks {kind} {case.name}"
            baselines = time_baselines(recorder, SPARSE[device], place, qkv, for_flex, timer)
            baselines |= time_baselines(recorder, dense, place, qkv, inputs, timer)
            for backend in recorder.backends:
                time_attention(recorder, "attention masks", backend, kind, qkv, inputs, baselines, timer=timer)


def pattern(family: str, case: Case, device: str | torch.device) -> tuple[SparseSymbols, Attends]:
    """Symbols of a family, and the same mask pair by pair."""
    one_head = {"block": case.block, "device": device}
    options = {**one_head, "batch": case.batch, "heads": case.heads}
    if family == "causal":
        return static.causal(case.tokens, **options), causal
    if family in RANDOM:
        draw = partial(random_tiles, case.tokens, RANDOM[family])
        seeded = [torch.Generator(device).manual_seed(0) for _ in range(2)]
        pairs = mask_from_plan(kernels.lower(draw(generator=seeded[0], **one_head)))[0, 0]
        return draw(generator=seeded[1], **options), lambda query, key: pairs[query, key]
    lengths = _segments(DOCUMENTS if family == "documents" else INTERLEAVED, case.tokens)
    length = torch.tensor(lengths, device=device)
    if family == "documents":
        document = torch.arange(len(lengths), device=device).repeat_interleave(length)
        return static.documents(lengths, **options), lambda query, key: document[query] == document[key]
    is_text = [number % 3 != 1 for number in range(len(lengths))]
    image_end = length.cumsum(0).masked_fill(torch.tensor(is_text, device=device), 0).repeat_interleave(length)
    symbols = static.interleaved(lengths, is_text, **options)
    return symbols, lambda query, key: (key <= query) | (key < image_end[query])


def random_tiles(
    tokens: int,
    kinds: Sequence[str],
    *,
    generator: torch.Generator | None = None,
    block: int = 128,
    batch: int = 1,
    heads: int = 1,
    device: str | torch.device = "cpu",
) -> SparseSymbols:
    """Return random tiles on and below the diagonal; in PARTIAL tiles each pair attends with probability ½.

    Args:
        kinds: names in ``CODES``; each is chosen with equal probability.
        generator: random generator on ``device``; None = torch's own.
    """
    blocks = block_count(tokens, block)
    tiles = torch.ones(1, 1, blocks, blocks, dtype=torch.bool, device=device).tril()
    choices = torch.tensor([CODES[kind] for kind in kinds], dtype=torch.int32, device=device)
    codes = choices[torch.randint(len(kinds), tiles.shape, generator=generator, device=device)]
    partial_tiles = tiles & (codes == FIRST_PARTIAL_TILE)
    count = int(partial_tiles.sum())
    codes[partial_tiles] += torch.arange(count, dtype=torch.int32, device=device)
    shape = (count, block, block // 8)
    pool = torch.randint(256, shape, generator=generator, device=device, dtype=torch.uint8)
    return symbols_of_tiles(tiles, TileMasks(codes, pool), tokens, block, batch, heads)


def _segments(of_512: tuple[int, ...], tokens: int) -> list[int]:
    """Stretch the segments of 512 tokens to the sequence, or to each eighth of a long one."""
    groups = 1 if tokens <= LAUNCH_BOUND else LONG_GROUPS
    parts = [length * tokens // (512 * groups) for length in of_512] * groups
    parts[-1] += tokens - sum(parts)
    return parts
