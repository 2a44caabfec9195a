"""SpargeAttn's tiles: the kept mass, row by row, and the similarity test, by the paper's equations."""

import math

import pytest
import torch

from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.packing import unpack_bits
from dit_accel.kernels.plans.tile_masks import mask_from_plan
from dit_accel.presets import Skip
from dit_accel.sparse.policies import drawn, plan, policy_of
from tests.pairs import every_pair

TOKENS, HEADS, HEAD_DIM = 1000, 2, 32
TEXT = 150


@pytest.fixture(scope="module")
def queries_and_keys():
    """Two samples whose blocks of 64 tokens lie around directions of their own, and some around none.

    One block of each is zeros alone, one has a few tokens that are not, and keys of the second sample end early.
    """
    generator = torch.Generator().manual_seed(5)

    def clustered() -> torch.Tensor:
        direction = torch.randn(2, 16, HEADS, HEAD_DIM, generator=generator) * 1.5
        direction[:, 3] = direction[:, 9] = 0.0
        x = direction.repeat_interleave(64, 1)[:, :TOKENS]
        x = x + 0.4 * torch.randn(x.shape, generator=generator)
        x[:, 5 * 64 : 6 * 64] = 0.0
        x[:, 6 * 64 : 6 * 64 + 50] = 0.0
        return x

    return clustered(), clustered()


def cosine(x: torch.Tensor) -> float:
    """Mean over all pairs of tokens that are not 0; 1 without any."""
    x = x[x.norm(dim=-1) > 0]
    unit = x / x.norm(dim=-1, keepdim=True)
    return (unit @ unit.T).mean().item() if len(x) else 1.0


def naive_tiles(q, k, layout, config, key_end) -> torch.Tensor:
    """One head by the paper's equations, in float64: q, k ``[S, D]`` -> bool ``[T, T]``."""
    size, count = layout.block, layout.blocks
    queries = [q[i * size : (i + 1) * size].double() for i in range(count)]
    keys = [k[: max(key_end, 0)][j * size : (j + 1) * size].double() for j in range(count)]
    text = range(count)[layout.text_blocks]

    def is_fix(x: torch.Tensor) -> bool:
        return config.similarity is not None and cosine(x) < config.similarity

    fix, tiles = [is_fix(key) for key in keys], torch.zeros(count, count, dtype=torch.bool)
    for i in range(count):
        free = [j for j in range(count) if len(keys[j]) and not fix[j]]
        weights = {j: math.exp(queries[i].mean(0) @ keys[j].mean(0) / math.sqrt(HEAD_DIM)) for j in free}
        total, mass, kept = sum(weights.values()), 0.0, []
        for j in sorted(weights, key=weights.get, reverse=True):
            enough = len(kept) >= config.top_k * len(weights) - 1e-9 if config.top_k else mass >= 1 - config.tau_kv
            if kept and enough:
                break
            kept.append(j)
            mass += weights[j] / total
        kept = [j for j in weights if weights[j] >= min(map(weights.get, kept))]  # equal ones go or stay together
        whole = is_fix(queries[i]) or i in text
        kept = set(range(count)) if whole else {*kept, *text, *(j for j in range(count) if fix[j])}
        kept |= {0} if config.sinks else set()
        tiles[i, list(kept)] = True
    return tiles


SETTINGS = {
    "mass": Skip(policy="sparge", tau_kv=0.1),
    "mass-judged": Skip(policy="sparge", tau_kv=0.1, similarity=0.5),
    "top-k": Skip(policy="sparge", top_k=0.3),
    "top-k-judged-sinks": Skip(policy="sparge", top_k=0.3, similarity=0.5, sinks=True),
    "everything-judged-unlike": Skip(policy="sparge", tau_kv=0.5, similarity=1.0),
    "one-tile-a-row": Skip(policy="sparge", tau_kv=0.999),
}


@every_pair(config=SETTINGS, text=(0, TEXT), block=(64, 128))
def test_tiles_equal_the_papers_equations(queries_and_keys, config, text, block):
    """Selective compression by a loop over blocks, with a ragged tail, zero tokens and a sample that ends early."""
    q, k = queries_and_keys
    layout = TokenLayout(text, TOKENS - text, block, text_first=False)
    kv_len = torch.tensor([TOKENS, 700], dtype=torch.int32)
    symbols = drawn(q, k, config, layout=layout, kv_len=kv_len)
    assert unpack_bits(symbols.cache_bits, HEADS).all()
    tiles = unpack_bits(symbols.skip_bits, layout.blocks)
    for b, end in enumerate(kv_len.tolist()):
        valid = -(-end // block)  # a tile without a valid key attends to nothing, whatever its bit says
        for h in range(HEADS):
            expected = naive_tiles(q[b, :, h], k[b, :, h], layout, config, end)
            assert torch.equal(tiles[b, h, :, :valid], expected[:, :valid])


@pytest.mark.parametrize("tokens, block", [(300, 64), (300, 128), (256, 128), (65, 64)])
def test_a_plan_attends_to_the_pairs_of_its_tiles(queries_and_keys, tokens, block):
    q, k = (x[:, 400 : 400 + tokens] for x in queries_and_keys)
    layout = TokenLayout(0, tokens, block)
    config = Skip(policy="sparge", top_k=0.5, similarity=0.5)
    tiles = unpack_bits(drawn(q, k, config, layout=layout).skip_bits, layout.blocks)
    expected = tiles.repeat_interleave(block, 2).repeat_interleave(block, 3)[:, :, :tokens, :tokens]
    assert torch.equal(mask_from_plan(plan(q, k, config, layout=layout)), expected)


def test_plan_needs_nothing_but_queries_and_keys(queries_and_keys):
    """Without a layout all tokens count equally and blocks have 128 tokens."""
    q, k = queries_and_keys
    config = Skip(policy="sparge", tau_kv=0.2)
    lowered, explicit = plan(q, k, config), plan(q, k, config, layout=TokenLayout(0, TOKENS, 128))
    assert lowered.block == 128 and torch.equal(lowered.kv_count, explicit.kv_count)
    assert (plan(q, k, Skip()).kv_count == lowered.blocks).all()


def test_ramp_grows_what_is_left_out():
    """At growth 0 nothing is skipped, at 1 as much as the section says; shares of SLA stay as trained."""

    def ramped(growth, config):
        return policy_of(config).ramped(config, growth)

    mass, share = Skip(policy="sparge", tau_kv=0.2), Skip(policy="sparge", top_k=0.2)
    assert [ramped(growth, mass).tau_kv for growth in (0.0, 0.5, 1.0)] == [0.0, 0.1, 0.2]
    assert [ramped(growth, share).top_k for growth in (0.0, 0.5, 1.0)] == [1.0, 0.6, 0.2]
    sla = Skip(policy="sla", critical=0.1)
    assert ramped(0.5, sla) is sla
