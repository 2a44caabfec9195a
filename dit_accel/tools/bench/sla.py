"""SLA, forward and backward, whole and part by part, beside dense attention and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from dit_accel import kernels
from dit_accel.kernels.layout import TokenLayout
from dit_accel.sla.module import SparseLinearAttention
from dit_accel.sparse.policies.sla import classified
from dit_accel.tools.bench import marginal, verify
from dit_accel.tools.bench.baselines import SDPA_BACKENDS, baseline, dense_baselines
from dit_accel.tools.bench.cases import Case, Inputs, make_inputs
from dit_accel.tools.bench.clock import median_ms, replayed_ms
from dit_accel.tools.bench.gradients import verify_attention_gradients
from dit_accel.tools.bench.recorder import Recorder, measured, shape_of
from dit_accel.tools.bench.sizes import Sizes
from dit_accel.tools.bench.verify import Verdict

SAMPLES = 4  # rows that are compared with float64, of queries and of keys each
SHORT_TOKENS = 1500  # at most, where all gradients are

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def bench_sla(recorder: Recorder, sizes: Sizes) -> None:
    """A module as it is made (5% critical, 10% negligible, softmax), with a random projection."""
    for case in sizes.sla:
        inputs = make_inputs(case, recorder.device)
        qkv = inputs.features(), inputs.features(), inputs.features()
        do = inputs.features()
        module = make_module(inputs)
        verdicts = _judge(module, inputs, qkv, do)
        settings = module.settings
        symbols = classified(*qkv[:2], _layout(case), settings.critical, settings.negligible)
        density = marginal.classes_of(symbols).critical.float().mean().item()
        common = {"sparsity": 1 - density, "ideal": 1 / density}
        _bench_forward(recorder, module, inputs, qkv, verdicts["forward"], common)
        _bench_backward(recorder, module, inputs, qkv, do, verdicts["backward"], common)


def make_module(inputs: Inputs) -> SparseLinearAttention:
    case = inputs.case
    module = SparseLinearAttention(case.head_dim, block=case.block).to(inputs.generator.device)
    with torch.no_grad():
        module.projection.weight.copy_(inputs.normal(case.head_dim, case.head_dim, scale=case.head_dim**-0.5))
    return module


def _layout(case: Case) -> TokenLayout:
    return TokenLayout(0, case.tokens, case.block)


def _judge(module: SparseLinearAttention, inputs: Inputs, qkv: QKV, do: torch.Tensor) -> dict[str, Verdict]:
    """The worst of what is looked at: rows of the size itself, and all gradients of a short sequence of its kind."""
    out, gradients = _run(module, qkv, do)
    sampled = _judge_rows(module, inputs.case, out, gradients[0], qkv, do)
    with torch.no_grad():
        inference = _judge_rows(module, inputs.case, module(*qkv), gradients[0], qkv, do)["out"]
    short = replace(inputs.case, tokens=min(inputs.case.tokens, SHORT_TOKENS))
    part = [x[:, : short.tokens].contiguous() for x in (*qkv, do)]
    _, short_gradients = _run(module, part[:3], part[3])
    classes = _classes(module, short, *part[:2])
    all_gradients = marginal.verify_gradients(
        short_gradients, *part[:3], _weight(module, qkv), part[3], classes, short.block
    )
    return {
        "forward": verify.worst([sampled["out"], inference]),
        "backward": verify.worst([sampled["dq"], all_gradients]),
    }


def _run(module: SparseLinearAttention, qkv, do) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    out = module(*leaves)
    return out.detach(), torch.autograd.grad(out, (*leaves, module.projection.weight), do)


def _judge_rows(module, case: Case, out, dq, qkv: QKV, do) -> dict[str, Verdict]:
    classes = _classes(module, case, *qkv[:2])
    return marginal.verify_rows(out, dq, *qkv, _weight(module, qkv), do, classes, case, SAMPLES)


def _classes(module: SparseLinearAttention, case: Case, q: torch.Tensor, k: torch.Tensor) -> marginal.Classes:
    return marginal.classes_of(classified(q, k, _layout(case), module.settings.critical, module.settings.negligible))


def _weight(module: SparseLinearAttention, qkv: QKV) -> torch.Tensor:
    """The projection as the products take it, rounded to the inputs' dtype."""
    return module.projection.weight.detach().to(qkv[0].dtype)


