"""Time SLA, forward and backward, whole and part by part, against dense attention and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from dit_accel import kernels
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.symbols import SparseSymbols
from scripts.bench.kernels.attention import time_baselines
from scripts.bench.kernels.baselines import DENSE, SDPA_BACKENDS, sdpa
from scripts.bench.kernels.cases import QKV, Case, Inputs, make_inputs
from scripts.bench.kernels.clock import median_ms, replayed_ms
from scripts.bench.kernels.recorder import Recorder
from scripts.bench.kernels.sizes import Sizes
from scripts.bench.kernels.verify import Verdict, worst
from scripts.bench.kernels.verify_attention import (
    classes_of,
    verify_attention_gradients,
    verify_sla_gradients,
    verify_sla_rows,
)

if TYPE_CHECKING:
    from dit_accel.sla.module import SparseLinearAttention

SAMPLES = 4  # rows of queries and of keys compared with float64
SHORT_TOKENS = 1500  # limit for comparing all gradients


def bench_sla(recorder: Recorder, case: Case, sizes: Sizes) -> None:
    """Time a module with default settings (5% critical, 10% negligible, softmax) and a random projection."""
    inputs = make_inputs(case, recorder.device)
    qkv, do = inputs.qkv(), inputs.features()
    module = make_module(inputs)
    forward, backward = _judge(module, inputs, qkv, do)
    symbols = _symbols(module, *qkv[:2])
    density = classes_of(symbols)[0].float().mean().item()
    names = [name for name in DENSE[recorder.device] if name in ("sdpa", *SDPA_BACKENDS)]  # these have gradients
    dense = time_baselines(recorder, names, f"sla {case.name}", qkv, inputs)
    judge = partial(verify_attention_gradients, qkv=qkv, do=do, inputs=inputs, samples=1)
    makes = {name: partial(_dense_backward, name, qkv, do) for name in names}
    dense_backward = recorder.baselines(f"sla backward {case.name}", makes, judge)
    # The chain is timed within a CUDA graph: in a model other work hides the launches. The training call keeps more
    # tensors and is timed as called.
    runs = (
        ("sla forward", _forward_parts(module, qkv, symbols), forward, dense, replayed_ms),
        ("sla forward", {"whole, for training": partial(module, *_leaves(qkv))}, forward, dense, median_ms),
        ("sla backward", _backward_parts(module, qkv, do), backward, dense_backward, median_ms),
    )
    for op, parts, verdict, baselines, timer in runs:
        figures = {"density": density, "baselines": baselines, "timer": timer}
        for kind, call in parts.items():
            recorder.time(op, "auto", f"{kind}, block {case.block}", case, call, verdict, **figures)


def make_module(inputs: Inputs) -> SparseLinearAttention:
    from dit_accel.sla.module import SparseLinearAttention  # needs pydantic, unlike the other ops

    case = inputs.case
    module = SparseLinearAttention(case.head_dim, block=case.block).to(inputs.generator.device)
    with torch.no_grad():
        module.projection.weight.copy_(inputs.normal(case.head_dim, case.head_dim, scale=case.head_dim**-0.5))
    return module


def _judge(module: SparseLinearAttention, inputs: Inputs, qkv: QKV, do: torch.Tensor) -> tuple[Verdict, Verdict]:
    """Verify forward and backward: rows at full size, and all gradients of a similar short sequence."""
    weight = module.projection.weight.detach().to(qkv[0].dtype)  # in the dtype of the products
    with torch.no_grad():
        inference = module(*qkv)
    out, (dq, *_) = _run(module, qkv, do)
    classes = classes_of(_symbols(module, *qkv[:2]))
    sampled = partial(
        verify_sla_rows, dq=dq, qkv=qkv, weight=weight, do=do, classes=classes, inputs=inputs, samples=SAMPLES
    )
    (training_out, training_dq), (inference_out, _) = sampled(out), sampled(inference)
    length = min(inputs.case.tokens, SHORT_TOKENS)
    *short, short_do = (x[:, :length].contiguous() for x in (*qkv, do))
    _, gradients = _run(module, short, short_do)
    classes = classes_of(_symbols(module, *short[:2]))
    all_gradients = verify_sla_gradients(gradients, short, weight, short_do, classes, inputs.case.block)
    return worst([training_out, inference_out]), worst([training_dq, all_gradients])


def _run(module: SparseLinearAttention, qkv: QKV, do: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the output, and the gradients of q, k, v and the projection."""
    leaves = _leaves(qkv)
    out = module(*leaves)
    return out.detach(), torch.autograd.grad(out, (*leaves, module.projection.weight), do)


def _leaves(qkv: QKV) -> list[torch.Tensor]:
    return [x.detach().clone().requires_grad_() for x in qkv]


def _symbols(module: SparseLinearAttention, q: torch.Tensor, k: torch.Tensor) -> SparseSymbols:
    from dit_accel.sparse.policies import Skip, drawn

    return drawn(q, k, Skip(policy="sla"), layout=TokenLayout(0, q.shape[1], module.settings.block))


def _forward_parts(module: SparseLinearAttention, qkv: QKV, symbols: SparseSymbols) -> dict[str, Callable[[], object]]:
    settings, (q, k, v) = module.settings, qkv
    pool = partial(kernels.pooled_map, q, k, settings.block)
    plan = kernels.lower(symbols)
    weight, out = module.projection.weight.detach().to(q.dtype), kernels.attention(q, k, v, plan)

    @torch.no_grad()
    def whole() -> torch.Tensor:
        return module(q, k, v)

    return {
        "whole": whole,
        "pooled map": pool,
        "classes": partial(kernels.classify_tiles, pool().probabilities, settings.critical, settings.negligible),
        "lowering": partial(kernels.lower, symbols),
        "critical tiles": partial(kernels.attention, q, k, v, plan),
        "marginal tiles, projection, sum": partial(
            kernels.linear_attention, q, k, v, plan, projection=weight, out=out, accumulate=True
        ),
    }


def _backward_parts(module: SparseLinearAttention, qkv: QKV, do: torch.Tensor) -> dict[str, Callable[[], object]]:
    plan = module.plan(*qkv[:2])
    out, lse = kernels.attention(*qkv, plan, return_lse=True)
    leaves = _leaves(qkv)
    result = module(*leaves)
    return {
        "whole": partial(torch.autograd.grad, result, (*leaves, module.projection.weight), do, retain_graph=True),
        "critical tiles": partial(kernels.attention_backward, *qkv, out, lse, do, plan),
        "marginal tiles": partial(kernels.linear_attention_backward, *qkv, do, plan),
    }


def _dense_backward(name: str, qkv: QKV, do: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Compute the gradients of q, k and v ``[B, S, H, D]``."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    return partial(torch.autograd.grad, sdpa(name, *leaves), leaves, do, retain_graph=True)
