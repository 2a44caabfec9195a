"""SpargeAttn's tiles: the kept mass, row by row, the similarity test, and the resulting attention."""

import math
from itertools import pairwise

import pytest
import torch

from dit_accel.kernels import attention
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.plans.packing import unpack_bits
from dit_accel.presets import Skip
from dit_accel.sparse.policies import draw, plan, policy_of
from dit_accel.sparse.policies.sparge import tile_bits
from tests.pairs import every_pair

BLOCK = 64
NO_TEXT = TokenLayout(0, 800, BLOCK)  # 13 blocks
LAYOUTS = {
    "no-text": NO_TEXT,
    "text-first": TokenLayout(100, 700, BLOCK),
    "text-last": TokenLayout(100, 700, BLOCK, text_first=False),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
ROUNDING = 13 * 2**-30  # masses are counted in units of 2^-30, rounded up


def pooled(layout: TokenLayout, sharpness: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, layout.blocks, layout.blocks, generator=generator).mul(sharpness).softmax(-1)


def tile_mask(probabilities: torch.Tensor, layout: TokenLayout, tau_kv: float) -> torch.Tensor:
    return unpack_bits(tile_bits(probabilities, layout, tau_kv), layout.blocks)


def kept_by_definition(row: list[float], tau_kv: float) -> set[int]:
    """Keep tiles from the largest down until the mass reaches 1 − tau_kv."""
    kept, mass = set(), 0.0
    for j in sorted(range(len(row)), key=lambda j: -row[j]):
        if kept and mass >= (1 - tau_kv) * sum(row):
            break
        kept.add(j)
        mass += row[j]
    return kept


@pytest.mark.parametrize("tau_kv", [0.05, 0.15, 0.5, 0.9])
@every_layout
def test_tiles_are_kept_until_their_mass_suffices(layout, tau_kv):
    """Each row keeps its largest tiles until they reach 1 − tau_kv; tiles in text rows and columns are all kept."""
    probabilities = pooled(layout)
    tiles = tile_mask(probabilities, layout, tau_kv)
    indices = range(layout.blocks)
    text = set(indices[layout.text_blocks])
    for b in range(2):
        for h in range(3):
            for i in indices:
                row = probabilities[b, h, i].double().tolist()
                expected = set(indices) if i in text else kept_by_definition(row, tau_kv) | text
                assert set(tiles[b, h, i].nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize("tau_kv", [0.05, 0.15, 0.5])
def test_kept_mass_reaches_its_share_and_no_tile_is_spare(tau_kv):
    """The kept mass is at least 1 − tau_kv, and without its smallest tile it is not."""
    probabilities = pooled(NO_TEXT)
    tiles = tile_mask(probabilities, NO_TEXT, tau_kv)
    mass = (probabilities.double() * tiles).sum(-1)
    smallest = probabilities.double().masked_fill(~tiles, 2.0).amin(-1)
    total = probabilities.double().sum(-1)
    assert (mass >= (1 - tau_kv) * total - ROUNDING).all()
    assert (mass - smallest < (1 - tau_kv) * total + ROUNDING).all()


@pytest.mark.parametrize("tau_kv", [0.5, 0.999, 1.0])
def test_every_row_keeps_a_tile(tau_kv):
    """A computed row has at least its largest tile, at any threshold."""
    probabilities = pooled(NO_TEXT, sharpness=8.0)
    tiles = tile_mask(probabilities, NO_TEXT, tau_kv)
    assert tiles.gather(-1, probabilities.argmax(-1, keepdim=True)).all()


@pytest.mark.parametrize("sharpness", [1.0, 6.0], ids=["flat", "peaked"])
def test_threshold_0_keeps_every_tile_of_positive_mass(sharpness):
    """A row that may lose nothing loses nothing, however small a tile is."""
    probabilities = pooled(NO_TEXT, sharpness)
    assert tile_mask(probabilities, NO_TEXT, 0.0)[probabilities > 0].all()


def test_larger_threshold_keeps_no_more():
    """Tiles dropped at a threshold are dropped at every larger one."""
    probabilities = pooled(NO_TEXT)
    tiles = [tile_mask(probabilities, NO_TEXT, tau / 10) for tau in range(10)]
    assert all((large <= small).all() for small, large in pairwise(tiles))
    assert tiles[1].sum() > tiles[5].sum()


# From queries and keys

TOKENS, HEADS, HEAD_DIM = 1000, 2, 32
TEXT = 150


@pytest.fixture(scope="module")
def qkv():
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

    return clustered(), clustered(), torch.randn(2, TOKENS, HEADS, HEAD_DIM, generator=generator)


def cosine(x: torch.Tensor) -> float:
    """Mean over all pairs of tokens that are not 0; 1 without any."""
    x = x[x.norm(dim=-1) > 0]
    unit = x / x.norm(dim=-1, keepdim=True)
    return (unit @ unit.T).mean().item() if len(x) else 1.0


def naive_tiles(q, k, layout, config, key_end, causal) -> torch.Tensor:
    """One head by the paper's equations, in float64: q, k ``[S, D]`` -> bool ``[T, T]``."""
    size, count = layout.block, layout.blocks
    queries = [q[i * size : (i + 1) * size].double() for i in range(count)]
    keys = [k[: max(key_end, 0)][j * size : (j + 1) * size].double() for j in range(count)]
    text = range(count)[layout.text_blocks]

    def is_fix(x: torch.Tensor) -> bool:
        return config.similarity is not None and cosine(x) < config.similarity

    fix = [is_fix(key) for key in keys]
    tiles = torch.zeros(count, count, dtype=torch.bool)
    for i in range(count):
        past = range(i + 1) if causal else range(count)
        weights = {
            j: math.exp(queries[i].mean(0) @ keys[j].mean(0) / math.sqrt(HEAD_DIM))
            for j in past
            if len(keys[j]) and not fix[j]
        }
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
        kept = ({j for j in kept if j <= i} | {i}) if causal else kept
        tiles[i, list(kept)] = True
    return tiles


SETTINGS = {
    "mass": Skip(policy="sparge", tau_kv=0.1),
    "mass-judged": Skip(policy="sparge", tau_kv=0.1, similarity=0.5),
    "top-k": Skip(policy="sparge", top_k=0.3),
    "top-k-judged-sinks": Skip(policy="sparge", top_k=0.3, similarity=0.5, sinks=True),
    "everything-judged-unlike": Skip(policy="sparge", tau_kv=0.5, similarity=1.0),
}


@every_pair(config=SETTINGS, text=(0, TEXT), block=(64, 128), causal=(False, True))
def test_tiles_equal_the_papers_equations(qkv, config, text, block, causal):
    """Selective compression by a loop over blocks, with a ragged tail, zero tokens and a sample that ends early."""
    q, k, _ = qkv
    layout = TokenLayout(text, TOKENS - text, block, text_first=False)
    lengths = [TOKENS, 700]
    symbols = draw(q, k, layout, config, kv_len=torch.tensor(lengths, dtype=torch.int32), causal=causal)
    assert unpack_bits(symbols.cache_bits, HEADS).all()
    tiles = unpack_bits(symbols.skip_bits, layout.blocks)
    for b, end in enumerate(lengths):
        valid = -(-end // block)  # a tile without a valid key attends to nothing, whatever its bit says
        for h in range(HEADS):
            expected = naive_tiles(q[b, :, h], k[b, :, h], layout, config, end, causal)
            assert torch.equal(tiles[b, h, :, :valid], expected[:, :valid])


def test_zero_tokens_are_no_reason_to_compute(qkv):
    """Blocks of zeros, and of few other tokens that are alike, are as dispensable as any; those without direction not.

    Zero queries attend to all keys alike, so none of theirs is left out before another.
    """
    q, k, _ = qkv
    layout = TokenLayout(0, TOKENS, 64)
    tiles = unpack_bits(draw(q, k, layout, Skip(policy="sparge", top_k=0.2, similarity=0.5)).skip_bits, layout.blocks)
    rows, columns = tiles.all(-1), tiles.all(-2)
    assert rows[:, :, [3, 5, 9]].all() and columns[:, :, [3, 9]].all()
    assert not rows[:, :, 6].any() and not columns[:, :, [5, 6]].any()


def test_judged_columns_do_not_crowd_out_others(qkv):
    """A key block with most of a row's mass would leave no others; dissimilar, it does not count in any row."""
    q, k, _ = (x[:1].clone() for x in qkv)
    k[:, 3 * 64 : 4 * 64] += 8 * torch.nn.functional.normalize(q.mean(1, keepdim=True), dim=-1)
    noise = torch.randn(k[:, 3 * 64 : 4 * 64].shape, generator=torch.Generator().manual_seed(1))
    k[:, 3 * 64 : 4 * 64] += 12 * noise
    layout = TokenLayout(0, TOKENS, 64)
    kept = [
        unpack_bits(draw(q, k, layout, Skip(policy="sparge", tau_kv=0.1, similarity=theta)).skip_bits, layout.blocks)
        for theta in (None, 0.5)
    ]
    like = [i for i in range(layout.blocks) if i not in (3, 9)]
    assert kept[1][..., 3].all()
    assert kept[1][:, :, like].sum() > kept[0][:, :, like].sum()


def attended_pairs(q, k, lowered, **options) -> torch.Tensor:
    """Attended pairs, bool ``[B, H, S, S]``, read from outputs for values that are one-hot in the key's position."""
    batch, tokens, heads, _ = q.shape
    parts = []
    for start in range(0, tokens, HEAD_DIM):
        probe = torch.eye(tokens)[:, start : start + HEAD_DIM]
        probe = torch.nn.functional.pad(probe, (0, HEAD_DIM - probe.shape[1]))
        values = probe[None, :, None].expand(batch, -1, heads, -1)
        parts.append(attention(q, k, values, lowered, **options))
    return (torch.cat(parts, -1)[..., :tokens] > 0).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
@pytest.mark.parametrize("tokens, block", [(300, 64), (300, 128), (256, 128), (65, 64)])
def test_attention_is_to_the_pairs_of_the_tiles(qkv, tokens, block, causal):
    """Element by element, at ragged lengths: a pair attends iff its tile computes, and comes no later if causal."""
    q, k, _ = (x[:, 400 : 400 + tokens] for x in qkv)
    layout = TokenLayout(0, tokens, block)
    config, kv_len = Skip(policy="sparge", top_k=0.5, similarity=0.5), torch.tensor([tokens, 50], dtype=torch.int32)
    options = {"layout": layout, "kv_len": kv_len, "causal": causal}
    pairs = attended_pairs(q / 4, k / 4, plan(q, k, config, **options), kv_len=kv_len)
    tiles = unpack_bits(draw(q, k, config=config, **options).skip_bits, layout.blocks)
    expected = tiles.repeat_interleave(block, 2).repeat_interleave(block, 3)[:, :, :tokens, :tokens]
    expected = expected & (torch.arange(tokens) < kv_len[:, None, None, None])
    assert torch.equal(pairs, expected.tril() if causal else expected)


def test_plan_needs_nothing_but_queries_and_keys(qkv):
    """Without a layout all tokens count equally and blocks have 128 tokens."""
    q, k, _ = qkv
    lowered = plan(q, k, Skip(policy="sparge", tau_kv=0.2))
    assert (lowered.tokens, lowered.block) == (TOKENS, 128)
    explicit = plan(q, k, Skip(policy="sparge", tau_kv=0.2), layout=TokenLayout(0, TOKENS, 128))
    assert torch.equal(lowered.kv_count, explicit.kv_count)
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
