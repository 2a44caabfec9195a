"""Check every op on every backend against float64, on sizes small enough to compare every token.

Cases cover ragged tails, lengths of a single row, both block sizes, both head dimensions, three dtypes and ``kv_len``.
Outputs are filled with NaN first. A DISPATCH step's ops must never make the host wait for the GPU.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from dit_accel import kernels
from dit_accel.errors import BackendError, UnsupportedError
from dit_accel.kernels.blocks.quantized_linear import LINEAR_DTYPES
from dit_accel.kernels.plans.selection import select_rows, select_tiles
from scripts.bench.kernels import verify
from scripts.bench.kernels.cases import Case, Inputs, causal, documents, make_inputs, masked_inputs
from scripts.bench.kernels.verify import Verdict
from scripts.bench.kernels.verify_attention import attend_linearly, verify_attention

QUICK_CASES = [
    Case(4608, rows=0.5, tiles=0.5),
    Case(1000, heads=5, head_dim=64, block=64, batch=2, rows=0.5, tiles=0.1, dtype=torch.float16, valid_keys=700),
    Case(1000, heads=5, batch=2, rows=0.5, tiles=0.5, valid_keys=900),
]
CASES = [
    Case(4608),
    Case(4608, tiles=0.5),
    Case(4608, tiles=0.1),
    Case(4608, rows=0.5),
    Case(4608, rows=0.1),
    *QUICK_CASES,
    Case(4608, block=64, rows=0.5, tiles=0.5),
    Case(4500, batch=2, rows=0.5, tiles=0.5, valid_keys=4300),
    Case(4500, heads=5, head_dim=64, rows=0.5, tiles=0.5, dtype=torch.float16),
    Case(1000, heads=5, head_dim=64, block=64, batch=2, tiles=0.5, dtype=torch.float32),
]
SMALL_CASES = [  # for compute-sanitizer, which makes a kernel about 100× slower
    Case(700, heads=3, batch=2, rows=0.6, tiles=0.4, valid_keys=500),
    Case(300, heads=5, head_dim=64, rows=0.5, tiles=0.5, dtype=torch.float16),
]
TINY_CASES = [
    Case(300, heads=3, head_dim=32, block=64, batch=2, rows=0.5, tiles=0.5, dtype=torch.float32, valid_keys=200),
    Case(300, heads=2, head_dim=64, block=128, tiles=0.5, dtype=torch.float16),
]
MASKED_TOKENS = 1100  # limit where masks inside tiles are checked: nine blocks, the last one ragged
LINEAR_ROWS = 40  # rows of linear attention compared with float64
WEIGHTS = (1.5, -0.5)
Checks = Iterator[tuple[str, Verdict]]
Check = Callable[[Inputs, str], Checks]  # (inputs, backend) -> checks


def available_backends() -> list[str]:
    """Names of the backends that run on this machine, except the reference."""
    return [name for name, status in kernels.backend_status().items() if status == "ok" and name != "reference"]


def check_kernels(
    device: str, cases: Sequence[Case], backends: Sequence[str], checks: Iterable[Check] | None = None
) -> list[dict[str, Any]]:
    """Check ops on all cases and backends; each check gives a dict with error, bound and ``passed``.

    ``checks``: None = all. Ops that a backend lacks, and cases that it refuses, are left out.
    """
    chosen = dict.fromkeys(ALL_CHECKS if checks is None else checks)
    results = []

    def check_all(name: str, inputs: Inputs, checks: Iterable[Check]) -> None:
        for backend, check in product(backends, checks):
            results.extend(_rows(partial(check, inputs, backend), backend, name))

    for case in cases:
        check_all(case.name, make_inputs(case, device), chosen)
    if check_attention in chosen:
        case = next(case for case in cases if case.valid_keys is None)
        case = replace(case, tokens=min(case.tokens, MASKED_TOKENS), rows=1.0, tiles=1.0)
        for name, attends in (("causal", causal), ("documents", documents(case.tokens, case.tokens // 5, device))):
            check_all(f"{case.shape} {name}", masked_inputs(case, attends, device), (check_plan, check_attention))
    return results


def _rows(check: partial[Checks], backend: str, case: str) -> list[dict[str, Any]]:
    rows = []
    try:
        for op, verdict in check():
            rows.append({"op": op, "backend": backend, "case": case} | verdict.fields())
    except (BackendError, UnsupportedError):
        pass  # the op has no such backend, or the backend refuses the case: nothing to check
    except Exception as error:  # a kernel that raises any exception fails its check
        op = check.func.__name__.removeprefix("check_")
        rows.append(outcome(op, backend, case, f"{type(error).__name__}: {error}"))
    return rows


def check_plan(inputs: Inputs, backend: str) -> Checks:
    yield "lower", verify.verify_plan(kernels.lower(inputs.symbols, backend=backend), inputs.symbols)


def check_symbols(inputs: Inputs, backend: str) -> Checks:
    yield from check_plan(inputs, backend)
    yield "pack_bits", verify.verify_packing(kernels.pack_bits(inputs.tiles, backend=backend), inputs)
    packed = kernels.pack_bits(inputs.tiles, backend="reference")
    unpacked = kernels.unpack_bits(packed, inputs.tiles.shape[-1], backend=backend)
    yield "unpack_bits", verify.exactly(torch.equal(unpacked, inputs.tiles))


def check_attention(inputs: Inputs, backend: str) -> Checks:
    qkv = inputs.qkv()
    out = torch.full_like(qkv[0], math.nan)
    kernels.attention(*qkv, inputs.plan, kv_len=inputs.kv_len, out=out, backend=backend)
    yield "attention", verify_attention(out, qkv, inputs, poisoned=True)


def check_linear_attention(inputs: Inputs, backend: str) -> Checks:
    """Check linear attention; every second skipped tile is marginal."""
    marginal = ~inputs.tiles
    marginal[..., ::2] = False
    symbols = replace(inputs.symbols, linear_bits=kernels.pack_bits(marginal, backend="reference"))
    qkv = inputs.qkv()
    out = torch.full_like(qkv[0], math.nan)
    kernels.linear_attention(*qkv, kernels.lower(symbols), kv_len=inputs.kv_len, out=out, backend=backend)
    of_marginal = replace(inputs, tiles=marginal)
    judged = {"samples": LINEAR_ROWS, "poisoned": True, "attend": attend_linearly}
    yield "linear_attention", verify_attention(out, qkv, of_marginal, **judged)
    probabilities = inputs.normal(*inputs.tiles.shape, dtype=torch.float32, scale=2.0).softmax(-1)
    actual, expected = (
        kernels.classify_tiles(probabilities, 0.05, 0.1, backend=name) for name in (backend, "reference")
    )
    yield "classify_tiles", verify.exactly(all(map(torch.equal, actual, expected)))


def check_gemm_q(inputs: Inputs, backend: str) -> Checks:
    case, width = inputs.case, inputs.case.heads * inputs.case.head_dim
    x = inputs.normal(case.batch, case.tokens, width)
    fused, bias = inputs.normal(3 * width, width, scale=width**-0.5), inputs.normal(width)
    for op, options in (("gemm_q", {}), ("gemm_q+norm+rope", inputs.norm_and_rope())):
        out = x.new_full((case.batch, case.tokens, case.heads, case.head_dim), math.nan)
        kernels.gemm_q(x, fused[:width], bias, inputs.plan, out=out, backend=backend, **options)
        yield op, verify.verify_gemm_q(out, x, fused[:width], bias, inputs, poisoned=True, **options)


def check_gemm_o(inputs: Inputs, backend: str) -> Checks:
    width = inputs.case.heads * inputs.case.head_dim
    o, old = inputs.features(), inputs.features()
    fused, bias = inputs.normal(width, 2 * width, scale=width**-0.5), inputs.normal(width)
    weight = fused[:, width:]
    out, stack = kernels.gemm_o_update(o, weight, bias, inputs.plan, history=[old], backend=backend)
    verdicts = verify.verify_gemm_o_update(out, stack, (o, old), weight, bias, inputs)
    for name, verdict in verdicts.items():
        yield f"gemm_o_update {name}", verdict
    before = make_inputs(inputs.case, o.device, seed=1).plan  # other symbols, for rebasing the stack
    _, stack_before = kernels.gemm_o_update(old, weight, bias, before, backend=backend)
    previous = stack_before, before.mask64
    _, rebased = kernels.gemm_o_update(o, weight, bias, inputs.plan, history=[old], previous=previous, backend=backend)
    verdict = verify.verify_gemm_o_update(out, rebased, (o, old), weight, bias, inputs)["B_1"]
    yield "gemm_o_update B_1, rebased", verdict
    poisoned = torch.where(inputs.computed[..., None], o, math.nan)  # reused rows must not be read
    out = kernels.gemm_o_dispatch(poisoned, weight, inputs.plan, stack, WEIGHTS, backend=backend)
    yield "gemm_o_dispatch", verify.verify_gemm_o_dispatch(out, o, weight, stack, WEIGHTS, inputs)


def check_pooling(inputs: Inputs, backend: str) -> Checks:
    q, k = inputs.features() + 0.5, inputs.features() + 0.5
    pooled = kernels.pooled_map(q, k, inputs.case.block, backend=backend)
    for name, verdict in verify.verify_pooled_map(pooled, q, k, inputs.case.block).items():
        yield f"pooled_map {name}", verdict


def check_forecast(inputs: Inputs, backend: str) -> Checks:
    history = inputs.features(), inputs.features()
    out = kernels.weighted_sum(history, WEIGHTS, backend=backend)
    yield "weighted_sum", verify.verify_weighted_sum(out, history, WEIGHTS)


def check_quantized_linear(inputs: Inputs, backend: str) -> Checks:
    """Compare rounded rows with the reference's, and their product (also that of ``auto``) with float64."""
    case, width = inputs.case, inputs.case.heads * inputs.case.head_dim
    x, hidden = (inputs.normal(case.batch, case.tokens, features) for features in (width, 4 * width))
    weight, bias = inputs.normal(2 * width, 5 * width, scale=width**-0.5), inputs.normal(2 * width)
    for dtype in LINEAR_DTYPES:
        (values, scales), expected = (
            kernels.quantize_rows(x, hidden, dtype=dtype, backend=name) for name in (backend, "reference")
        )
        differing = (values.float() != expected[0].float()).double().mean().item()  # near a rounding boundary
        yield f"quantize_rows {dtype}", Verdict(differing, 0.01)
        weights = kernels.quantize_rows(weight, dtype=dtype)
        rows, columns = (item.double() * by[..., None].double() for item, by in ((values, scales), weights))
        exact = torch.nn.functional.linear(rows, columns, bias.double())
        for name in (backend, "auto"):
            product = kernels.quantized_linear(values, scales, *weights, bias, out_dtype="bfloat16", backend=name)
            error = ((product.double() - exact).norm() / exact.norm()).item()
            yield f"quantized_linear {dtype}, {name}", Verdict(error, 0.004)


