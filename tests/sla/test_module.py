"""The trainable module: its value, its gradients in all special cases, and its errors."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from dit_accel.errors import ShapeError
from dit_accel.kernels import attention, unpack_bits
from dit_accel.kernels.layout import TokenLayout
from dit_accel.sla.module import SparseLinearAttention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FEATURES = {"softmax": lambda x: x.softmax(-1), "elu": lambda x: F.elu(x) + 1, "relu": torch.relu}
CASES = {  # critical, negligible, feature map, block
    "three-classes": (0.2, 0.3, "softmax", 64),
    "elu": (0.2, 0.3, "elu", 64),
    "relu": (0.2, 0.3, "relu", 64),
    "block-128": (0.3, 0.3, "softmax", 128),
    "all-critical": (1.0, 0.0, "softmax", 64),
    "no-critical": (0.0, 0.2, "softmax", 64),
    "all-marginal": (0.0, 0.0, "elu", 64),
    "no-marginal": (0.4, 0.6, "softmax", 64),
    "all-negligible": (0.0, 1.0, "softmax", 64),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def features(seed: int, tokens: int = 330, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, tokens, 2, 16, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def make_module(critical=0.2, negligible=0.3, feature_map="softmax", block=64) -> SparseLinearAttention:
    """A module with a random projection."""
    module = SparseLinearAttention(16, critical, negligible, feature_map=feature_map, block=block).to(DEVICE)
    torch.nn.init.normal_(module.projection.weight, generator=torch.Generator(DEVICE).manual_seed(9))
    return module


def dense(q, k, v, weight, plan, feature_map, kv_len=None):
    """Both branches by masks over all pairs of tokens."""
    tokens, blocks = q.shape[1], plan.blocks
    slot = torch.arange(blocks, device=q.device)
    listed = torch.where(slot < plan.kv_count[..., None], plan.kv_index, blocks).long()
    critical = torch.zeros(*listed.shape[:3], blocks + 1, dtype=torch.bool, device=q.device).scatter(-1, listed, True)
    tiles = critical[..., :blocks], unpack_bits(plan.linear_bits, blocks, backend="reference")
    assert not (tiles[0] & tiles[1]).any(), "no tile is in both classes"
    valid = torch.full((len(q),), tokens, device=q.device) if kv_len is None else kv_len
    is_key = (torch.arange(tokens, device=q.device) < valid[:, None])[:, None, None]
    critical, marginal = (
        classes.repeat_interleave(plan.block, 2).repeat_interleave(plan.block, 3)[..., :tokens, :tokens] & is_key
        for classes in tiles
    )
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    exponentials = (scores - scores.amax(-1, keepdim=True).detach()).exp() * critical
    weights = torch.einsum("bihd,bjhd->bhij", *map(FEATURES[feature_map], (q, k))) * marginal
    sparse, linear = (x / torch.where((total := x.sum(-1, True)) > 0, total, 1) for x in (exponentials, weights))
    values = v.transpose(1, 2)
    return (sparse @ values + linear @ values @ weight.T).transpose(1, 2)


@every_case
@pytest.mark.parametrize("kv_len", [None, (300, 65)], ids=["every-key", "padding"])
def test_value_and_gradients_are_those_of_the_definition(case, kv_len):
    """Gradients are compared in float64 for q, k, v and the projection; the value is the same without gradients."""
    module = make_module(*case)
    kv_len = None if kv_len is None else torch.tensor(kv_len, dtype=torch.int32, device=DEVICE)
    leaves = [features(seed).requires_grad_() for seed in range(3)]
    out = module(*leaves, kv_len=kv_len)
    out.backward(do := features(3))
    with torch.no_grad():
        inferred, plan = module(*leaves, kv_len=kv_len), module.plan(*leaves[:2], kv_len=kv_len)
    exact_leaves = [x.detach().double().requires_grad_() for x in (*leaves, module.projection.weight)]
    exact = dense(*exact_leaves, plan, case[2], kv_len)
    exact.backward(do.double())
    for value in (out, inferred):
        torch.testing.assert_close(value.double(), exact, rtol=1e-4, atol=1e-5)
    for leaf, exact_leaf in zip((*leaves, module.projection.weight), exact_leaves, strict=True):
        bound = 1e-5 * max(1.0, exact_leaf.grad.abs().max().item())
        torch.testing.assert_close(leaf.grad.double(), exact_leaf.grad, rtol=1e-4, atol=bound)


def test_a_fresh_module_is_sparse_attention_alone():
    """Its projection is 0, and gets a gradient."""
    module = SparseLinearAttention(16, critical=0.2).to(DEVICE)
    q, k, v = (features(seed) for seed in range(3))
    out = module(q, k, v)
    torch.testing.assert_close(out, attention(q, k, v, module.plan(q, k)))
    out.sum().backward()
    assert module.projection.weight.grad.any()


@pytest.mark.parametrize("text_first", [True, False], ids=["text-first", "text-last"])
def test_text_attends_and_is_attended_to(text_first):
    """With a layout, text rows equal dense attention's."""
    module, layout = make_module(), TokenLayout(64, 266, 64, text_first)
    q, k, v = (features(seed) for seed in range(3))
    out = module(q, k, v, layout=layout)
    exact = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    text = slice(0, 64) if text_first else slice(266, 330)
    torch.testing.assert_close(out[:, text], exact[:, text], rtol=1e-4, atol=1e-5)


