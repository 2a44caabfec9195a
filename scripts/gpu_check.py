#!/usr/bin/env python3
"""Checks every kernel on a CUDA GPU against float64 at real sizes, then FLUX.1-dev's transformer in every step mode.

    python scripts/gpu_check.py --output gpu_check.json [--quick]

A kernel's case passes when its largest error is at most twice that of the dense low-precision computation plus the
rounding of the largest value, and when everything that the symbols mark as reused is untouched. Times, beside those of
the dense counterpart, are for information. Exits 1 on a failure.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dit_accel import kernels
from dit_accel.symbols import AttentionPlan, SparseSymbols

# Half-precision results are rounded once, from float32 sums. Results in float32 carry the rounding of the sums
# themselves, which depends on their order.
ROUNDING = {dtype: torch.finfo(dtype).eps for dtype in (torch.float16, torch.bfloat16)}
ROUNDING[torch.float32] = 4 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Case:
    """One size and sparsity; ``rows`` and ``tiles`` are the shares that compute."""

    tokens: int
    heads: int = 24
    head_dim: int = 128
    block: int = 128
    batch: int = 1
    rows: float = 1.0
    tiles: float = 1.0
    dtype: torch.dtype = torch.bfloat16
    valid_keys: int | None = None

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        limit = "" if self.valid_keys is None else f" kv_len={self.valid_keys}"
        shape = f"B{self.batch} H{self.heads} S{self.tokens} D{self.head_dim} block{self.block} {dtype}"
        return f"{shape} rows={self.rows:g} tiles={self.tiles:g}{limit}"


QUICK_CASES = [
    Case(4608, rows=0.5, tiles=0.5),
    Case(1000, heads=5, head_dim=64, block=64, batch=2, rows=0.5, tiles=0.1, dtype=torch.float16, valid_keys=700),
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


@dataclass(frozen=True)
class Inputs:
    """Random tensors and symbols of a case."""

    case: Case
    rows: torch.Tensor  # bool [B, H, T]
    tiles: torch.Tensor  # bool [B, H, T, T]; False in reused rows
    symbols: SparseSymbols
    plan: AttentionPlan
    computed: torch.Tensor  # bool [B, S, H]
    generator: torch.Generator

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=self.generator, device=self.generator.device) * scale
        return values.to(self.case.dtype if dtype is None else dtype)

    def features(self) -> torch.Tensor:
        return self.normal(self.case.batch, self.case.tokens, self.case.heads, self.case.head_dim)


def make_inputs(case: Case, device: str) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    blocks = -(-case.tokens // case.block)
    shape = (case.batch, case.heads, blocks)
    rows = torch.rand(shape, generator=generator, device=device) < case.rows
    tiles = torch.rand((*shape, blocks), generator=generator, device=device) < case.tiles
    cache_bits = kernels.pack_bits(rows.transpose(1, 2), backend="reference")
    skip_bits = kernels.pack_bits(tiles, backend="reference")
    symbols = SparseSymbols(cache_bits, skip_bits, case.heads, case.tokens, case.block)
    computed = rows.repeat_interleave(case.block, 2)[:, :, : case.tokens].transpose(1, 2)
    return Inputs(case, rows, tiles & rows[..., None], symbols, kernels.lower(symbols), computed, generator)


def largest(x: torch.Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def result(
    op: str, case: Case, actual, exact, low, untouched: bool, run: Callable | None = None, dense: Callable | None = None
) -> dict:
    """One row of the table: errors against float64, the bound, and median times in milliseconds."""
    from triton.testing import do_bench

    error, low_error = largest(actual.double() - exact), largest(low.double() - exact)
    bound = 2 * low_error + ROUNDING[actual.dtype] * largest(exact)
    times = [None if f is None else do_bench(f, warmup=10, rep=40, return_mode="median") for f in (run, dense)]
    passed = untouched and error <= bound  # NaN fails
    return {"op": op, "case": case.name, "error": error, "dense_error": low_error, "bound": bound,
            "untouched": untouched, "passed": passed, "ms": times[0], "dense_ms": times[1]}  # fmt: skip


def check_symbols(inputs: Inputs) -> list[dict]:
    """Packing and lowering are exact: the Triton lists equal the reference's."""
    tiles, symbols = inputs.tiles, inputs.symbols
    packed = kernels.pack_bits(tiles, backend="triton")
    pack_equal = torch.equal(kernels.unpack_bits(packed, tiles.shape[-1], backend="triton"), tiles)
    plan, expected = kernels.lower(symbols, backend="triton"), kernels.lower(symbols, backend="reference")
    lower_equal = torch.equal(plan.mask64, expected.mask64)
    for lists, counts in (("kv_index", "kv_count"), ("row_index", "row_count"), ("work", "work_count")):
        count, index = getattr(plan, counts), getattr(plan, lists)
        used = (torch.arange(index.shape[-1], device=index.device) < count[..., None]).view_as(index)
        lower_equal &= torch.equal(count, getattr(expected, counts))
        lower_equal &= torch.equal(index[used], getattr(expected, lists)[used])
    zero = torch.zeros(1, device=tiles.device)
    lower_again = partial(kernels.lower, symbols, scratch=plan, backend="triton")
    lower_reference = partial(kernels.lower, symbols, scratch=expected, backend="reference")
    return [
        result("pack_bits", inputs.case, zero, zero.double(), zero, pack_equal),
        result("lower", inputs.case, zero, zero.double(), zero, lower_equal, lower_again, lower_reference),
    ]


