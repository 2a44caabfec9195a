"""SpargeAttn: what predicting costs beside dense attention, and what its kernel options give on top of skipped tiles.

Queries and keys lie around a direction for each block, as tokens of a clip do, but for one block in ten, which has
none: random ones would all be judged unlike, and a softmax over them has no tile that could be left out.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from dit_accel import kernels
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.pooling import PooledMap
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols
from dit_accel.sparse.policies.dense import every_row
from dit_accel.sparse.policies.sparge import tile_bits
from dit_accel.tools.bench import verify
from dit_accel.tools.bench.attention import LONG_MS, QUANTISED_BOUNDS, SAMPLES, attention_flops
from dit_accel.tools.bench.baselines import baseline, dense_baselines
from dit_accel.tools.bench.cases import Case, Inputs, make_inputs
from dit_accel.tools.bench.clock import replayed_ms
from dit_accel.tools.bench.recorder import Recorder, case_sparsity, measured, poisoned_first, shape_of
from dit_accel.tools.bench.sizes import Sizes
from dit_accel.tools.bench.symbol_path import DIFFERING
from dit_accel.tools.bench.verify import Verdict

TAU_KV, SIMILARITY = 0.05, 0.5
# Prediction as a share of full attention, by tokens, on the paper's GPU (SpargeAttn, table 3).
PAPER_SHARES = {8192: 0.0378, 16384: 0.0182, 32768: 0.00911, 65536: 0.00612, 131072: 0.00516}
DIRECTION, NOISE = 2.0, 0.25  # scores of a tile then lie 4 apart from tile to tile, and 0.7 within one
UNLIKE = 0.1  # share of blocks whose tokens have no direction in common
PV_THRESHOLD = -8.0
PV_BOUND = 0.02  # relative L2 error of the output where every tile may lose e^-8 of the best key's weight
SKIPPED = (0.0, 0.5, 0.8)

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def bench_sparge(recorder: Recorder, sizes: Sizes) -> None:
    """Prediction and attention of each size, beside dense attention."""
    for case in sizes.sparge:
        inputs = make_inputs(case, recorder.device)
        qkv = _clustered(inputs), _clustered(inputs), inputs.features()
        names = dense_baselines(recorder.device)[:1]
        dense = measured({name: _dense_ms(recorder, name, qkv, inputs) for name in names})
        _bench_prediction(recorder, case, *qkv[:2], dense)
        if all(ms < LONG_MS for ms in dense.values()):
            normal = inputs.features(), inputs.features(), inputs.features()
            _bench_options(recorder, case, qkv, normal, dense)


def _clustered(inputs: Inputs) -> torch.Tensor:
    """``[B, S, H, D]``: each block's direction, and noise."""
    case = inputs.case
    blocks = -(-case.tokens // case.block)
    direction = inputs.normal(case.batch, blocks, case.heads, case.head_dim, scale=DIRECTION)
    unlike = torch.arange(blocks, device=direction.device) % round(1 / UNLIKE) == 1
    direction = direction.masked_fill(unlike[:, None, None], 0.0)
    by_token = direction.repeat_interleave(case.block, 1)[:, : case.tokens]
    return by_token + inputs.normal(*by_token.shape, scale=NOISE)


def _dense_ms(recorder: Recorder, name: str, qkv: QKV, inputs: Inputs) -> float | None:
    judge = lambda call: verify.verify_attention(call(), *qkv, inputs, samples=2)  # noqa: E731
    return recorder.baseline(name, f"sparge {inputs.case.name}", partial(baseline, name, *qkv, inputs), judge)


def _bench_prediction(recorder: Recorder, case: Case, q: torch.Tensor, k: torch.Tensor, dense: dict) -> None:
    """From q and k to a plan, with the judge of self-similarity."""
    layout = TokenLayout(0, case.tokens, case.block)
    pooled = kernels.pooled_map(q, k, case.block)
    predicted = _symbols(q, pooled, layout)
    parts = {
        "whole": lambda: _predict(q, k, layout),
        "pooled map": partial(kernels.pooled_map, q, k, case.block),
        "judge and selection": partial(_symbols, q, pooled, layout),
        "lowering": partial(kernels.lower, predicted),
    }
    verdict = verify.worst([_judge(q, k, layout), verify.verify_plan(kernels.lower(predicted), predicted)])
    sparsity = 1 - kernels.unpack_bits(predicted.skip_bits, layout.blocks).float().mean().item()
    for kind, call in parts.items():
        if kind == "whole" and case.tokens in PAPER_SHARES:
            kind = f"whole (paper {PAPER_SHARES[case.tokens]:.2%})"
        shape = shape_of(case)
        recorder.time(
            "sparge prediction", "auto", kind, shape, call, lambda: verdict,
            sparsity=sparsity, baselines=dense, timer=replayed_ms,
        )  # fmt: skip


def _predict(q: torch.Tensor, k: torch.Tensor, layout: TokenLayout) -> AttentionPlan:
    return kernels.lower(_symbols(q, kernels.pooled_map(q, k, layout.block), layout))


def _symbols(q: torch.Tensor, pooled: PooledMap, layout: TokenLayout) -> SparseSymbols:
    whole_rows, whole_columns = pooled.q_similarity < SIMILARITY, pooled.k_similarity < SIMILARITY
    bits = tile_bits(pooled.probabilities, layout, TAU_KV, None, whole_rows, whole_columns)
    return SparseSymbols(every_row(q, layout), bits, q.shape[2], layout.tokens, layout.block)


def _judge(q: torch.Tensor, k: torch.Tensor, layout: TokenLayout) -> Verdict:
    """The share of tiles that differ from those of the reference's map, because a mass lies at the threshold."""
    tiles = []
    for backend in ("auto", "reference"):
        symbols = _symbols(q, kernels.pooled_map(q, k, layout.block, backend=backend), layout)
        tiles.append(kernels.unpack_bits(symbols.skip_bits, layout.blocks))
    return Verdict((tiles[0] != tiles[1]).double().mean().item(), DIFFERING)


def _bench_options(recorder: Recorder, case: Case, clustered: QKV, normal: QKV, dense: dict) -> None:
    """Attention in 8 bits and with λ, each beside the same tiles in full precision and without."""
    options = {
        "": (normal, {}, None),
        ", int8": (normal, {"qk_dtype": "int8"}, QUANTISED_BOUNDS["int8"]),
        ", int8+fp8": (normal, {"qk_dtype": "int8+fp8"}, QUANTISED_BOUNDS["int8+fp8"]),
        ", directions": (clustered, {}, None),
        ", directions, lambda": (clustered, {"pv_threshold": PV_THRESHOLD}, PV_BOUND),
        ", directions, int8, lambda": (clustered, {"qk_dtype": "int8", "pv_threshold": PV_THRESHOLD}, PV_BOUND),
    }
    for skipped in SKIPPED:
        inputs = make_inputs(replace(case, tiles=1 - skipped), recorder.device)
        plain: dict[str, float] = {}
        for kind, (qkv, option, bound) in options.items():
            call = partial(kernels.attention, *qkv, inputs.plan, **option)

            def judge(call=call, qkv=qkv, bound=bound, inputs=inputs) -> Verdict:
                out = poisoned_first(call, qkv[0].shape, like=qkv[0])
                return verify.verify_attention(out, *qkv, inputs, samples=SAMPLES, relative_bound=bound)

            itself = {"itself plain": plain["ms"]} if option and plain else {}
            ms = recorder.time(
                "sparge attention",
                "auto",
                f"tiles{kind}",
                shape_of(case),
                call,
                judge,
                **case_sparsity(inputs),
                work=attention_flops(case) * inputs.density,
                baselines=dense | itself,
            )
            if not option and ms is not None:
                plain = {"ms": ms}
