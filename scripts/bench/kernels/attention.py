"""Time attention that skips rows, tiles or both, and attention with int8 and fp8 products."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dit_accel import kernels
from scripts.bench.kernels.baselines import DENSE, SPARSE, baseline
from scripts.bench.kernels.cases import QKV, Case, Inputs, make_inputs
from scripts.bench.kernels.clock import Timer, median_ms
from scripts.bench.kernels.recorder import Recorder
from scripts.bench.kernels.sizes import Sizes, sparse_cases
from scripts.bench.kernels.verify import Verdict
from scripts.bench.kernels.verify_attention import verify_attention

SAMPLES = 8  # rows compared with float64
LONG_MS = 50.0  # dense attention that takes longer is timed once per shape instead of with each mask
QUANTISED_BOUNDS = {"int8": 0.02, "int8+fp8": 0.05}  # relative L2 error
QUANTISED_TILES = 0.2  # share of tiles computed in the sparse half of the quantised group


def bench_attention(recorder: Recorder, dense: Case, sizes: Sizes) -> None:
    """Time every backend with every mask of the shape, together with dense and block-sparse baselines."""
    whole = make_inputs(dense, recorder.device)
    qkv = whole.qkv()
    dense_ms = time_baselines(recorder, DENSE[recorder.device], f"attention {dense.name}", qkv, whole)
    first = next(iter(dense_ms), None)
    dense_of: dict[str, dict[str, float]] = {}
    for kind, case in sparse_cases(dense, sizes):
        inputs = make_inputs(case, recorder.device)
        place = f"attention {kind} {case.name}"
        if first and kind != "dense" and dense_ms[first] < LONG_MS:  # clocks drift: time it again with each mask
            dense_ms |= time_baselines(recorder, [first], place, qkv, whole)
        baselines = dense_ms | time_baselines(recorder, SPARSE[recorder.device], place, qkv, inputs)
        for backend in recorder.backends:
            itself = dense_of.get(backend, {})
            ms = time_attention(recorder, "attention", backend, kind, qkv, inputs, baselines | itself)
            if kind == "dense" and ms is not None:
                dense_of[backend] = {"itself dense": ms}


def bench_quantised(recorder: Recorder, dense: Case, sizes: Sizes) -> None:
    """Compare int8 and fp8 products with the backend's own precision, on normal inputs and on outliers."""
    dtype = str(dense.dtype).removeprefix("torch.")
    for case in (dense, replace(dense, tiles=QUANTISED_TILES)):
        inputs = make_inputs(case, recorder.device)
        normal = inputs.qkv()
        for values, qkv in (("normal", normal), ("outliers", with_outliers(*normal))):
            kind = f"{'dense' if case is dense else 'tiles'}, {values}"
            for backend in recorder.backends:
                attend = partial(kernels.attention, *qkv, inputs.plan, backend=backend)
                if not any(
                    recorder.offers(f"attention {name}", backend, partial(attend, qk_dtype=name))
                    for name in QUANTISED_BOUNDS
                ):
                    continue
                baseline_ms = time_attention(recorder, f"attention {dtype}", backend, kind, qkv, inputs, {})
                itself = {} if baseline_ms is None else {"itself": baseline_ms}
                for name, bound in QUANTISED_BOUNDS.items():
                    time_attention(
                        recorder, f"attention {name}", backend, kind, qkv, inputs, itself, bound=bound, qk_dtype=name
                    )


def with_outliers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> QKV:
    """Shift a few channels of k by 10 to 50 standard deviations, like trained keys, and scale those of v alike."""
    channels = torch.linspace(0, q.shape[-1] - 1, 6, device=q.device).long()[1:5]
    size = torch.tensor([10.0, 20.0, 30.0, 50.0], device=q.device, dtype=q.dtype)
    k, v = k.clone(), v.clone()
    k[..., channels] += size
    v[..., channels] *= size
    return q, k, v


def time_attention(
    recorder: Recorder,
    op: str,
    backend: str,
    kind: str,
    qkv: QKV,
    inputs: Inputs,
    baselines: dict[str, float],
    *,
    density: float | None = None,
    bound: float | None = None,
    timer: Timer = median_ms,
    **options: Any,
) -> float | None:
    """Time our attention over the tiles of `inputs`, as `Recorder.time` does; `options` are the op's.

    `density`: share of attended pairs; None = that of the tiles. `bound`: limit of the relative error; None = by
    precision.
    """
    density = inputs.density if density is None else density
    call = partial(kernels.attention, *qkv, inputs.plan, backend=backend, **options)
    verify = partial(_verify, qkv, inputs, bound)
    case = inputs.case
    work = 4.0 * case.batch * case.heads * case.tokens**2 * case.head_dim * density  # two products of 2 S² D per head
    return recorder.time(
        op, backend, kind, case, call, verify, density=density, work=work, baselines=baselines, timer=timer
    )


def time_baselines(
    recorder: Recorder, names: Iterable[str], place: str, qkv: QKV, inputs: Inputs, timer: Timer = median_ms
) -> dict[str, float]:
    """Milliseconds of the baselines that run here and pass verification, over the tiles of ``inputs``."""
    makes = {name: partial(baseline, name, *qkv, inputs) for name in names}
    return recorder.baselines(place, makes, partial(_verify, qkv, inputs, None), timer)


def _verify(qkv: QKV, inputs: Inputs, bound: float | None, out: torch.Tensor) -> Verdict:
    """Compare a few rows of ``out`` with float64."""
    return verify_attention(out, qkv, inputs, samples=SAMPLES, relative_bound=bound)
