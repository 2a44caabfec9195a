"""Time the overhead of sparse attention, from q and k to a plan, and the forecast.

Chains of small kernels are timed inside a CUDA graph, without Python's launches: in a GPU-bound step Python launches
them while the GPU still runs earlier kernels.
"""

from dataclasses import replace
from functools import partial

import torch

from dit_accel import kernels
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.plans.selection import select_rows, select_tiles
from dit_accel.kernels.symbols import SparseSymbols
from scripts.bench.kernels import verify
from scripts.bench.kernels.attention import time_baselines
from scripts.bench.kernels.baselines import DENSE
from scripts.bench.kernels.cases import Case, make_inputs
from scripts.bench.kernels.clock import median_ms, replayed_ms
from scripts.bench.kernels.recorder import Recorder
from scripts.bench.kernels.sizes import Sizes
from scripts.bench.kernels.verify import Verdict

TEXT_TOKENS = 512  # FLUX's prompt
TAU_Q, TAU_KV = 0.5, 0.15  # FlashOmni's thresholds
DIFFERING = 1e-3  # share of decisions that rounding may change compared with the references
FORECASTS = {"M=2": (1.5, -0.5), "M=3": (1.875, -1.25, 0.375)}


def bench_lowering(recorder: Recorder, dense: Case, sizes: Sizes) -> None:
    """Time ``lower`` into an existing plan, and ``pack_bits`` of its tiles."""
    inputs = make_inputs(replace(dense, rows=0.5, tiles=0.5), recorder.device)
    common = {"density": inputs.density, "ideal": 1.0, "timer": replayed_ms}
    for backend in recorder.backends:
        lower = partial(kernels.lower, inputs.symbols, backend=backend)
        recorder.time(
            "lower", backend, "", dense, lower, lambda plan: verify.verify_plan(plan, inputs.symbols), **common
        )
        pack = partial(kernels.pack_bits, inputs.tiles, backend=backend)
        recorder.time("pack_bits", backend, "", dense, pack, partial(verify.verify_packing, inputs=inputs), **common)


def bench_pooling(recorder: Recorder, case: Case, sizes: Sizes) -> None:
    """Time the pooled map by the bytes of q and k."""
    inputs = make_inputs(case, recorder.device)
    q, k = inputs.features() + 0.5, inputs.features() + 0.5
    judge = partial(_judge_pooled, q, k, case.block)
    for backend in recorder.backends:
        call = partial(kernels.pooled_map, q, k, case.block, backend=backend)
        work = q.nbytes + k.nbytes
        recorder.time("pooled_map", backend, "", case, call, judge, work=work, unit="GB/s", timer=replayed_ms)


def _judge_pooled(q: torch.Tensor, k: torch.Tensor, block: int, pooled: kernels.PooledMap) -> Verdict:
    return verify.worst(verify.verify_pooled_map(pooled, q, k, block).values())


def bench_symbols(recorder: Recorder, case: Case, sizes: Sizes) -> None:
    """Time the whole path to a plan (pooled map, scores, masks, packing, lowering), its parts, and dense attention."""
    inputs = make_inputs(case, recorder.device)
    qkv = inputs.qkv()
    q, k, _ = qkv
    text = min(TEXT_TOKENS, case.tokens // 4)
    layout = TokenLayout(text, case.tokens - text, case.block)
    baselines = time_baselines(recorder, DENSE[recorder.device][:1], f"symbols {case.name}", qkv, inputs)
    pool = partial(kernels.pooled_map, q, k, case.block)
    probabilities = pool().probabilities
    symbols = _select(probabilities, layout)
    pooled = _judge_pooled(q, k, case.block, pool())
    chosen = _judge_symbols(symbols, _select(pool(backend="reference").probabilities, layout, "reference"))
    lowered = verify.verify_plan(kernels.lower(symbols), symbols)
    parts = {
        "whole": (
            lambda: kernels.lower(_select(pool().probabilities, layout)),
            verify.worst([pooled, chosen, lowered]),
        ),
        "pooled map": (pool, pooled),
        "scores, masks, packing": (partial(_select, probabilities, layout), chosen),
        "lowering": (partial(kernels.lower, symbols), lowered),
    }
    for kind, (call, verdict) in parts.items():
        recorder.time("symbols", "auto", kind, case, call, verdict, baselines=baselines, timer=replayed_ms)


def _select(probabilities: torch.Tensor, layout: TokenLayout, backend: str = "auto") -> SparseSymbols:
    """Compute symbols with FlashOmni's rows and SpargeAttn's tiles, as an attention layer at level head does."""
    text, vision = layout.text_blocks, layout.vision_blocks
    rows = select_rows(probabilities, TAU_Q, text=text, vision=vision, backend=backend)
    tiles = select_tiles(probabilities, TAU_KV, always=text, backend=backend)
    return SparseSymbols(rows, tiles, probabilities.shape[1], layout.tokens, layout.block)


def _judge_symbols(actual: SparseSymbols, expected: SparseSymbols) -> Verdict:
    """Share of rows and tiles that the references decide differently, because a mass lies at the threshold."""
    rows = verify.differing(actual.cache_bits, expected.cache_bits, actual.heads)
    return Verdict(max(rows, verify.differing(actual.skip_bits, expected.skip_bits, actual.blocks)), DIFFERING)


def bench_forecast(recorder: Recorder, case: Case, sizes: Sizes) -> None:
    """Time the weighted sum by the bytes it must move, against a copy."""
    inputs = make_inputs(case, recorder.device)
    history = [inputs.features() for _ in range(3)]
    out = inputs.features()
    copy_ms = median_ms(partial(out.copy_, history[0]), recorder.device)
    for name, weights in FORECASTS.items():
        used = history[: len(weights)]
        judge = partial(verify.verify_weighted_sum, history=used, weights=weights)
        work = (len(used) + 1) * out.nbytes  # reads every entry, writes the sum
        baselines = {"copy of as many bytes": copy_ms * work / (2 * out.nbytes)}
        figures = {"density": 1.0, "ideal": 1.0, "work": work, "unit": "GB/s", "baselines": baselines}
        for backend in recorder.backends:
            call = partial(kernels.weighted_sum, used, weights, backend=backend)
            recorder.time("weighted_sum", backend, name, case, call, judge, **figures)
