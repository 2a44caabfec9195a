"""Attention: rows, tiles and both left out; int8 and fp8 products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from dit_accel import kernels
from dit_accel.tools.bench.baselines import baseline, dense_baselines, sparse_baselines
from dit_accel.tools.bench.cases import Case, Inputs, make_inputs
from dit_accel.tools.bench.recorder import Recorder, case_sparsity, measured, poisoned_first, shape_of
from dit_accel.tools.bench.sizes import Sizes, sparse_cases
from dit_accel.tools.bench.verify import Verdict, verify_attention

SAMPLES = 8  # rows that are compared with float64
LONG_MS = 50.0  # where dense attention takes longer, it is timed once a shape instead of beside each mask
QUANTISED_BOUNDS = {"int8": 0.02, "int8+fp8": 0.05}  # relative L2 error
QUANTISED_TILES = 0.2  # share that computes in the sparse half of that group

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attention_flops(case: Case) -> float:
    """Of the dense attention: two products of 2 S² D a head."""
    return 4.0 * case.batch * case.heads * case.tokens**2 * case.head_dim


def bench_attention(recorder: Recorder, sizes: Sizes) -> None:
    """Every backend over every mask of every shape, beside dense and block-sparse baselines."""
    for dense in sizes.attention:
        whole = make_inputs(dense, recorder.device)
        qkv = whole.features(), whole.features(), whole.features()
        dense_ms = _baselines(recorder, dense_baselines(recorder.device), qkv, whole, f"attention {dense.name}")
        first = next(iter(dense_ms), None)
        own_dense: dict[str, float] = {}
        for kind, case in sparse_cases(dense, sizes):
            inputs = make_inputs(case, recorder.device)
            place = f"attention {kind} {case.name}"
            if first and kind != "dense" and dense_ms[first] < LONG_MS:  # clocks drift: beside each mask
                dense_ms |= _baselines(recorder, [first], qkv, whole, place)
            baselines = dense_ms | _baselines(recorder, sparse_baselines(recorder.device), qkv, inputs, place)
            for backend in recorder.backends:
                itself = {"itself dense": own_dense[backend]} if backend in own_dense else {}
                ms = _time(recorder, "attention", backend, kind, qkv, inputs, baselines | itself)
                if kind == "dense" and ms is not None:
                    own_dense[backend] = ms


def bench_quantised(recorder: Recorder, sizes: Sizes) -> None:
    """int8 and fp8 products beside the same backend's own precision, on normal inputs and on outliers."""
    for dense in sizes.quantised:
        dtype = str(dense.dtype).removeprefix("torch.")
        for case in (dense, replace(dense, tiles=QUANTISED_TILES)):
            inputs = make_inputs(case, recorder.device)
            normal = inputs.features(), inputs.features(), inputs.features()
            for values, qkv in (("normal", normal), ("outliers", with_outliers(*normal))):
                kind = f"{'dense' if case is dense else 'tiles'}, {values}"
                for backend in recorder.backends:
                    calls = {name: _call(qkv, inputs, backend, name) for name in QUANTISED_BOUNDS}
                    if not any(recorder.offers(f"attention {name}", backend, call) for name, call in calls.items()):
                        continue
                    own = _time(recorder, f"attention {dtype}", backend, kind, qkv, inputs, {})
                    itself = {} if own is None else {"itself": own}
                    for name in calls:
                        _time(recorder, f"attention {name}", backend, kind, qkv, inputs, itself, name)


def with_outliers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> QKV:
    """A few channels of k stand 10 to 50 standard deviations off, alike for all tokens, as keys of trained models do.

    The same channels of v are as many times as large.
    """
    channels = torch.linspace(0, q.shape[-1] - 1, 6, device=q.device).long()[1:5]
    size = torch.tensor([10.0, 20.0, 30.0, 50.0], device=q.device, dtype=q.dtype)
    k, v = k.clone(), v.clone()
    k[..., channels] += size
    v[..., channels] *= size
    return q, k, v


def _call(qkv: QKV, inputs: Inputs, backend: str, qk_dtype: str | None = None) -> Callable[[], torch.Tensor]:
    options = {"backend": backend} if qk_dtype is None else {"backend": backend, "qk_dtype": qk_dtype}
    return partial(kernels.attention, *qkv, inputs.plan, **options)


def _time(
    recorder: Recorder,
    op: str,
    backend: str,
    kind: str,
    qkv: QKV,
    inputs: Inputs,
    baselines: dict,
    qk_dtype: str | None = None,
) -> float | None:
    call = _call(qkv, inputs, backend, qk_dtype)
    return recorder.time(
        op,
        backend,
        kind,
        shape_of(inputs.case),
        call,
        partial(verify_samples, call, qkv, inputs, QUANTISED_BOUNDS.get(qk_dtype)),
        **case_sparsity(inputs),
        work=attention_flops(inputs.case) * inputs.density,
        baselines=baselines,
    )


def _baselines(recorder: Recorder, names: list[str], qkv: QKV, inputs: Inputs, place: str) -> dict[str, float]:
    verify = partial(verify_samples, qkv=qkv, inputs=inputs)
    times = {name: recorder.baseline(name, place, partial(baseline, name, *qkv, inputs), verify) for name in names}
    return measured(times)


def verify_samples(call, qkv: QKV, inputs: Inputs, relative_bound: float | None = None) -> Verdict:
    """The result of ``call`` against float64 at a few rows."""
    out = poisoned_first(call, qkv[0].shape, like=qkv[0])
    return verify_attention(out, *qkv, inputs, samples=SAMPLES, relative_bound=relative_bound)