def check_selection(inputs: Inputs, backend: str) -> Checks:
    blocks = inputs.plan.blocks
    probabilities = inputs.normal(*inputs.tiles.shape, dtype=torch.float32, scale=2.0).softmax(-1)
    text, vision = slice(0, blocks // 4), slice(blocks // 4, blocks)
    tiles, expected = (select_tiles(probabilities, 0.3, always=text, backend=name) for name in (backend, "reference"))
    yield "select_tiles", verify.exactly(torch.equal(tiles, expected))
    rows, expected = (
        select_rows(probabilities, 0.5, text=text, vision=vision, backend=name) for name in (backend, "reference")
    )
    # Rounding of an exponential may decide either way at the threshold.
    yield "select_rows", Verdict((rows != expected).double().mean().item(), 0.01)


ALL_CHECKS = (
    check_symbols,
    check_attention,
    check_gemm_q,
    check_gemm_o,
    check_pooling,
    check_selection,
    check_forecast,
    check_linear_attention,
    check_quantized_linear,
)


def check_no_host_wait(inputs: Inputs, backends: Sequence[str]) -> list[dict[str, Any]]:
    """Run a DISPATCH step on a GPU and fail if the host waits: attention by each backend, the other ops by ``auto``.

    The step with attention in Triton runs every op in Triton.
    """
    case, width = inputs.case, inputs.case.heads * inputs.case.head_dim
    x, weight = inputs.normal(case.batch, case.tokens, width), inputs.normal(width, width, scale=width**-0.5)
    k, v = inputs.features(), inputs.features()
    stack = inputs.normal(len(WEIGHTS), case.batch, case.tokens, width)

    def step(attention: str, others: str) -> None:
        plan = kernels.lower(inputs.symbols, backend=others)
        o = kernels.attention(kernels.gemm_q(x, weight, None, plan, backend=others), k, v, plan, backend=attention)
        kernels.gemm_o_dispatch(o, weight, plan, stack, WEIGHTS, backend=others)

    rows = []
    for backend in backends:
        if backend == "reference":
            continue  # it reads counts on the host
        chosen = backend, "triton" if backend == "triton" else "auto"
        try:
            step(*chosen)  # compiles
        except (BackendError, UnsupportedError):
            continue
        reason = None
        try:
            with host_must_not_wait():
                step(*chosen)
        except RuntimeError as error:
            reason = str(error)
        rows.append(outcome("DISPATCH step, no host wait", backend, case.name, reason))
    return rows


def outcome(op: str, backend: str, case: str, reason: str | None) -> dict[str, Any]:
    """Row of a check without an error value: passed, or failed for a reason."""
    return {"op": op, "backend": backend, "case": case, **verify.exactly(reason is None).fields(), "reason": reason}


@contextmanager
def host_must_not_wait() -> Iterator[None]:
    """Raise RuntimeError if the host waits for the GPU within the ``with`` block."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
