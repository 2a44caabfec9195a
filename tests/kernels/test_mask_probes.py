"""The mask that attention applies, read from its output: pair by pair that which the plan stands for.

All scores are equal and value j is the j-th unit vector, head_dim keys at a time, so a query's output is 1 / n at each
of the n keys it attends to and 0 elsewhere. On a GPU each backend that takes masks is probed.
"""

import pytest
import torch

from dit_accel.kernels import attention, backend_status, lower
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.plans.tile_masks import mask_from_plan, plan_from_mask
from dit_accel.presets import Skip
from dit_accel.sparse.policies import plan as draw_plan
from dit_accel.sparse.policies import static
from tests.kernels.conftest import DEVICE
from tests.kernels.random_tiles import RANDOM, random_tiles

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # numpy on the log of an empty sum

HEADS = 2
HAS_GPU = DEVICE == "cuda"
DTYPES = (torch.float16, torch.bfloat16) if HAS_GPU else (torch.float16,)  # the interpreter's bfloat16 is wrong
MASKED_BACKENDS = [name for name in ("reference", "triton") if backend_status()[name] == "ok"]
KERNELS = [
    pytest.param(backend, dtype, head_dim, id=f"{backend}-{str(dtype).removeprefix('torch.')}-{head_dim}")
    for backend in MASKED_BACKENDS
    for dtype in DTYPES
    for head_dim in ((64, 128) if HAS_GPU else (128,))
    if backend != "reference" or (dtype, head_dim) == (torch.float16, 128)
]
LENGTHS = (65, 300, 1000) if HAS_GPU else (1, 65, 300)


def parts(tokens: int) -> list[int]:
    """Three segments whose ends are not block boundaries, if there are enough tokens."""
    return [tokens] if tokens < 3 else [tokens // 4, tokens // 2, tokens - tokens // 4 - tokens // 2]


def any_mask(tokens: int, **options):
    """Half the pairs, other ones in each head, and queries without a key."""
    mask = torch.rand(1, HEADS, tokens, tokens, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[:, :, 1::9] = False
    return plan_from_mask(mask.to(DEVICE), block=options["block"])


PATTERNS = {
    "causal": lambda tokens, **options: lower(static.causal(tokens, **options)),
    "documents": lambda tokens, **options: lower(static.documents(parts(tokens), **options)),
    "interleaved": lambda tokens, **options: lower(
        static.interleaved(parts(tokens), [True, False, True][: len(parts(tokens))], **options)
    ),
    "sliding": lambda tokens, **options: lower(static.sliding(tokens, 50, **options)),
    "full-partial": lambda tokens, **options: lower(random_tiles(tokens, RANDOM["full/partial"], **options)),
    "full-causal-partial": lambda tokens, **options: lower(
        random_tiles(tokens, RANDOM["full/causal/partial"], **options)
    ),
    "any-mask": any_mask,
}


def weights(plan, backend: str, dtype: torch.dtype, head_dim: int, scale: float = 0.0) -> torch.Tensor:
    """The attention probability of each pair, ``[B, H, S, S]``; with ``scale`` queries and keys are that far from 0."""
    shape = (plan.batch, plan.tokens, plan.heads, head_dim)
    generator = torch.Generator().manual_seed(1)
    q, k = ((torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype) for _ in range(2))
    columns = []
    for first in range(0, plan.tokens, head_dim):
        value = torch.eye(plan.tokens, device=DEVICE, dtype=dtype)[:, first : first + head_dim]
        value = torch.nn.functional.pad(value, (0, head_dim - value.shape[1]))
        v = value[None, :, None].expand(shape).contiguous()
        columns.append(attention(q, k, v, plan, backend=backend).transpose(1, 2))
    return torch.cat(columns, -1)[..., : plan.tokens].float()


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize(("backend", "dtype", "head_dim"), KERNELS)
def test_output_shows_the_mask(backend, dtype, head_dim, pattern, block):
    """For every length, ragged ones among them."""
    in_interpreter = backend == "triton" and not HAS_GPU  # which is slow: two blocks
    for tokens in (block + 36,) if in_interpreter else LENGTHS:
        plan = pattern(tokens, block=block, heads=HEADS, device=DEVICE)
        mask = mask_from_plan(plan)
        actual = weights(plan, backend, dtype, head_dim)
        assert torch.equal(actual > 0, mask)
        expected = mask / mask.sum(-1, keepdim=True).clamp(min=1)
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=0)


POLICIES = {
    "sparge": Skip(policy="sparge", tau_kv=0.5),
    "sparge-top-k": Skip(policy="sparge", top_k=0.4),
    "sla": Skip(policy="sla", critical=0.3, negligible=0.3),
    "fg_attn": Skip(policy="fg_attn", key_threshold=8.0),
    "static-causal": Skip(policy="static", pattern="causal"),
    "static-sliding": Skip(policy="static", window=100),
}
LAYOUTS = {
    "block-64": TokenLayout(0, 330, 64),
    "text": TokenLayout(70, 130, 64),
    "block-128": TokenLayout(0, 330, 128),
}


DRAWN = [
    pytest.param(backend, layout, id=f"{backend}-{name}")
    for backend in MASKED_BACKENDS
    for name, layout in LAYOUTS.items()
    if HAS_GPU or backend == "reference" or name == "text"
]


@pytest.mark.parametrize("config", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize(("backend", "layout"), DRAWN)
def test_output_shows_what_a_policy_drew(backend, layout, config):
    """Every policy skips pairs, and attention skips exactly these."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, layout.tokens, 1, 128, generator=generator).to(DEVICE, torch.float16) for _ in range(2))
    plan = draw_plan(q, k, config, layout=layout)
    mask = mask_from_plan(plan)
    assert mask.any(-1).all() and not mask.all()
    actual = weights(plan, backend, torch.float16, 128)
    assert torch.equal(actual > 0, mask)
