"""Time SpargeAttn: prediction against dense attention, and the gain of its kernel options on top of skipped tiles.

Queries and keys of a block lie around a common direction, like tokens of a video; one block in ten has none. With
fully random ones every block would count as dissimilar, and softmax would leave no tile to skip.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from dit_accel import kernels
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.pooling import PooledMap
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.sparse.policies.dense import every_row
from dit_accel.sparse.policies.sparge import tile_bits
from scripts.bench.kernels import verify
from scripts.bench.kernels.attention import LONG_MS, QUANTISED_BOUNDS, time_attention, time_baselines
from scripts.bench.kernels.baselines import DENSE
from scripts.bench.kernels.cases import QKV, Case, Inputs, make_inputs
from scripts.bench.kernels.clock import replayed_ms
from scripts.bench.kernels.recorder import Recorder
from scripts.bench.kernels.sizes import Sizes
from scripts.bench.kernels.symbol_path import DIFFERING
from scripts.bench.kernels.verify import Verdict

TAU_KV, SIMILARITY = 0.05, 0.5
# Prediction as a share of full attention, by tokens, on the paper's GPU (SpargeAttn, table 3).
PAPER_SHARES = {8192: 0.0378, 16384: 0.0182, 32768: 0.00911, 65536: 0.00612, 131072: 0.00516}
DIRECTION, NOISE = 2.0, 0.25  # scores differ by 4 between tiles, and by 0.7 within one
UNLIKE = 0.1  # share of blocks whose tokens have no common direction
PV_THRESHOLD = -8.0
PV_BOUND = 0.02  # relative L2 error of the output if every tile may lose e^-8 of the best key's weight
SKIPPED = (0.0, 0.5, 0.8)


def bench_sparge(recorder: Recorder, case: Case, sizes: Sizes) -> None:
    """Time prediction and attention, and dense attention for comparison."""
    inputs = make_inputs(case, recorder.device)
    qkv = _clustered(inputs), _clustered(inputs), inputs.features()
    dense = time_baselines(recorder, DENSE[recorder.device][:1], f"sparge {case.name}", qkv, inputs)
    _bench_prediction(recorder, case, *qkv[:2], dense)
    if all(ms < LONG_MS for ms in dense.values()):
        _bench_options(recorder, case, qkv, inputs.qkv(), dense)


def _clustered(inputs: Inputs) -> torch.Tensor:
    """Features ``[B, S, H, D]``: each block's direction plus noise."""
    case = inputs.case
    blocks = -(-case.tokens // case.block)
    direction = inputs.normal(case.batch, blocks, case.heads, case.head_dim, scale=DIRECTION)
    unlike = torch.arange(blocks, device=direction.device) % round(1 / UNLIKE) == 1
    direction = direction.masked_fill(unlike[:, None, None], 0.0)
    by_token = direction.repeat_interleave(case.block, 1)[:, : case.tokens]
    return by_token + inputs.normal(*by_token.shape, scale=NOISE)


def _bench_prediction(
    recorder: Recorder, case: Case, q: torch.Tensor, k: torch.Tensor, dense: dict[str, float]
) -> None:
    """Time q and k to a plan, including the self-similarity test."""
    layout = TokenLayout(0, case.tokens, case.block)
    pool = partial(kernels.pooled_map, q, k, case.block)
    pooled = pool()
    predicted = _symbols(q, pooled, layout)
    expected = _symbols(q, pool(backend="reference"), layout)
    # Tiles may differ from the reference's map where a mass lies at the threshold.
    chosen = Verdict(verify.differing(predicted.skip_bits, expected.skip_bits, layout.blocks), DIFFERING)
    verdict = verify.worst([chosen, verify.verify_plan(kernels.lower(predicted), predicted)])
    density = kernels.unpack_bits(predicted.skip_bits, layout.blocks).float().mean().item()
    figures = {"density": density, "ideal": 1.0, "baselines": dense, "timer": replayed_ms}
    paper = f" (paper {PAPER_SHARES[case.tokens]:.2%})" if case.tokens in PAPER_SHARES else ""
    parts = {
        f"whole{paper}": lambda: kernels.lower(_symbols(q, pool(), layout)),
        "pooled map": pool,
        "judge and selection": partial(_symbols, q, pooled, layout),
        "lowering": partial(kernels.lower, predicted),
    }
    for kind, call in parts.items():
        recorder.time("sparge prediction", "auto", kind, case, call, verdict, **figures)


def _symbols(q: torch.Tensor, pooled: PooledMap, layout: TokenLayout) -> SparseSymbols:
    whole_rows, whole_columns = pooled.q_similarity < SIMILARITY, pooled.k_similarity < SIMILARITY
    bits = tile_bits(pooled.probabilities, layout, TAU_KV, None, whole_rows, whole_columns)
    return SparseSymbols(every_row(q, layout), bits, q.shape[2], layout.tokens, layout.block)


def _bench_options(recorder: Recorder, case: Case, clustered: QKV, normal: QKV, dense: dict[str, float]) -> None:
    """Time attention in 8 bits and with λ, each against the same tiles in full precision and without λ."""
    both = {"qk_dtype": "int8", "pv_threshold": PV_THRESHOLD}
    variants = {
        "": (normal, None, {}),
        ", int8": (normal, QUANTISED_BOUNDS["int8"], {"qk_dtype": "int8"}),
        ", int8+fp8": (normal, QUANTISED_BOUNDS["int8+fp8"], {"qk_dtype": "int8+fp8"}),
        ", directions": (clustered, None, {}),
        ", directions, lambda": (clustered, PV_BOUND, {"pv_threshold": PV_THRESHOLD}),
        ", directions, int8, lambda": (clustered, PV_BOUND, both),
    }
    for skipped in SKIPPED:
        inputs = make_inputs(replace(case, tiles=1 - skipped), recorder.device)
        plain: dict[str, float] = {}
        for variant, (qkv, bound, options) in variants.items():
            kind, beside = f"tiles{variant}", dense | plain if options else dense
            ms = time_attention(recorder, "sparge attention", "auto", kind, qkv, inputs, beside, bound=bound, **options)
            if not options and ms is not None:
                plain = {"itself plain": ms}
