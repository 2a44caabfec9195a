"""Ops as models call them, on CPU tensors of a few blocks; longer sequences use the same kernels."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dit_accel import kernels
from dit_accel.kernels.layout import block_count
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols
from scripts.bench.kernels.cases import Case, causal, make_inputs, masked_inputs

TOKENS = 1100  # the last block is ragged
DENSE = Case(TOKENS, heads=4, tiles=0.5)
WIDTH = DENSE.heads * DENSE.head_dim


def _attention(case: Case = DENSE, masks: bool = False, **options: Any) -> None:
    inputs = masked_inputs(case, causal, "cpu") if masks else make_inputs(case, "cpu")
    kernels.attention(*inputs.qkv(), inputs.plan, kv_len=inputs.kv_len, backend="triton", **options)


def _slices(case: Case = DENSE) -> None:
    inputs = make_inputs(case, "cpu")
    bits = kernels.pack_bits(torch.rand(1, case.heads, inputs.plan.blocks, inputs.plan.blocks * case.block) < 0.3)
    symbols = replace(inputs.symbols, skip_bits=torch.zeros_like(inputs.symbols.skip_bits), slice_bits=bits)
    kernels.attention(*inputs.qkv(), kernels.lower(symbols), backend="triton")


def _marginal_plan(block: int) -> AttentionPlan:
    """Plan with half of the tiles computed and the others marginal."""
    blocks = block_count(TOKENS, block)
    critical = torch.rand(1, DENSE.heads, blocks, blocks) < 0.5
    rows = kernels.pack_bits(torch.ones(1, blocks, DENSE.heads, dtype=torch.bool))
    bits, linear = kernels.pack_bits(critical), kernels.pack_bits(~critical)
    return kernels.lower(SparseSymbols(rows, bits, DENSE.heads, TOKENS, block, linear_bits=linear))


def _sla(block: int) -> None:
    inputs, plan = make_inputs(DENSE, "cpu"), _marginal_plan(block)
    kernels.attention(*inputs.qkv(), plan, backend="triton")
    kernels.linear_attention(*inputs.qkv(), plan, backend="triton")


def _sla_backward() -> None:
    inputs, plan = make_inputs(DENSE, "cpu"), _marginal_plan(64)
    q, k, v = inputs.qkv()
    kernels.attention_backward(q, k, v, q, torch.zeros(1, DENSE.heads, TOKENS), q, plan, backend="triton")
    kernels.linear_attention_backward(q, k, v, q, plan, backend="triton")


def _gemm_q() -> None:
    inputs = make_inputs(replace(DENSE, rows=0.5), "cpu")
    x, weight, bias = inputs.normal(1, TOKENS, WIDTH), inputs.normal(WIDTH, WIDTH), inputs.normal(WIDTH)
    for options in ({}, inputs.norm_and_rope()):
        kernels.gemm_q(x, weight, bias, inputs.plan, backend="triton", **options)


def _gemm_o() -> None:
    inputs = make_inputs(replace(DENSE, rows=0.5), "cpu")
    o, old, weight = inputs.features(), inputs.features(), inputs.normal(WIDTH, WIDTH)
    _, stack = kernels.gemm_o_update(o, weight, None, inputs.plan, history=[old], backend="triton")
    kernels.gemm_o_dispatch(o, weight, inputs.plan, stack, (1.5, -0.5), backend="triton")


def _quantized_linear(dtype: str) -> None:
    """Run layers as wide as FLUX's: after a block's norm, and after attention and the MLP."""
    inputs = make_inputs(DENSE, "cpu")
    x, hidden, bias = inputs.normal(128, 3072), inputs.normal(128, 12288), inputs.normal(128)
    for gelu in (None, hidden):
        values, scales = kernels.quantize_rows(x, gelu, dtype=dtype, backend="triton")
        kernels.quantized_linear(values, scales, values, scales, bias, out_dtype="bfloat16", backend="triton")


def _block() -> None:
    """Run the parts of a fused block other than products: norms, modulation, gates, RoPE."""
    inputs = make_inputs(DENSE, "cpu")
    x, one = inputs.normal(1, TOKENS, WIDTH), inputs.normal(1, 1, WIDTH)
    kernels.norm_modulate(x, one, one, backend="triton")
    kernels.add_gated_norm_modulate(x, x, one, one, one, backend="triton")
    kernels.norm_modulate(x, one, rms=True, backend="triton")
    kernels.add_gated_norm_modulate(x, x, one, one, rms=True, update_eps=1e-5, backend="triton")
    kernels.add_gated(x, x, one, update_eps=1e-5, backend="triton")
    kernels.add_gated_norm_modulate(x, x, one, one, one, rms=True, rows=torch.zeros(TOKENS).long(), backend="triton")
    values = inputs.norm_and_rope()
    kernels.norm_rope(inputs.features(), values["norm_weight"], values["rope"], backend="triton")
    for weight, half in ((inputs.normal(WIDTH), DENSE.head_dim // 2), (values["norm_weight"], 3 * DENSE.head_dim // 8)):
        kernels.norm_rope(inputs.features(), weight, 2 * (torch.ones(1, TOKENS, 1, half),), backend="triton")
    kernels.swiglu(x, backend="triton")
    kernels.swiglu(x, x, backend="triton")


def _symbols() -> None:
    """Compute a plan from queries and keys, like SpargeAttn and FG-Attn."""
    inputs = make_inputs(DENSE, "cpu")
    q, k, _ = inputs.qkv()
    kernels.pooled_map(q, k, DENSE.block, backend="triton")
    masses = torch.rand(inputs.tiles.shape)
    kernels.select_tiles(masses, 0.3, always=slice(0, 1), backend="triton")
    kernels.select_tiles(masses, None, top_k=0.3, always=slice(0, 1), backend="triton")
    kernels.pack_bits(inputs.tiles, backend="triton")
    kernels.select_keys(q, k, 0.5, group=DENSE.block, block=DENSE.block, backend="triton")
    kernels.lower(inputs.symbols, backend="triton")


OPS: dict[str, Callable[[], None]] = {
    "attention": _attention,
    "attention, kv_len": partial(_attention, replace(DENSE, valid_keys=1000)),
    "attention, blocks of 64": partial(_attention, replace(DENSE, block=64)),
    "attention, heads of 64": partial(_attention, replace(DENSE, head_dim=64)),
    "attention, masks": partial(_attention, masks=True),
    "attention, masks, blocks of 64": partial(_attention, replace(DENSE, block=64), masks=True),
    "attention, masks, heads of 64": partial(_attention, replace(DENSE, head_dim=64), masks=True),
    "attention, pv_threshold": partial(_attention, pv_threshold=-9.0),
    "attention, pv_threshold, blocks of 64": partial(_attention, replace(DENSE, block=64), pv_threshold=-9.0),
    "attention, int8": partial(_attention, qk_dtype="int8"),
    "attention, int8, pv_threshold": partial(_attention, qk_dtype="int8", pv_threshold=-9.0),
    "attention, int8 and float8": partial(_attention, qk_dtype="int8+fp8"),
    "attention, tile means": partial(_attention, tile_means=True),
    "attention, single keys": _slices,
    "attention, single keys, blocks of 64": partial(_slices, replace(DENSE, block=64)),
    "SLA": partial(_sla, 128),
    "SLA, blocks of 64": partial(_sla, 64),
    "SLA, backward": _sla_backward,
    "GEMM-Q": _gemm_q,
    "GEMM-O": _gemm_o,
    "linear layers, int8": partial(_quantized_linear, "int8"),
    "linear layers, float8": partial(_quantized_linear, "float8"),
    "norms and gates": _block,
    "symbols": _symbols,
}
# Lowest compute capability, times ten, for an op.
SINCE = {"attention, int8 and float8": 89, "linear layers, float8": 89}