def test_autocast_computes_in_its_dtype():
    """float32 inputs are cast, the result is bfloat16, and gradients come back in float32."""
    module, leaves = make_module(), [features(seed).requires_grad_() for seed in range(3)]
    with torch.autocast(DEVICE, torch.bfloat16):
        out = module(*leaves)
        with torch.no_grad():
            inferred = module(*leaves)
    assert out.dtype == inferred.dtype == torch.bfloat16
    exact = module(*leaves)
    for value in (out, inferred):
        assert (value - exact).norm() < 0.02 * exact.norm()
    out.float().square().sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in (*leaves, module.projection.weight))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"critical": 1.2}, "critical must be between 0 and 1, got 1.2"),
        ({"critical": 0.6, "negligible": 0.6}, "critical and negligible must sum to at most 1"),
        ({"feature_map": "hedgehog"}, r"feature_map must be one of \('softmax', 'elu', 'relu'\), got 'hedgehog'"),
        ({"block": 32}, r"block must be one of \(64, 128\), got 32"),
        ({"backend": "cuda"}, r"backend must be one of \('auto', 'reference', 'triton'\), got 'cuda'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ShapeError, match=message):
        SparseLinearAttention(**({"head_dim": 16} | settings))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 330, 2, 8)}, r"q must have shape \[B, S, H, 16\], got \[2, 330, 2, 8\]"),
        ({"k": torch.zeros(2, 330, 1, 16)}, r"k must have shape \[2, 330, 2, 16\]"),
        ({"layout": TokenLayout(0, 330)}, "layout must have q's 330 tokens in blocks of 64, got 330 in blocks of 128"),
        ({"layout": TokenLayout(0, 300, 64)}, "layout must have q's 330 tokens in blocks of 64, got 300"),
    ],
)
def test_bad_arguments(change, message):
    change = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in change.items()}
    arguments = dict(zip("qkv", (features(seed) for seed in range(3)), strict=True))
    with pytest.raises(ShapeError, match=message):
        make_module()(**(arguments | change))


@pytest.mark.skipif(DEVICE == "cpu", reason="a GPU's host must not wait")
def test_the_host_never_waits():
    module, leaves = make_module(), [features(seed, dtype=torch.bfloat16).requires_grad_() for seed in range(3)]
    do = features(3, dtype=torch.bfloat16)
    module(*leaves).backward(do)  # compiles
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(*leaves).backward(do)
    finally:
        torch.cuda.set_sync_debug_mode(before)


class Block(torch.nn.Module):
    """A model's own code around SLA."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = make_module()
        self.to_qkv = torch.nn.Linear(32, 96, device=DEVICE)

    def forward(self, x: torch.Tensor, kv_len: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (3, 2, 16)).unbind(2)
        return x + self.attend(q, k, v, kv_len=kv_len).flatten(2)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_compiled_model_is_one_graph(training):
    """The compiled result equals the eager one bit for bit, with its gradients; another length compiles nothing new."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    block, graphs = Block(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=graphs)
    for tokens in (330, 200):
        x = features(0, tokens).flatten(2)
        kv_len = torch.tensor([tokens, 65], dtype=torch.int32, device=DEVICE)
        torch._dynamo.mark_dynamic(x, 1)
        results = []
        for model in (block, compiled):
            with torch.set_grad_enabled(training):
                outputs = [model(x, kv_len)]
                if training:
                    outputs += torch.autograd.grad(outputs[0].square().sum(), list(block.parameters()))
            results.append(outputs)
        for actual, expected in zip(*results, strict=True):
            assert torch.equal(actual, expected)
    assert graphs.frame_count == 1
