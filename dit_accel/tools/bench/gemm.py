"""GEMM-Q and GEMM-O with rows left out, beside ``F.linear``: single calls, and windows of UPDATE and DISPATCH."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

from dit_accel import kernels
from dit_accel.tools.bench import verify
from dit_accel.tools.bench.cases import Inputs, make_inputs
from dit_accel.tools.bench.clock import median_ms
from dit_accel.tools.bench.recorder import Recorder, poisoned_first, projection_shape
from dit_accel.tools.bench.sizes import Projection, Sizes
from dit_accel.tools.bench.verify import Verdict

SAMPLES = 4  # row-blocks that are compared with float64
FORECAST_WEIGHTS = {0: (1.0,), 1: (1.5, -0.5), 2: (1.875, -1.25, 0.375)}  # by order, half a window ahead


def bench_gemm_q(recorder: Recorder, sizes: Sizes) -> None:
    """The query projection of rows that compute, plain and with norm and rotation fused."""
    for projection, sparsity in product(sizes.projections, sizes.sparsities):
        inputs = make_inputs(projection.case(sparsity), recorder.device)
        width, features = projection.width, projection.heads * projection.head_dim
        x, bias = inputs.normal(1, projection.tokens, width), inputs.normal(features)
        weight = inputs.normal(features, width, scale=width**-0.5)
        angle = inputs.normal(projection.tokens, projection.head_dim // 2, dtype=torch.float32).repeat_interleave(2, -1)
        extras = {"norm_weight": inputs.normal(projection.head_dim), "rope": (angle.cos(), angle.sin())}
        linear = median_ms(partial(F.linear, x, weight, bias), recorder.device)
        for kind, options in (("plain", {}), ("norm and rope", extras)):
            for backend in recorder.backends:
                call = partial(kernels.gemm_q, x, weight, bias, inputs.plan, backend=backend, **options)

                def judge(call=call, options=options, x=x, weight=weight, bias=bias, inputs=inputs) -> Verdict:
                    shape = (*x.shape[:2], *weight.shape[:1])
                    out = poisoned_first(call, shape, like=x)
                    return verify.verify_gemm_q(out, x, weight, bias, inputs, samples=SAMPLES, **options)

                recorder.time(
                    "gemm_q",
                    backend,
                    kind,
                    projection_shape(projection),
                    call,
                    judge,
                    sparsity=1 - inputs.row_density,
                    ideal=1 / inputs.row_density,
                    work=_flops(projection) * inputs.row_density,
                    baselines={"linear": linear},
                )


def bench_gemm_o(recorder: Recorder, sizes: Sizes) -> None:
    """UPDATE and DISPATCH alone, then windows of them for every N and D."""
    for projection, sparsity in product(sizes.projections, sizes.sparsities):
        inputs = make_inputs(projection.case(sparsity), recorder.device)
        operands = _Operands(inputs, projection)
        linear = median_ms(partial(F.linear, operands.o.flatten(2), operands.weight, operands.bias), recorder.device)
        for backend, order in product(recorder.backends, sizes.orders if projection.windows else (0,)):
            _bench_window(recorder, sizes, projection, operands, backend, order, linear)


class _Operands:
    """Tensors of one GEMM-O."""

    def __init__(self, inputs: Inputs, projection: Projection) -> None:
        features, width = projection.heads * projection.head_dim, projection.width
        self.inputs = inputs
        self.history = [inputs.features() for _ in range(3)]
        self.o = self.history[0]
        fused = inputs.normal(width, (5 if projection.is_slice else 1) * features, scale=features**-0.5)
        self.weight, self.bias = fused[:, :features], inputs.normal(width)
        self.stack = inputs.normal(3, 1, projection.tokens, width)
        before = make_inputs(inputs.case, inputs.plan.mask64.device, seed=1)  # the symbols of the update before
        self.plan_before = before.plan
        self.changed = (before.rows != inputs.rows).double().mean().item()  # share of rows whose symbol has changed


def _bench_window(
    recorder: Recorder,
    sizes: Sizes,
    projection: Projection,
    operands: _Operands,
    backend: str,
    order: int,
    linear: float,
) -> None:
    """UPDATE, DISPATCH, and windows, whose time is that of one UPDATE and N − 1 DISPATCH steps, each timed alone."""
    inputs, weight, bias = operands.inputs, operands.weight, operands.bias
    density = inputs.row_density
    stack, weights = operands.stack[: order + 1], FORECAST_WEIGHTS[order]
    features = operands.history[: order + 1]
    previous = None
    if order:
        _, stack_before = kernels.gemm_o_update(
            features[1], weight, bias, operands.plan_before, history=features[2:], backend=backend
        )
        previous = stack_before, operands.plan_before.mask64
    update = partial(
        kernels.gemm_o_update,
        features[0],
        weight,
        bias,
        inputs.plan,
        history=features[1:],
        previous=previous,
        backend=backend,
    )
    dispatch = partial(kernels.gemm_o_dispatch, operands.o, weight, inputs.plan, stack, weights, backend=backend)

    def judge_update() -> Verdict:
        out, biases = poisoned_first(update, stack.shape, stack[0].shape, like=stack)
        return verify.worst(
            verify.verify_gemm_o_update(out, biases, features, weight, bias, inputs, samples=SAMPLES).values()
        )

    def judge_dispatch() -> Verdict:
        out = poisoned_first(dispatch, stack[0].shape, like=stack)
        return verify.verify_gemm_o_dispatch(out, operands.o, weight, stack, weights, inputs, samples=SAMPLES)

    shape, kind = projection_shape(projection), f"D={order}" + (", slice" if projection.is_slice else "")
    # The share of a dense product that each does: an UPDATE also takes B_1 .. B_D over, from the heads that changed.
    update_work, dispatch_work = 1 + order * operands.changed, density
    common = {"sparsity": 1 - density, "baselines": {"linear": linear}}
    times = [
        recorder.time(op, backend, kind, shape, call, judge, ideal=1 / work, work=_flops(projection) * work, **common)
        for op, call, judge, work in (
            ("gemm_o_update", update, judge_update, update_work),
            ("gemm_o_dispatch", dispatch, judge_dispatch, dispatch_work),
        )
    ]
    if None in times or not projection.windows:
        return
    for length in sizes.window_lengths:
        work = update_work + (length - 1) * dispatch_work
        recorder.add(
            "gemm_o_window",
            backend,
            f"N={length} {kind}",
            shape,
            Verdict(0.0, 0.0),  # its parts have been judged
            times[0] + (length - 1) * times[1],
            1 - density,
            length / work,
            _flops(projection) * work,
            "TFLOP/s",
            {"linear": length * linear},
        )


def _flops(projection: Projection) -> float:
    return 2.0 * projection.tokens * projection.width * projection.heads * projection.head_dim
