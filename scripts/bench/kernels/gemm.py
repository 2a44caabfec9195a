"""Time GEMM-Q and GEMM-O with skipped rows against ``F.linear``: single calls, and windows of UPDATE and DISPATCH."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from dit_accel import kernels
from scripts.bench.kernels import verify
from scripts.bench.kernels.cases import Inputs, Projection, make_inputs
from scripts.bench.kernels.clock import median_ms
from scripts.bench.kernels.recorder import Recorder
from scripts.bench.kernels.sizes import Sizes
from scripts.bench.kernels.verify import Verdict

SAMPLES = 4  # row-blocks compared with float64
FORECAST_WEIGHTS = {0: (1.0,), 1: (1.5, -0.5), 2: (1.875, -1.25, 0.375)}  # by order, half a window ahead


def bench_gemm_q(recorder: Recorder, projection: Projection, sizes: Sizes) -> None:
    """Time the query projection of computed rows, plain and with fused norm and rotation."""
    for sparsity in sizes.sparsities:
        inputs = make_inputs(replace(projection, rows=1 - sparsity), recorder.device)
        width, features = projection.width, projection.features
        x, bias = inputs.normal(1, projection.tokens, width), inputs.normal(features)
        weight = inputs.normal(features, width, scale=width**-0.5)
        density = inputs.row_density
        figures = {
            "density": density,
            "work": projection.flops * density,
            "baselines": {"linear": median_ms(partial(F.linear, x, weight, bias), recorder.device)},
        }
        kinds = {"plain": {}, "norm and rope": inputs.norm_and_rope()}
        for (kind, options), backend in product(kinds.items(), _backends(recorder)):
            call = partial(kernels.gemm_q, x, weight, bias, inputs.plan, backend=backend, **options)
            judge = partial(
                verify.verify_gemm_q, x=x, weight=weight, bias=bias, inputs=inputs, samples=SAMPLES, **options
            )
            recorder.time("gemm_q", backend, kind, projection, call, judge, **figures)


def bench_gemm_o(recorder: Recorder, projection: Projection, sizes: Sizes) -> None:
    """Time UPDATE and DISPATCH alone, then whole windows for every N and D."""
    for sparsity in sizes.sparsities:
        operands = _Operands(make_inputs(replace(projection, rows=1 - sparsity), recorder.device), projection)
        for backend, order in product(_backends(recorder), sizes.orders if projection.windows else (0,)):
            operands.time(recorder, backend, order, sizes.window_lengths)


def _backends(recorder: Recorder) -> list[str]:
    return [backend for backend in recorder.backends if backend != "cuda"]


class _Operands:
    """Tensors of one GEMM-O, and the time of ``F.linear`` with them."""

    def __init__(self, inputs: Inputs, projection: Projection) -> None:
        features, width = projection.features, projection.width
        self.projection, self.inputs = projection, inputs
        self.history = [inputs.features() for _ in range(3)]
        fused = inputs.normal(width, (5 if projection.is_slice else 1) * features, scale=features**-0.5)
        self.weight, self.bias = fused[:, :features], inputs.normal(width)
        self.stack = inputs.normal(3, 1, projection.tokens, width)
        device = inputs.rows.device
        before = make_inputs(inputs.case, device, seed=1)  # symbols of the previous UPDATE
        self.plan_before = before.plan
        self.changed = (before.rows != inputs.rows).double().mean().item()  # share of rows whose symbol has changed
        self.linear_ms = median_ms(partial(F.linear, self.history[0].flatten(2), self.weight, self.bias), device.type)

    def time(self, recorder: Recorder, backend: str, order: int, window_lengths: Sequence[int]) -> None:
        """Time UPDATE, DISPATCH and windows; a window takes one UPDATE and N − 1 DISPATCH steps."""
        inputs, weight, bias = self.inputs, self.weight, self.bias
        features, stack, weights = self.history[: order + 1], self.stack[: order + 1], FORECAST_WEIGHTS[order]
        update_of = partial(kernels.gemm_o_update, weight=weight, bias=bias, backend=backend)
        previous = None
        if order:
            _, stack_before = update_of(features[1], plan=self.plan_before, history=features[2:])
            previous = stack_before, self.plan_before.mask64
        update = partial(update_of, features[0], plan=inputs.plan, history=features[1:], previous=previous)
        dispatch = partial(kernels.gemm_o_dispatch, features[0], weight, inputs.plan, stack, weights, backend=backend)
        common = {"weight": weight, "inputs": inputs, "samples": SAMPLES}

        def judge_update(result: tuple[torch.Tensor, torch.Tensor]) -> Verdict:
            return verify.worst(verify.verify_gemm_o_update(*result, features, bias=bias, **common).values())

        def figures(work: float, steps: int = 1) -> dict[str, Any]:
            flops, baselines = self.projection.flops * work, {"linear": steps * self.linear_ms}
            return {"density": inputs.row_density, "ideal": steps / work, "work": flops, "baselines": baselines}

        judge_dispatch = partial(verify.verify_gemm_o_dispatch, o=features[0], stack=stack, weights=weights, **common)
        # Shares of a dense product: an UPDATE also rebases B_1 .. B_D, for the heads that changed.
        update_work, dispatch_work = 1 + order * self.changed, inputs.row_density
        row = backend, f"D={order}" + (", slice" if self.projection.is_slice else ""), self.projection
        update_ms = recorder.time("gemm_o_update", *row, update, judge_update, **figures(update_work))
        dispatch_ms = recorder.time("gemm_o_dispatch", *row, dispatch, judge_dispatch, **figures(dispatch_work))
        if update_ms is None or dispatch_ms is None or not self.projection.windows:
            return
        judged = Verdict(0.0, 0.0)  # its parts are verified already
        for length in window_lengths:
            work, ms = update_work + (length - 1) * dispatch_work, update_ms + (length - 1) * dispatch_ms
            kind = f"N={length} {row[1]}"
            recorder.add("gemm_o_window", backend, kind, self.projection, judged, ms, **figures(work, length))