def dense_attention(q, k, v, keep, dtype) -> torch.Tensor:
    """One head in ``dtype``: q, k, v ``[S, D]``, keep bool ``[S, S]``."""
    scores = (q.to(dtype) @ k.to(dtype).T * q.shape[-1] ** -0.5).masked_fill(~keep, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v.to(dtype)


def check_attention(inputs: Inputs) -> list[dict]:
    case, plan = inputs.case, inputs.plan
    q, k, v = inputs.features(), inputs.features(), inputs.features()
    kv_len = None
    if case.valid_keys is not None:
        kv_len = torch.full((case.batch,), case.valid_keys, dtype=torch.int32, device=q.device)
    out = torch.full_like(q, math.nan)
    kernels.attention(q, k, v, plan, kv_len=kv_len, out=out, backend="triton")
    exact, low = torch.zeros_like(q, dtype=torch.float64), torch.zeros_like(q)
    for b in range(case.batch):
        for h in range(case.heads):
            keep = inputs.tiles[b, h].repeat_interleave(case.block, 0).repeat_interleave(case.block, 1)
            keep = keep[: case.tokens, : case.tokens]
            keep[:, case.tokens if case.valid_keys is None else case.valid_keys :] = False
            head = q[b, :, h], k[b, :, h], v[b, :, h], keep
            exact[b, :, h], low[b, :, h] = dense_attention(*head, torch.float64), dense_attention(*head, case.dtype)
    chosen = inputs.computed
    untouched = torch.equal(out.isnan().all(-1), ~chosen) and torch.equal(out.isnan().any(-1), ~chosen)
    transposed = [x.transpose(1, 2) for x in (q, k, v)]

    def dense() -> torch.Tensor:
        backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        with sdpa_kernel(backends, set_priority=True):
            return F.scaled_dot_product_attention(*transposed)

    run = partial(kernels.attention, q, k, v, plan, kv_len=kv_len, out=out, backend="triton")
    return [result("attention", case, out[chosen], exact[chosen], low[chosen], untouched, run, dense)]


def check_gemm_q(inputs: Inputs) -> list[dict]:
    case, plan = inputs.case, inputs.plan
    width = case.heads * case.head_dim
    x = inputs.normal(case.batch, case.tokens, width)
    fused, bias = inputs.normal(3 * width, width, scale=width**-0.5), inputs.normal(width)
    weight, norm_weight = fused[:width], inputs.normal(case.head_dim)
    angle = inputs.normal(case.tokens, case.head_dim // 2, dtype=torch.float32).repeat_interleave(2, -1)
    rope = angle.cos(), angle.sin()

    def dense(dtype: torch.dtype, norm: bool) -> torch.Tensor:
        wide = dtype if dtype == torch.float64 else torch.float32
        q = F.linear(x.to(dtype), weight.to(dtype), bias.to(dtype)).unflatten(-1, (case.heads, -1))
        if not norm:
            return q
        q = q.to(wide) * (q.to(wide).square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm_weight
        even, odd = q.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((-odd, even), -1).flatten(-2)
        return (q * rope[0].to(wide)[:, None] + turned * rope[1].to(wide)[:, None]).to(dtype)

    rows = []
    for op, norm in (("gemm_q", False), ("gemm_q+norm+rope", True)):
        options = {"norm_weight": norm_weight, "rope": rope} if norm else {}
        out = x.new_full((case.batch, case.tokens, case.heads, case.head_dim), math.nan)
        run = partial(kernels.gemm_q, x, weight, bias, plan, out=out, backend="triton", **options)
        run()
        chosen = inputs.computed
        untouched = torch.equal(out.isnan().all(-1), ~chosen) and torch.equal(out.isnan().any(-1), ~chosen)
        exact, low = dense(torch.float64, norm), dense(case.dtype, norm)
        values = out[chosen], exact[chosen], low[chosen]
        rows.append(result(op, case, *values, untouched, run, partial(dense, case.dtype, norm)))
    return rows


def check_gemm_o(inputs: Inputs) -> list[dict]:
    case, plan, chosen = inputs.case, inputs.plan, inputs.computed[..., None]
    width = case.heads * case.head_dim
    o, old = inputs.features(), inputs.features()
    fused, bias = inputs.normal(width, 2 * width, scale=width**-0.5), inputs.normal(width)
    weight = fused[:, width:]

    def linear(features: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = bias) -> torch.Tensor:
        return F.linear(features.flatten(2).to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    def both(features: torch.Tensor, **options) -> tuple[torch.Tensor, torch.Tensor]:
        return linear(features, torch.float64, **options), linear(features, case.dtype, **options)

    out, stack = kernels.gemm_o_update(o, weight, bias, plan, history=[old], backend="triton")
    update = partial(kernels.gemm_o_update, o, weight, bias, plan, backend="triton")
    dense = partial(linear, o, case.dtype)
    rows = [result("gemm_o_update", case, out, *both(o), True, update, dense)]
    for entry, features in enumerate((o, old)):
        reused = torch.where(chosen, 0.0, features)
        rows.append(result(f"gemm_o_update B_{entry}", case, stack[entry], *both(reused), True))

    poisoned = torch.where(chosen, o, math.nan)  # reused rows must not be read
    weights = (1.5, -0.5)
    run = partial(kernels.gemm_o_dispatch, poisoned, weight, plan, stack, weights, backend="triton")
    exact, low = both(torch.where(chosen, o, 0.0), bias=None)
    exact = exact + weights[0] * stack[0].double() + weights[1] * stack[1].double()
    low = low + weights[0] * stack[0] + weights[1] * stack[1]
    rows.append(result("gemm_o_dispatch", case, run(), exact, low, True, run, dense))
    return rows


def check_pooling(inputs: Inputs) -> list[dict]:
    case = inputs.case
    q, k = inputs.features() + 0.5, inputs.features() + 0.5
    run = partial(kernels.pooled_map, q, k, case.block, backend="triton")
    actual, low = run(), kernels.pooled_map(q, k, case.block, backend="reference")
    q_exact, k_exact = (float64_block_statistics(x.double(), case.block) for x in (q, k))
    centred = k_exact[0] - k.double().mean(1)[:, :, None]
    probabilities = (q_exact[0] @ centred.transpose(-1, -2) * case.head_dim**-0.5).softmax(-1)
    dense = partial(kernels.pooled_map, q, k, case.block, backend="reference")
    return [
        result("pooled_map", case, actual.probabilities, probabilities, low.probabilities, True, run, dense),
        result("pooled_map q_similarity", case, actual.q_similarity, q_exact[1], low.q_similarity, True),
        result("pooled_map k_similarity", case, actual.k_similarity, k_exact[1], low.k_similarity, True),
    ]


def float64_block_statistics(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Means ``[B, H, T, D]`` and mean pairwise cosines ``[B, H, T]`` of ``[B, S, H, D]``."""
    parts = [part.transpose(1, 2) for part in x.split(block, 1)]  # [B, H, n, D]
    units = [part / part.norm(dim=-1, keepdim=True) for part in parts]
    cosines = [(unit @ unit.transpose(-1, -2)).mean((-1, -2)) for unit in units]
    return torch.stack([part.mean(2) for part in parts], 2), torch.stack(cosines, 2)


def check_forecast(inputs: Inputs) -> list[dict]:
    case, plan, weights = inputs.case, inputs.plan, (1.5, -0.5)
    history = inputs.features(), inputs.features()
    exact = weights[0] * history[0].double() + weights[1] * history[1].double()

    def dense() -> torch.Tensor:
        return weights[0] * history[0] + weights[1] * history[1]

    everything = partial(kernels.weighted_sum, history, weights, backend="triton")
    out = torch.full_like(history[0], math.nan)
    reused_rows = partial(kernels.weighted_sum, history, weights, plan=plan, out=out, backend="triton")
    reused_rows()
    chosen = ~inputs.computed
    untouched = torch.equal(out.isnan().all(-1), ~chosen)
    return [
        result("weighted_sum", case, everything(), exact, dense(), True, everything, dense),
        result("weighted_sum plan", case, out[chosen], exact[chosen], dense()[chosen], untouched, reused_rows, dense),
    ]


def check_kernels(device: str, *, quick: bool = False) -> list[dict]:
    """All ops over all cases: one dict a check, with errors, bound, ``passed`` and times."""
    checks = (check_symbols, check_attention, check_gemm_q, check_gemm_o, check_pooling, check_forecast)
    results = []
    for case in QUICK_CASES if quick else CASES:
        inputs = make_inputs(case, device)
        for check in checks:
            results += check(inputs)
    return results


def print_table(results: list[dict]) -> None:
    case = None
    for row in results:
        if row["case"] != case:
            case = row["case"]
            print(f"\n{case}\n  {'op':26}{'error':>10}{'bound':>10}{'ms':>10}{'dense ms':>10}")
        times = "".join(" " * 10 if row[key] is None else f"{row[key]:10.3f}" for key in ("ms", "dense_ms"))
        print(f"  {row['op']:26}{row['error']:10.2e}{row['bound']:10.2e}{times}  {'ok' if row['passed'] else 'FAILED'}")


def describe_run() -> dict:
    """What the figures were measured on and with."""
    try:
        from triton import __version__ as triton_version
    except ImportError:
        triton_version = None
    git = subprocess.run(
        ["git", "rev-parse", "--verify", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version,
        "cuda": torch.version.cuda,
        # DIT_ACCEL_COMMIT names it where the tree came without its history.
        "commit": git.stdout.strip() or os.environ.get("DIT_ACCEL_COMMIT", "unknown"),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    parser.add_argument("--quick", action="store_true", help="two cases a kernel, and no transformer")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check needs a CUDA GPU, and torch finds none", file=sys.stderr)
        return 2
    results = {"kernels": check_kernels("cuda", quick=arguments.quick), "flux": []}
    print_table(results["kernels"])
    if not arguments.quick:
        from gpu_check_flux import check_flux

        results["flux"] = check_flux()
        for row in results["flux"]:
            print(json.dumps(row))
    rows = results["kernels"] + results["flux"]
    failures = sum(not row["passed"] for row in rows)
    print(f"\n{len(rows) - failures} of {len(rows)} checks passed")
    if arguments.output:
        arguments.output.write_text(json.dumps(describe_run() | results, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
