"""Bad input to an op: the error names the argument, what was required and what came."""

import math

import pytest
import torch

from dit_accel import kernels
from dit_accel.errors import ShapeError, UnsupportedError
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols, TileMasks
from tests.kernels.conftest import DEVICE


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def plan(batch: int = 1, heads: int = 2, tokens: int = 130, block: int = 64, **bits: torch.Tensor) -> AttentionPlan:
    """A plan in which everything computes."""
    rows = torch.ones(batch, -(-tokens // block), heads, dtype=torch.bool, device=DEVICE)
    return kernels.lower(SparseSymbols(kernels.pack_bits(rows), None, heads, tokens, block, **bits))


Q, OUT = zeros(2, 1, 130, 2, 16)
LSE, VECTOR, TABLE = zeros(1, 2, 130), zeros(6), zeros(130, 16)
LENGTH, ROWS = zeros(1).int(), zeros(1, 1, 3).bool()
TURNED = zeros(1, 130, 16, 2).transpose(2, 3)
PLAN = plan(linear_bits=zeros(1, 2, 3, 1, dtype=torch.uint8))
TILE = TileMasks(zeros(1, 1, 3, 3, dtype=torch.int32), zeros(0, 64, 8, dtype=torch.uint8))
SLICED = SparseSymbols(
    *(zeros(*shape, dtype=torch.uint8) for shape in ((1, 3, 1), (1, 2, 3, 1))), 2, 130, 64,
    slice_bits=zeros(1, 2, 3, 24, dtype=torch.uint8),
)  # fmt: skip
QKV = {"q": Q, "k": Q, "v": Q}
IMAGE, VIDEO, MAP, CONVOLVED = zeros(1, 6, 2, 2), zeros(1, 6, 2, 2, 4), zeros(1, 1, 3, 3), zeros(1, 16, 2, 3, 3)
TAPS, HEADS, ROW, BYTES = zeros(32, 16, 1, 3, 3), zeros(2, 5, 3, 16), zeros(2, 1, 32), zeros(4, 32, dtype=torch.int8)
OPS = {  # arguments of a call that is right
    "attention": QKV | {"plan": PLAN, "kv_len": LENGTH, "out": OUT},
    "differentiable_attention": QKV | {"plan": PLAN},
    "attention_backward": QKV | {"o": Q, "do": Q, "lse": LSE, "plan": PLAN, "kv_len": LENGTH},
    "linear_attention": QKV | {"plan": PLAN, "kv_len": LENGTH, "out": OUT},
    "gemm_q": {
        "x": zeros(1, 100, 40), "weight": zeros(32, 40), "bias": zeros(32), "plan": PLAN, "norm_weight": zeros(16),
        "rope": (TABLE, TABLE), "out": OUT,
    },
    "gemm_o_update": {"o": Q, "weight": zeros(40, 32), "bias": zeros(40), "plan": PLAN, "history": [Q]},
    "gemm_o_dispatch": {"o": Q, "weight": zeros(40, 32), "plan": PLAN, "stack": zeros(1, 1, 130, 40), "weights": [1.0]},
    "weighted_sum": {"history": [VECTOR, VECTOR], "weights": [1.0, 1.0]},
    "select_tiles": {"probabilities": MAP, "tau": 0.1, "rows": ROWS, "columns": ROWS},
    "select_rows": {"probabilities": MAP, "tau": 0.1, "text": slice(0, 1), "vision": slice(1, 3)},
    "classify_tiles": {"probabilities": MAP, "critical": 0.05, "negligible": 0.1, "valid_blocks": LENGTH},
    "select_keys": {"q": Q, "k": Q, "threshold": 0.5, "group": 64, "block": 64, "kv_len": LENGTH},
    "pooled_map": {"q": Q, "k": Q, "block": 64, "kv_len": LENGTH},
    "lower": {"symbols": SLICED},
    "transpose_lists": {"plan": PLAN},
    "symbols_from_mask": {"mask": zeros(1, 1, 4, 4).bool(), "block": 64, "heads": 2},
    "pack_bits": {"mask": zeros(8).bool()},
    "unpack_bits": {"bits": zeros(1, dtype=torch.uint8), "n": 8},
    "norm_modulate": {"x": zeros(2, 7, 32), "scale": ROW, "rows": zeros(7).long()},
    "add_gated_norm_modulate": {
        "x": zeros(2, 7, 32), "update": zeros(2, 7, 32), "gate": ROW, "scale": ROW, "shift": ROW,
    },
    "norm_rope": {"x": HEADS, "weight": zeros(16), "rope": None, "out": zeros(2, 5, 3, 16)},
    "norm_rope_pair": {"q": HEADS, "k": HEADS, "weights": (None, None), "rope": None},
    "swiglu": {"x": zeros(2, 3, 32), "value": zeros(2, 3, 32), "out": zeros(2, 3, 32)},
    "linear_gelu": {"x": zeros(2, 64), "weight": zeros(96, 64), "bias": None},
    "quantize_rows": {"x": zeros(4, 32), "dtype": "int8"},
    "quantized_linear": {
        "values": BYTES, "scales": zeros(4), "weight": zeros(16, 32, dtype=torch.int8), "weight_scales": zeros(16),
        "out_dtype": "float32",
    },
    "convolution": {"x": CONVOLVED, "weight": TAPS, "bias": zeros(32), "residual": zeros(1, 32, 2, 1, 1)},
    "upsampled_convolution": {"x": CONVOLVED, "weight": kernels.fold_upsampling(TAPS)},
    "fold_upsampling": {"weight": TAPS},
    "group_norm": {"x": IMAGE, "weight": VECTOR, "bias": VECTOR, "groups": 2, "eps": 1e-6},
    "add_residual": {"x": IMAGE, "update": IMAGE},
    "pixel_norm": {
        "x": VIDEO, "weight": VECTOR, "input_bias": VECTOR, "shift": zeros(1, 6), "scale": zeros(1, 6),
    },
    "pad_video": {"x": VIDEO},
    "causal_norm": {"x": VIDEO, "weight": VECTOR},
    "single_head_attention": {"query": zeros(1, 4, 8), "key": zeros(1, 5, 8), "value": zeros(1, 5, 8)},
}  # fmt: skip
REFUSED = {  # changes of these arguments, and the error's beginning
    "attention": [
        ({"q": [[0.0]]}, r"q must be a tensor \[B, S, H, D\], got list"),
        ({"q": TURNED}, "q must have stride 1 on its last axis"),
        ({"k": zeros(1, 129, 2, 16)}, r"k must have shape \[1, 130, H_kv, 16\], got \[1, 129, 2, 16\]"),
        ({"k": zeros(1, 130, 1, 16)}, "heads of k and v must be as many and divide q's 2, got 1 and 2"),
        ({"out": zeros(1, 130, 2, 8)}, r"out must have shape \[1, 130, 2, 16\]"),
        ({"scale": -1.0}, "scale must be positive, got -1.0"),
        ({"pv_threshold": 0.0}, "pv_threshold must be negative .*, got 0.0; use None"),
        ({"pv_threshold": math.nan}, "pv_threshold must be negative .*, got nan"),
        ({"kv_len": zeros(2).int()}, r"kv_len must have shape \[1\], got \[2\]"),
        ({"qk_dtype": "int4"}, r"qk_dtype must be None or one of \('auto', 'int8', 'int8\+fp8'\), got 'int4'"),
        ({"tile_means": True}, r"tile_means must be False with plan\.linear_bits: .*linear attention"),
        ({"plan": "sparge"}, "plan must be an AttentionPlan from lower or plan, got str"),
        ({"plan": plan(batch=2)}, r"plan must have the batch and heads of q, \[1, 2\], got \[2, 2\]"),
        ({"plan": plan(tokens=131)}, "plan must have q's 130 tokens, got 131"),
    ],
    "differentiable_attention": [
        ({"k": zeros(1, 130, 1, 16)}, "k and v must have q's 2 heads when gradients are needed, got 1; repeat")
    ],
    "attention_backward": [
        ({"o": zeros(1, 129, 2, 16)}, r"o must have shape \[1, 130, 2, 16\], got \[1, 129, 2, 16\]"),
        ({"lse": zeros(1, 130, 2)}, r"lse must have shape \[1, 2, 130\], got \[1, 130, 2\]"),
    ],
    "linear_attention": [
        ({"k": zeros(1, 130, 1, 16)}, r"k must have shape \[1, 130, 2, 16\], got \[1, 130, 1, 16\]"),
        ({"projection": zeros(16, 8)}, r"projection must have shape \[16, 16\], got \[16, 8\]"),
        ({"out": zeros(1, 130, 2, 8)}, r"out must have shape \[1, 130, 2, 16\], got \[1, 130, 2, 8\]"),
        ({"accumulate": True, "out": None}, "accumulate adds to out, and out is None"),
        ({"feature_map": "exp"}, r"feature_map must be one of \('softmax', 'elu', 'relu'\), got 'exp'"),
        ({"plan": plan()}, "plan must have linear_bits, got None; lower symbols of policy sla"),
    ],
    "gemm_q": [
        ({"weight": zeros(32, 41)}, r"weight must have shape \[H \* D, 40\], got \[32, 41\]"),
        ({"weight": zeros(33, 40)}, "weight must have a multiple of the plan's 2 heads as rows, got 33"),
        ({"bias": zeros(31)}, r"bias must have shape \[32\], got \[31\]"),
        ({"norm_weight": zeros(32)}, r"norm_weight must have shape \[16\], got \[32\]"),
        ({"out": zeros(1, 100, 2, 16)}, r"out must have shape \[1, 130, 2, 16\], got \[1, 100, 2, 16\]"),
        ({"offset": 31}, "x must lie inside the plan's 130 tokens, got tokens 31 to 131"),
        ({"rope": (zeros(100, 16), zeros(130, 16))}, r"rope cos must have shape \[130, 16\]"),
    ],
    "gemm_o_update": [
        ({"o": zeros(1, 130, 3, 16)}, r"o must have shape \[B, S, 2, D\], got \[1, 130, 3, 16\]"),
        ({"weight": zeros(40, 33)}, r"weight must have shape \[N, 32\], got \[40, 33\]"),
        ({"bias": zeros(41)}, r"bias must have shape \[40\], got \[41\]"),
        ({"history": [zeros(1, 129, 2, 16)]}, r"history\[0\] must have shape \[1, 130, 2, 16\]"),
        (
            {"history": [Q, Q], "previous": (zeros(1, 1, 130, 40), PLAN.mask64)},
            "previous must have as many entries as history, 2, got 1",
        ),
        ({"previous": (zeros(1, 1, 130, 40), zeros(1, 4).long())}, r"mask64 must have shape \[1, 3\], got \[1, 4\]"),
    ],
    "gemm_o_dispatch": [
        ({"stack": zeros(1, 1, 40, 130).transpose(2, 3)}, "stack must be contiguous"),
        ({"weights": [1.0, 2.0]}, "weights must hold 1 floats, one for each stack entry, got 2"),
        ({"out": zeros(1, 130, 41)}, r"out must have shape \[1, 130, 40\], got \[1, 130, 41\]"),
    ],
    "weighted_sum": [
        ({"history": [], "weights": []}, "history and weights must have one length, at least 1, got 0 and 0"),
        ({"weights": [1.0]}, "got 2 and 1"),
        ({"history": [VECTOR, zeros(3)], "weights": [1, 2]}, r"history\[1\] must have shape \[6\], got \[3\]"),
    ],
    "select_tiles": [
        ({"probabilities": zeros(1, 1, 2, 3)}, r"probabilities must have shape \[B, H, 3, 3\], got \[1, 1, 2, 3\]"),
        ({"tau": 1.5}, "tau must be between 0 and 1, got 1.5"),
        ({"tau": None}, "one of tau and top_k must be given, got none"),
        ({"top_k": 0.5}, "one of tau and top_k must be given, got both"),
        ({"tau": None, "top_k": 0.0}, "top_k must be above 0 and at most 1, got 0.0"),
        ({"rows": zeros(1, 1, 2).bool()}, r"rows must have shape \[1, 1, 3\], got \[1, 1, 2\]"),
    ],
    "select_rows": [({"tau": 1.5}, "tau must be between 0 and 1, got 1.5")],
    "classify_tiles": [
        ({"probabilities": zeros(1, 1, 4, 5)}, r"probabilities must have shape \[B, H, 4, 4\], got \[1, 1, 4, 5\]"),
        ({"critical": -0.1}, "critical must be between 0 and 1, got -0.1"),
        ({"critical": 0.6, "negligible": 0.5}, r"critical and negligible must sum to at most 1, got 0.6 \+ 0.5"),
        ({"valid_blocks": zeros(2).int()}, r"valid_blocks must have shape \[1\], got \[2\]"),
    ],
    "select_keys": [
        ({"k": zeros(1, 70, 3, 16)}, r"k must have shape \[1, S, 2, 16\], got \[1, 70, 3, 16\]"),
        ({"threshold": 0.0}, "threshold must be positive, in units of 1 / N, got 0.0"),
        ({"group": 32}, r"group must be one of \(1, 64, 128\), got 32"),
    ],
    "pooled_map": [({"block": 32}, r"block must be one of \(64, 128\), got 32")],
    "lower": [({"order": "row"}, r"order must be one of .*, got 'row'")],
    "transpose_lists": [({"order": "column"}, r"order must be one of .*, got 'column'")],
    "symbols_from_mask": [
        ({"mask": zeros(1, 1, 4, 5).bool()}, "mask must have shape .* S, S"),
        ({"mask": zeros(1, 3, 4, 4).bool()}, r"mask must have shape \[1 or 1, 2 or 1, S, S\], got \[1, 3, 4, 4\]"),
    ],
    "pack_bits": [({"mask": zeros(2, 0).bool()}, r"mask must have shape \[..., n\] with n >= 1")],
    "unpack_bits": [({"n": 9}, r"bits must have shape \[..., ceil\(n / 8\)\]")],
    "add_gated_norm_modulate": [
        ({"scale": zeros(2, 3, 32)}, r"scale must have shape \[2 or 1, 7 or 1, 32\], got \[2, 3, 32\]"),
        ({"update": zeros(2, 7, 16)}, r"update must have shape \[2, 7, 32\]"),
        ({"gate": zeros(3, 1, 32)}, r"gate must have shape \[2 or 1, 7 or 1, 32\]"),
        ({"shift": zeros(1, 1, 32)}, r"shift must have shape \[2, 1, 32\], got \[1, 1, 32\]"),
        ({"rows": zeros(6).long()}, r"rows must have shape \[7\], got \[6\]"),
    ],
    "norm_rope": [
        ({"weight": zeros(8)}, r"weight must have shape \[16\] or \[48\], got \[8\]"),
        ({"rope": 2 * (zeros(4, 16),)}, r"rope\[0\] must have shape \[5, 16\], got \[4, 16\]"),
        ({"rope": 2 * (zeros(1, 5, 2, 8),)}, r"rope\[0\] must have shape \[2 or 1, 5, 3 or 1, at most 8\], got"),
        ({"rope": (zeros(1, 5, 3, 8), zeros(1, 5, 1, 8))}, r"rope\[1\] must have shape \[1, 5, 3, 8\], got"),
        ({"x": zeros(2, 3, 5, 16).transpose(1, 2)}, "x must hold a token's heads contiguously"),
        ({"out": zeros(2, 4, 3, 16)}, r"out must have shape \[2, 5, 3, 16\]"),
    ],
    "norm_rope_pair": [({"k": zeros(2, 4, 3, 16)}, r"k must have shape \[2, 5, 3, 16\], got \[2, 4, 3, 16\]")],
    "swiglu": [
        ({"x": zeros(2, 3, 33), "value": None}, "x must have an even number of features, got 33"),
        ({"value": zeros(2, 3, 33)}, r"value must have shape \[2, 3, 32\], got \[2, 3, 33\]"),
        ({"out": zeros(2, 3, 16)}, r"out must have shape \[2, 3, 32\], got \[2, 3, 16\]"),
    ],
    "linear_gelu": [
        ({"weight": zeros(96, 32)}, r"weight must have shape \[N, 64\], got \[96, 32\]"),
        ({"bias": zeros(64)}, r"bias must have shape \[96\], got \[64\]"),
        ({"x": "x"}, r"x must have dtype torch.float16 or .*, got str"),
    ],
    "quantize_rows": [
        ({"dtype": "int4"}, r"dtype must be one of \('int8', 'float8'\), got 'int4'"),
        ({"hidden": zeros(4, 12)}, "x and hidden must have multiples of 8 features for int8, got .32, 12."),
        ({"hidden": zeros(3, 32)}, r"hidden must have shape \[4, M\], got \[3, 32\]"),
    ],
    "quantized_linear": [
        ({"weight": BYTES[:3], "weight_scales": zeros(3)}, r"multiples of 16, got \[3, 32\]"),
        ({"out_dtype": "int8"}, "out_dtype must be one of"),
    ],
    "convolution": [
        ({"weight": TAPS[:, :8]}, r"weight must have shape \[O, 16, kt, kh, kw\], got \[32, 8, 1, 3, 3\]"),
        ({"residual": CONVOLVED}, r"residual must have shape \[1, 32, 2, 1, 1\]"),
        ({"bias": zeros(16)}, r"bias must have shape \[32\], got \[16\]"),
    ],
    "upsampled_convolution": [({"weight": zeros(2, 32, 16, 1, 2, 2)}, "weight must have 4 or 8 phases, got 2")],
    "fold_upsampling": [({"frames": True}, r"weight must have shape \[O, C, 3, 3, 3\]")],
    "group_norm": [
        ({"groups": 4}, "groups must divide the 6 channels of x, got 4"),
        ({"moments": zeros(2, 2)}, r"moments must have shape \[1, 2, 2\], got \[2, 2\]"),
        ({"weight": zeros(5)}, r"weight must have shape \[6\], got \[5\]"),
        ({"border": 1}, "before, border, frames and scale need x of shape"),
        ({"x": VIDEO, "scale": VIDEO}, "scale and shift must be given together"),
        ({"x": VIDEO, "scale": VIDEO, "shift": VIDEO[..., :2]}, r"shift must have shape \[1, 6, 2, 2, 4\], got"),
        ({"x": VIDEO} | dict.fromkeys(("scale", "shift"), VIDEO[..., :2]), "scale must divide the height and width"),
    ],
    "add_residual": [({"update": IMAGE[:, :3]}, r"update must have shape \[1, 6, 2, 2\]")],
    "pixel_norm": [
        ({"weight": zeros(5)}, r"weight must have shape \[6\], got \[5\]"),
        ({"scale": None}, "shift and scale must be given together"),
        ({"border": 2, "reflect": True}, r"border must be less than the height and width of x, \[2, 4\], got 2"),
    ],
    "pad_video": [({"before": -1}, "before, after and border must be at least 0, got -1, 0 and 0")],
    "causal_norm": [
        ({"past": zeros(1, 6, 3, 2, 4)}, "past must have at most 2 frames, got 3"),
        ({"past": zeros(1, 6, 1, 2, 3)}, r"past must have shape \[1, 6, P, 2, 4\]"),
    ],
    "single_head_attention": [({"value": zeros(1, 4, 8)}, r"value must have shape \[1, 5, 8\], got \[1, 4, 8\]")],
}


ANY_RANK = {"pack_bits", "unpack_bits", "linear_gelu", "quantize_rows", "quantized_linear", "group_norm"}


@pytest.mark.parametrize("op", [op for op in OPS if op != "fold_upsampling"])  # which converts any weight
def test_tensors_of_another_dtype_or_rank_are_named(op):
    """No op takes complex numbers."""
    for name, x in OPS[op].items():
        places = x if isinstance(x, tuple | list) else [x]
        for wrong in ([] if op in ANY_RANK else [lambda x: x[None]]) + [lambda x: x.to(torch.complex64)]:
            for at, tensor in enumerate(places):
                if isinstance(tensor, torch.Tensor):
                    changed = [*places[:at], wrong(tensor), *places[at + 1 :]]
                    with pytest.raises(ShapeError, match=rf"\b({name}|k)\b.* must (have|be)"):
                        getattr(kernels, op)(**OPS[op] | {name: changed[0] if places is not x else changed})


@pytest.mark.parametrize("op", OPS)
def test_bad_arguments_are_named(op):
    """Each with all others right, of which the call itself is proof."""
    function = getattr(kernels, op)
    function(**OPS[op])
    for change, message in REFUSED.get(op, ()):
        with pytest.raises(ShapeError, match=message):
            function(**OPS[op] | change)


NARROW, WIDE = ({name: zeros(1, 130, 2, dim) for name in "qkv"} | {"out": None} for dim in (24, 32))
UNSUPPORTED = [  # an op, changes, and why Triton's kernel does not take the call
    ("attention", NARROW, r"head_dim must be one of \(16, 32, 64, 128\), got 24"),
    ("attention", {"plan": plan(block=32)}, r"plan.block must be one of \(64, 128\), got 32"),
    ("attention", {"pv_threshold": -1.0}, "with pv_threshold, q must have dtype .*got torch.float32"),
    ("attention", {"qk_dtype": "int8"}, r"head_dim must be one of \(32, 64, 128\) .*, got 16"),
    ("attention", WIDE | {"plan": plan(masks=TILE), "qk_dtype": "int8"}, "does not support masks inside tiles"),
    ("attention_backward", {"plan": plan(block=32)}, r"plan.block must be one of \(64, 128\), got 32"),
    ("select_keys", {"q": NARROW["q"], "k": NARROW["q"]}, "head_dim must be one of"),
    ("quantize_rows", {"x": zeros(1, 16392)}, "at most 16384 features, got 16392"),
    ("add_gated", {"x": zeros(1, 1, 16385), "update": zeros(1, 1, 16385), "gate": None}, "at most 16384 .* got 16385"),
]


@pytest.mark.parametrize(("op", "changes", "message"), UNSUPPORTED)
def test_triton_names_what_it_does_not_support(op, changes, message):
    """An explicit choice raises; "auto" takes the reference."""
    function, arguments = getattr(kernels, op), OPS.get(op, {}) | changes
    match = f"backend 'triton' can't take this call: .*{message}.*use backend='auto'"
    with pytest.raises(UnsupportedError, match=match):
        function(**arguments, backend="triton")
    function(**arguments)


def test_slices_have_no_gradients():
    with pytest.raises(UnsupportedError, match="plan must have no slices when gradients are needed"):
        kernels.attention_backward(**OPS["attention_backward"] | {"plan": kernels.lower(SLICED)})


@pytest.mark.parametrize("enabled", [True, False], ids=["grad", "no-grad"])
def test_no_gradient_flows(enabled):
    for op in ("attention", "norm_rope"):
        leaves = {name: x.clone().requires_grad_() for name, x in OPS[op].items() if x is Q or x is HEADS}
        with torch.set_grad_enabled(enabled):
            assert not getattr(kernels, op)(**OPS[op] | leaves).requires_grad
            assert torch.is_grad_enabled() == enabled
