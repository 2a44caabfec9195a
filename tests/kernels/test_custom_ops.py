"""Every op in compiled models: registered as torch wants it, without graph breaks, and bit for bit the eager one."""

from dataclasses import replace

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dit_accel import kernels
from dit_accel.errors import ShapeError
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.sla import SparseLinearAttention

BATCH, TOKENS, HEADS, HEAD_DIM, BLOCK = 1, 100, 2, 16, 64
BLOCKS = -(-TOKENS // BLOCK)
WIDTH = HEADS * HEAD_DIM
generator = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def bits(*shape: int) -> torch.Tensor:
    return kernels.pack_bits(torch.rand(shape, generator=generator) < 0.5)


Q, K, V, DO = (normal(BATCH, TOKENS, HEADS, HEAD_DIM) for _ in range(4))
X, UPDATE = (normal(BATCH, TOKENS, WIDTH) for _ in range(2))
IMAGES, VIDEO, CHANNELS = normal(2, 4, 3, 5), normal(1, 4, 2, 3, 5), normal(4)
TAPS = normal(4, 4, 1, 3, 3)
FOLDED = kernels.fold_upsampling(TAPS)
GATE, SCALE, SHIFT = (normal(BATCH, 1, WIDTH) for _ in range(3))
WEIGHT, BIAS = normal(WIDTH, WIDTH), normal(WIDTH)
ROPE = normal(TOKENS, HEAD_DIM), normal(TOKENS, HEAD_DIM)
ZEROS = torch.zeros_like(Q)
KV_LEN = torch.tensor([80], dtype=torch.int32)
MAP = kernels.pooled_map(Q, K, BLOCK).probabilities
LAST = slice(BLOCKS - 1, None)
SYMBOLS = SparseSymbols(bits(BATCH, BLOCKS, HEADS), bits(BATCH, HEADS, BLOCKS, BLOCKS), HEADS, TOKENS, BLOCK)
MASKED = kernels.symbols_from_mask(
    torch.ones(1, 1, TOKENS, TOKENS).tril().bool(), block=BLOCK, batch=BATCH, heads=HEADS
)
SLICED = replace(
    MASKED, skip_bits=torch.zeros_like(SYMBOLS.skip_bits), slice_bits=bits(BATCH, HEADS, BLOCKS, BLOCKS * BLOCK)
)
PLAN, SLICED_PLAN = kernels.lower(SYMBOLS), kernels.lower(SLICED)
SLA_PLAN = SparseLinearAttention(HEAD_DIM, 0.2, 0.3).plan(Q, K)
ATTENDED, LSE = kernels.attention(Q, K, V, SLA_PLAN, return_lse=True)
ROWS8, WEIGHT8 = (kernels.quantize_rows(each, dtype="int8") for each in (X, WEIGHT))
_, STACK = kernels.gemm_o_update(Q, WEIGHT, BIAS, PLAN, history=(K,))

CALLS = {  # an op with arguments: reused parts keep zeros
    "add_gated": (kernels.add_gated, (X, UPDATE, GATE), {}),
    "add_gated-view": (kernels.add_gated, (X.transpose(0, 1), UPDATE.transpose(0, 1), None), {}),
    "add_gated_norm_modulate": (kernels.add_gated_norm_modulate, (X, UPDATE, GATE, SCALE, SHIFT), {"eps": 1e-5}),
    "attention": (kernels.attention, (Q, K, V, PLAN), {"out": ZEROS}),
    "attention-lse": (kernels.attention, (Q, K, V, SLA_PLAN), {"return_lse": True, "kv_len": KV_LEN, "scale": 0.2}),
    "attention-masks-slices": (kernels.attention, (Q, K, V, SLICED_PLAN), {}),
    "attention_backward": (kernels.attention_backward, (Q, K, V, ATTENDED, LSE, DO, SLA_PLAN), {}),
    "classify_tiles": (kernels.classify_tiles, (MAP, 0.2, 0.3), {"always": LAST}),
    "gemm_o_update": (kernels.gemm_o_update, (Q, WEIGHT, BIAS, PLAN), {"history": (K,)}),
    "gemm_o_update-previous": (
        kernels.gemm_o_update,
        (V, WEIGHT, BIAS, PLAN),
        {"history": [Q, K], "previous": (STACK, PLAN.mask64.roll(1, 1))},
    ),
    "gemm_o_dispatch": (kernels.gemm_o_dispatch, (Q, WEIGHT, PLAN, STACK, [1.5, -0.5]), {}),
    "gemm_q": (kernels.gemm_q, (X, WEIGHT, BIAS, PLAN), {"norm_weight": BIAS[:HEAD_DIM], "rope": ROPE, "out": ZEROS}),
    "gemm_q-stream": (kernels.gemm_q, (X[:, 70:], WEIGHT, None, SLA_PLAN), {"offset": 70}),
    "linear_attention": (kernels.linear_attention, (Q, K, V, SLA_PLAN), {"kv_len": KV_LEN}),
    "linear_attention-adds": (
        kernels.linear_attention,
        (Q, K, V, SLA_PLAN),
        {"projection": WEIGHT[:HEAD_DIM, :HEAD_DIM], "out": DO, "accumulate": True},
    ),
    "linear_attention_backward": (kernels.linear_attention_backward, (Q, K, V, DO, SLA_PLAN), {"feature_map": "elu"}),
    "linear_gelu": (kernels.linear_gelu, (X, WEIGHT, BIAS), {}),
    "lower": (kernels.lower, (SYMBOLS,), {}),
    "lower-masks-slices": (kernels.lower, (SLICED,), {"order": "head"}),
    "norm_modulate": (kernels.norm_modulate, (X, SCALE, SHIFT), {}),
    "norm_modulate-rows": (kernels.norm_modulate, (X, SCALE, SHIFT), {"rows": torch.zeros(X.shape[1]).long()}),
    "norm_modulate-rms": (kernels.norm_modulate, (X, SCALE), {"rms": True}),
    "norm_rope": (kernels.norm_rope, (Q, WEIGHT[0], ROPE), {}),
    "norm_rope_pair": (kernels.norm_rope_pair, (Q, K, (WEIGHT[0], None), None), {}),
    "pack_bits": (kernels.pack_bits, (MAP > 0.2,), {}),
    "pooled_map": (kernels.pooled_map, (Q, K, BLOCK), {"kv_len": KV_LEN}),
    "quantize_rows": (kernels.quantize_rows, (X,), {"dtype": "int8"}),
    "quantize_rows-gelu": (kernels.quantize_rows, (X, UPDATE), {"dtype": "float8"}),
    "quantized_linear": (kernels.quantized_linear, (*ROWS8, *WEIGHT8, BIAS), {"out_dtype": "float32"}),
    "select_keys": (kernels.select_keys, (Q, K, 0.5), {"group": 64, "block": BLOCK}),
    "select_rows": (kernels.select_rows, (MAP, 0.3), {"text": LAST, "vision": slice(0, BLOCKS - 1)}),
    "select_tiles": (kernels.select_tiles, (MAP, 0.3), {"rows": MAP[..., 0] > 0.2}),
    "add_residual": (kernels.add_residual, (IMAGES, IMAGES, CHANNELS), {}),
    "group_moments": (kernels.group_moments, (IMAGES,), {"groups": 2, "input_bias": CHANNELS}),
    "group_norm": (kernels.group_norm, (IMAGES, CHANNELS, CHANNELS), {"groups": 2, "eps": 1e-6}),
    "group_norm-padded": (
        kernels.group_norm,
        (VIDEO, CHANNELS, CHANNELS),
        {"groups": 2, "eps": 1e-6, "before": 2, "border": 1, "frames": slice(0, 1)},
    ),
    "group_norm-modulated": (
        kernels.group_norm,
        (VIDEO, CHANNELS, CHANNELS, VIDEO, VIDEO),
        {"groups": 2, "eps": 1e-6},
    ),
    "convolution": (kernels.convolution, (VIDEO, TAPS, CHANNELS), {}),
    "upsampled_convolution": (kernels.upsampled_convolution, (VIDEO, FOLDED, CHANNELS), {}),
    "causal_norm": (kernels.causal_norm, (VIDEO, CHANNELS, VIDEO), {"input_bias": CHANNELS, "border": 1}),
    "pixel_norm": (kernels.pixel_norm, (VIDEO, CHANNELS), {"before": 2, "input_bias": CHANNELS}),
    "pixel_norm-modulated": (
        kernels.pixel_norm,
        (VIDEO, None, CHANNELS[None], CHANNELS[None]),
        {"eps": 1e-8, "after": 1, "border": 1, "reflect": True},
    ),
    "single_head_attention": (kernels.single_head_attention, (X, UPDATE, UPDATE), {}),
    "swiglu": (kernels.swiglu, (X,), {}),
    "swiglu-apart": (kernels.swiglu, (X, UPDATE), {}),
    "unpack_bits": (kernels.unpack_bits, (SYMBOLS.skip_bits, BLOCKS), {}),
    "weighted_sum": (kernels.weighted_sum, ((Q, K), (1.5, -0.5)), {}),
    "weighted_sum-rows": (kernels.weighted_sum, ([Q, K], [1.5, -0.5]), {"plan": PLAN, "out": ZEROS}),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def tensors(made) -> list[torch.Tensor]:
    """All that an op returned, or was given."""
    leaves = [each.tensors() if hasattr(each, "tensors") else each for each in pytree.tree_leaves(made)]
    leaves = [list(vars(each).values()) if isinstance(each, kernels.PooledMap) else each for each in leaves]
    return [each for each in pytree.tree_leaves(leaves) if isinstance(each, torch.Tensor)]


def with_own_out(options: dict) -> dict:
    return {name: value.clone() if name == "out" else value for name, value in options.items()}


class Recorder(TorchDispatchMode):
    """A compiler backend that records the graphs' calls to our ops."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = []

    def __call__(self, graph, inputs):
        compiled = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        def run(*args):
            with self:
                graph(*pytree.tree_map_only(torch.Tensor, torch.clone, args))
            return compiled(*args)

        return run

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "dit_accel":
            self.asked.append((op, pytree.tree_map_only(torch.Tensor, torch.clone, args)))
        return op(*args, **(kwargs or {}))


@pytest.fixture
def fresh_compiler():
    """Clear functions compiled by other tests: torch keeps only a few forms of each function."""
    torch._dynamo.reset()


@every_call
def test_compiled_is_eager(call, fresh_compiler):
    """One graph for any sizes, the same bits, and one op, which torch's own checks find sound: what is written is
    declared, and fakes are like results. Their check of dynamic graphs is the one made here.
    """
    function, args, options = call
    expected = function(*args, **with_own_out(options))
    own, recorder = with_own_out(options), Recorder()
    made = torch.compile(function, fullgraph=True, backend=recorder, dynamic=True)(*args, **own)
    pairs = list(zip(tensors(made), tensors(expected), strict=True))
    assert pairs
    for actual, exact in pairs:
        assert torch.equal(actual, exact)
    if "out" in own:
        assert torch.equal(own["out"], tensors(expected)[0])
    ((op, flat),) = recorder.asked
    assert op.name() == f"dit_accel::{function.__name__}"
    torch.library.opcheck(op, flat, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


def test_every_op_has_a_case():
    """The registered ops are the ones in the table above."""
    registered = {
        name.removeprefix("dit_accel::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("dit_accel::")
    }
    assert registered == {function.__name__ for function, _, _ in CALLS.values()}


def test_wrong_arguments_are_told_of_as_ever(fresh_compiler):
    """The compiled op raises the error of the eager one, when it runs."""
    compiled = torch.compile(lambda q, k: kernels.attention(q, k, k, PLAN), fullgraph=True, backend="aot_eager")
    with pytest.raises(ShapeError, match="k must have shape"):
        compiled(Q, K[:, 1:])
