"""From q and k to a plan, and the forecast: what sparse attention costs beside itself.

Chains of small kernels are timed inside a CUDA graph, without Python's launches: in a step that the GPU bounds those
happen while it is still busy with what came before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from dit_accel import kernels
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.selection import select_rows, select_tiles
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols
from dit_accel.tools.bench import verify
from dit_accel.tools.bench.baselines import baseline, dense_baselines
from dit_accel.tools.bench.cases import Inputs, make_inputs
from dit_accel.tools.bench.clock import median_ms, replayed_ms
from dit_accel.tools.bench.recorder import Recorder, measured, shape_of
from dit_accel.tools.bench.sizes import Sizes
from dit_accel.tools.bench.verify import Verdict

TEXT_TOKENS = 512  # FLUX's prompt
TAU_Q, TAU_KV = 0.5, 0.15  # FlashOmni's thresholds
DIFFERING = 1e-3  # share of decisions that may differ from the references' by rounding
FORECASTS = {"M=2": (1.5, -0.5), "M=3": (1.875, -1.25, 0.375)}
REUSED = 0.5


def bench_lowering(recorder: Recorder, sizes: Sizes) -> None:
    """``lower`` into a plan that is there, and ``pack_bits`` of its tiles."""
    for dense in sizes.lowering:
        inputs = make_inputs(replace(dense, rows=0.5, tiles=0.5), recorder.device)
        for backend in recorder.backends:
            common = {"sparsity": 1 - inputs.density, "timer": replayed_ms}
            call = partial(kernels.lower, inputs.symbols, scratch=inputs.plan, backend=backend)
            judge = partial(_judge_plan, call, inputs)
            recorder.time("lower", backend, "", shape_of(dense), call, judge, **common)
            call = partial(kernels.pack_bits, inputs.tiles, backend=backend)
            judge = partial(verify.verify_packing, inputs, backend)
            recorder.time("pack_bits", backend, "", shape_of(dense), call, judge, **common)


def _judge_plan(call: Callable[[], AttentionPlan], inputs: Inputs) -> Verdict:
    for tensor in inputs.plan.tensors():
        tensor.fill_(-1)
    return verify.verify_plan(call(), inputs.symbols)


def bench_pooling(recorder: Recorder, sizes: Sizes) -> None:
    """The pooled map, by the bytes of q and k."""
    for case in sizes.pooling:
        inputs = make_inputs(case, recorder.device)
        q, k = inputs.features() + 0.5, inputs.features() + 0.5
        for backend in recorder.backends:
            call = partial(kernels.pooled_map, q, k, case.block, backend=backend)

            def judge(call=call, q=q, k=k, block=case.block) -> Verdict:
                low = kernels.pooled_map(q, k, block, backend="reference")
                return verify.worst(verify.verify_pooled_map(call(), low, q, k, block).values())

            work = q.nbytes + k.nbytes
            recorder.time(
                "pooled_map", backend, "", shape_of(case), call, judge, work=work, unit="GB/s", timer=replayed_ms
            )


def bench_symbols(recorder: Recorder, sizes: Sizes) -> None:
    """All that makes a plan, pooled map, scores, masks, packing and lowering, and its parts; beside dense attention."""
    for case in sizes.symbols:
        inputs = make_inputs(case, recorder.device)
        q, k, v = inputs.features(), inputs.features(), inputs.features()
        text = min(TEXT_TOKENS, case.tokens // 4)
        layout = TokenLayout(text, case.tokens - text, case.block)
        dense = dense_baselines(recorder.device)[0]
        ms = recorder.baseline(
            dense,
            f"symbols {case.name}",
            partial(baseline, dense, q, k, v, inputs),
            lambda call, inputs=inputs, qkv=(q, k, v): verify.verify_attention(call(), *qkv, inputs, samples=2),
        )
        baselines = measured({dense: ms})
        probabilities = kernels.pooled_map(q, k, case.block).probabilities
        symbols = _select(probabilities, layout)
        parts = {
            "whole": lambda q=q, k=k, layout=layout: kernels.lower(_symbols(q, k, layout)),
            "pooled map": partial(kernels.pooled_map, q, k, case.block),
            "scores, masks, packing": partial(_select, probabilities, layout),
            "lowering": partial(kernels.lower, symbols),
        }
        low = kernels.pooled_map(q, k, case.block, backend="reference")
        actual = kernels.pooled_map(q, k, case.block)
        pooled = verify.worst(verify.verify_pooled_map(actual, low, q, k, case.block).values())
        chosen, lowered = _judge_symbols(q, k, layout), verify.verify_plan(kernels.lower(symbols), symbols)
        verdicts = {
            "whole": verify.worst([pooled, chosen, lowered]),
            "pooled map": pooled,
            "scores, masks, packing": chosen,
            "lowering": lowered,
        }
        for kind, call in parts.items():
            judge = partial(verdicts.get, kind)
            recorder.time("symbols", "auto", kind, shape_of(case), call, judge, baselines=baselines, timer=replayed_ms)


def _symbols(q: torch.Tensor, k: torch.Tensor, layout: TokenLayout, backend: str = "auto") -> SparseSymbols:
    return _select(kernels.pooled_map(q, k, layout.block, backend=backend).probabilities, layout, backend)


def _select(probabilities: torch.Tensor, layout: TokenLayout, backend: str = "auto") -> SparseSymbols:
    """Symbols of FlashOmni's rows and SpargeAttn's tiles, as a site of level head makes them."""
    text, vision = layout.text_blocks, layout.vision_blocks
    rows = select_rows(probabilities, TAU_Q, text=text, vision=vision, backend=backend)
    tiles = select_tiles(probabilities, TAU_KV, always=text, backend=backend)
    return SparseSymbols(rows, tiles, probabilities.shape[1], layout.tokens, layout.block)


def _judge_symbols(q: torch.Tensor, k: torch.Tensor, layout: TokenLayout) -> Verdict:
    """The share of rows and tiles that the references decide otherwise, because a mass lies at the threshold."""
    actual, expected = _symbols(q, k, layout), _symbols(q, k, layout, "reference")
    pairs = (
        (actual.cache_bits, expected.cache_bits, actual.heads),
        (actual.skip_bits, expected.skip_bits, actual.blocks),
    )
    differing = [(kernels.unpack_bits(a, n) != kernels.unpack_bits(b, n)).double().mean().item() for a, b, n in pairs]
    return Verdict(max(differing), DIFFERING)


def bench_forecast(recorder: Recorder, sizes: Sizes) -> None:
    """The weighted sum by the bytes it must move, beside what a copy reaches; whole, and into reused rows only."""
    for case in sizes.forecast:
        inputs = make_inputs(replace(case, rows=1 - REUSED), recorder.device)
        history = [inputs.features() for _ in range(3)]
        out = inputs.features()
        copy_ms = median_ms(partial(out.copy_, history[0]), recorder.device)
        for (name, weights), reuses in product(FORECASTS.items(), (False, True)):
            used, plan = history[: len(weights)], inputs.plan if reuses else None
            share = 1 - inputs.row_density if reuses else 1.0
            work = share * (len(used) + 1) * out.nbytes  # read every entry, write the sum
            for backend in recorder.backends:
                call = partial(kernels.weighted_sum, used, weights, plan=plan, out=out, backend=backend)

                def judge(call=call, used=used, weights=weights, out=out, inputs=inputs, reuses=reuses) -> Verdict:
                    out.fill_(torch.nan)
                    return verify.verify_weighted_sum(call(), used, weights, inputs if reuses else None)

                recorder.time(
                    "weighted_sum",
                    backend,
                    f"{name}, reused rows" if reuses else name,
                    shape_of(case),
                    call,
                    judge,
                    sparsity=1 - share,
                    work=work,
                    unit="GB/s",
                    baselines={"copy of as many bytes": copy_ms * work / (2 * out.nbytes)},
                )