def _bench_forward(
    recorder: Recorder, module: SparseLinearAttention, inputs: Inputs, qkv: QKV, verdict: Verdict, common: dict
) -> None:
    """Each part of the chain within a CUDA graph: launches by Python hide behind a model's other work.

    What training runs, which keeps more, is timed as it is called.
    """
    case, settings = inputs.case, module.settings
    dense = {}
    for name in _baselines(recorder.device):
        judge = lambda call: verify.verify_attention(call(), *qkv, inputs, samples=2)  # noqa: E731
        dense[name] = recorder.baseline(name, f"sla {case.name}", partial(baseline, name, *qkv, inputs), judge)
    q, k, v = qkv
    probabilities = kernels.pooled_map(q, k, case.block).probabilities
    symbols = classified(q, k, _layout(case), settings.critical, settings.negligible)
    plan = kernels.lower(symbols)
    weight, out = _weight(module, qkv), kernels.attention(q, k, v, plan)
    parts = {
        "whole": partial(_without_gradients, module, qkv),
        "pooled map": partial(kernels.pooled_map, q, k, case.block),
        "classes": partial(kernels.classify_tiles, probabilities, settings.critical, settings.negligible),
        "lowering": partial(kernels.lower, symbols),
        "critical tiles": partial(kernels.attention, q, k, v, plan),
        "marginal tiles, projection, sum": partial(
            kernels.linear_attention, q, k, v, plan, projection=weight, out=out, accumulate=True
        ),
    }
    for kind, call in parts.items():
        _time(recorder, "sla forward", kind, case, call, verdict, measured(dense), common, replayed_ms)
    training = partial(module, *(x.detach().clone().requires_grad_() for x in qkv))
    _time(recorder, "sla forward", "whole, for training", case, training, verdict, measured(dense), common, median_ms)


def _baselines(device: str) -> list[str]:
    """Names of the dense attentions that train, which torch's own do."""
    return [name for name in dense_baselines(device) if name in SDPA_BACKENDS or device == "cpu"]


def _without_gradients(module: SparseLinearAttention, qkv: QKV) -> torch.Tensor:
    with torch.no_grad():
        return module(*qkv)


def _bench_backward(
    recorder: Recorder,
    module: SparseLinearAttention,
    inputs: Inputs,
    qkv: QKV,
    do: torch.Tensor,
    verdict: Verdict,
    common: dict,
) -> None:
    case = inputs.case
    dense = {}
    for name in _baselines(recorder.device):
        judge = lambda call: verify_attention_gradients(call(), *qkv, do, inputs, 1)  # noqa: E731
        make = partial(_dense_backward, name, qkv, do)
        dense[name] = recorder.baseline(name, f"sla backward {case.name}", make, judge)
    plan = module.plan(*qkv[:2])
    out, lse = kernels.attention(*qkv, plan, return_lse=True)
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    result = module(*leaves)
    parts = {
        "whole": partial(torch.autograd.grad, result, (*leaves, module.projection.weight), do, retain_graph=True),
        "critical tiles": partial(kernels.attention_backward, *qkv, out, lse, do, plan),
        "marginal tiles": partial(kernels.linear_attention_backward, *qkv, do, plan),
    }
    for kind, call in parts.items():
        _time(recorder, "sla backward", kind, case, call, verdict, measured(dense), common, median_ms)


def _dense_backward(name: str, qkv: QKV, do: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Gradients of q, k and v ``[B, S, H, D]``."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    arguments = [x.transpose(1, 2) for x in leaves]
    if name in SDPA_BACKENDS:
        with sdpa_kernel(SDPA_BACKENDS[name]):
            out = F.scaled_dot_product_attention(*arguments)
    else:
        out = F.scaled_dot_product_attention(*arguments)
    return partial(torch.autograd.grad, out.transpose(1, 2), leaves, do, retain_graph=True)


def _time(recorder, op: str, kind: str, case: Case, call, verdict: Verdict, dense: dict, common: dict, timer) -> None:
    recorder.time(
        op,
        "auto",
        f"{kind}, block {case.block}",
        shape_of(case),
        call,
        lambda: verdict,
        baselines=dense,
        timer=timer,
        **common,
    )
