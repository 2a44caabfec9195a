"""Ops of sparse linear attention in compiled models: without graph breaks, and bit for bit the eager ones."""

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
generator = torch.Generator().manual_seed(0)


def bits(*shape: int) -> torch.Tensor:
    return kernels.pack_bits(torch.rand(shape, generator=generator) < 0.5)


Q, K, V, DO = (torch.randn(BATCH, TOKENS, HEADS, HEAD_DIM, generator=generator) for _ in range(4))
PROJECTION = torch.randn(HEAD_DIM, HEAD_DIM, generator=generator)
ZEROS, KV_LEN = torch.zeros_like(Q), torch.tensor([80], dtype=torch.int32)
MAP = kernels.pooled_map(Q, K, BLOCK).probabilities
SYMBOLS = SparseSymbols(bits(BATCH, BLOCKS, HEADS), bits(BATCH, HEADS, BLOCKS, BLOCKS), HEADS, TOKENS, BLOCK)
MASKED = kernels.symbols_from_mask(torch.ones(1, 1, TOKENS, TOKENS).tril() > 0, block=BLOCK, batch=BATCH, heads=HEADS)
SLICED = replace(
    MASKED, skip_bits=torch.zeros_like(SYMBOLS.skip_bits), slice_bits=bits(BATCH, HEADS, BLOCKS, BLOCKS * BLOCK)
)
PLAN, SLICED_PLAN = kernels.lower(SYMBOLS), kernels.lower(SLICED)
SLA_PLAN = SparseLinearAttention(HEAD_DIM, 0.2, 0.3).plan(Q, K)
ATTENDED, LSE = kernels.attention(Q, K, V, SLA_PLAN, return_lse=True)
ADDING = {"projection": PROJECTION, "out": DO, "accumulate": True, "kv_len": KV_LEN}

CALLS = {  # an op with arguments: reused parts keep zeros
    "attention-lse": (kernels.attention, (Q, K, V, PLAN), {"return_lse": True, "kv_len": KV_LEN, "out": ZEROS}),
    "attention-masks-slices": (kernels.attention, (Q, K, V, SLICED_PLAN), {}),
    "attention_backward": (kernels.attention_backward, (Q, K, V, ATTENDED, LSE, DO, SLA_PLAN), {}),
    "classify_tiles": (kernels.classify_tiles, (MAP, 0.2, 0.3), {"always": slice(BLOCKS - 1, None)}),
    "linear_attention-adds": (kernels.linear_attention, (Q, K, V, SLA_PLAN), ADDING),
    "linear_attention_backward": (kernels.linear_attention_backward, (Q, K, V, DO, SLA_PLAN), {"feature_map": "elu"}),
    "lower": (kernels.lower, (SYMBOLS,), {}),
    "pack_bits": (kernels.pack_bits, (MAP > 0.2,), {}),
    "pooled_map": (kernels.pooled_map, (Q, K, BLOCK), {"kv_len": KV_LEN}),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def tensors(result) -> list[torch.Tensor]:
    leaves = [leaf.tensors() if hasattr(leaf, "tensors") else leaf for leaf in pytree.tree_leaves(result)]
    leaves = [list(vars(leaf).values()) if isinstance(leaf, kernels.PooledMap) else leaf for leaf in leaves]
    return [leaf for leaf in pytree.tree_leaves(leaves) if isinstance(leaf, torch.Tensor)]


def with_new_out(options: dict) -> dict:
    return {name: value.clone() if name == "out" else value for name, value in options.items()}


class Recorder(TorchDispatchMode):
    """Records the calls of our ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "dit_accel":
            self.calls.append((op, pytree.tree_map_only(torch.Tensor, torch.clone, args)))
        return op(*args, **(kwargs or {}))


@pytest.fixture
def fresh_compiler():
    """Clear functions compiled by other tests: torch keeps only a few forms of each function."""
    torch._dynamo.reset()


@every_call
def test_compiled_is_eager(call, fresh_compiler, monkeypatch):
    """One graph for any sizes, the same bits, and one op, whose writes and fakes torch's own checks find sound."""
    function, args, options = call
    expected = function(*args, **with_new_out(options))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    with monkeypatch.context() as patched, Recorder() as recorder:
        patched.setattr(torch.compiler, "is_compiling", lambda: True)
        function(*args, **with_new_out(options))
    options = with_new_out(options)
    pairs = list(zip(tensors(compiled(*args, **options)), tensors(expected), strict=True))
    assert pairs and all(torch.equal(*pair) for pair in pairs)
    if "out" in options:
        assert torch.equal(options["out"], tensors(expected)[0])
    ((op, flat),) = recorder.calls
    assert op.name() == f"dit_accel::{function.__name__}"
    torch.library.opcheck(op, flat, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


def test_every_op_has_a_case():
    registered = {
        name.removeprefix("dit_accel::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("dit_accel::")
    }
    assert registered == {function.__name__ for function, _, _ in CALLS.values()}


def test_other_ops_run_between_graphs(fresh_compiler):
    """A compiled model may call them: the compiler leaves them alone, and their result is the eager one."""
    graphs = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda x: kernels.swiglu(x + 1) + 1, backend=graphs)
    assert torch.equal(compiled(Q[0]), kernels.swiglu(Q[0] + 1) + 1)
    assert (graphs.frame_count, graphs.op_count) == (2, 2)


def test_wrong_arguments_raise_as_in_eager(fresh_compiler):
    """The compiled op raises the error of the eager one, when it runs."""
    compiled = torch.compile(lambda q, k: kernels.attention(q, k, k, PLAN), fullgraph=True, backend="aot_eager")
    with pytest.raises(ShapeError, match="k must have shape"):
        compiled(Q, K[:, 1:])
