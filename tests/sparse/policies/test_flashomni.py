"""FlashOmni's rows: equation 1 block by block, and decisions that do not depend on the threshold."""

import pytest
import torch

from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.packing import unpack_bits
from dit_accel.sparse.policies.flashomni import row_bits

BLOCK = 64
TEXT_FIRST = TokenLayout(100, 700, BLOCK)  # 13 blocks, of which 2 are text
LAYOUTS = {
    "text-first": TEXT_FIRST,
    "text-last": TokenLayout(100, 700, BLOCK, text_first=False),
    "one-vision-block": TokenLayout(128, 64, BLOCK),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def pooled(layout: TokenLayout, *, batch: int = 2, heads: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, heads, layout.blocks, layout.blocks, generator=generator).mul(2).softmax(-1)


def row_mask(probabilities: torch.Tensor, layout: TokenLayout, tau: float) -> torch.Tensor:
    """bool ``[B, H, T]``."""
    return unpack_bits(row_bits(probabilities, layout, tau), probabilities.shape[1]).transpose(1, 2)


def reused_by_equation_1(probabilities: torch.Tensor, layout: TokenLayout, tau: float) -> tuple[set[int], set[int]]:
    """Blocks that contribution to text, and that guidance from text, would reuse in one head's float64 ``[T, T]``."""
    indices = range(layout.blocks)
    text, vision = indices[layout.text_blocks], indices[layout.vision_blocks]
    contribution = {i: sum(float(probabilities[j, i]) for j in text) for i in vision}
    guidance = dict.fromkeys(vision, 0.0)
    for j in text:
        column = torch.stack([probabilities[i, j] for i in vision]).exp()
        for i, share in zip(vision, column / column.sum(), strict=True):
            guidance[i] += float(share)

    def lowest(scores: dict[int, float]) -> set[int]:
        chosen, running = set(), 0.0
        for i in sorted(scores, key=scores.get):
            running += scores[i]
            if running <= tau * sum(scores.values()):
                chosen.add(i)
        return chosen

    return lowest(contribution), lowest(guidance)


@pytest.mark.parametrize("tau", [0.0, 0.1, 0.35, 0.5, 0.8])
@every_layout
def test_block_is_reused_iff_both_scores_agree(layout, tau):
    """A vision block is reused iff its running sums of contribution *and* of guidance stay within tau, in each head."""
    probabilities = pooled(layout)
    rows = row_mask(probabilities, layout, tau)
    for b in range(2):
        for h in range(3):
            contribution, guidance = reused_by_equation_1(probabilities[b, h].double(), layout, tau)
            assert set((~rows[b, h]).nonzero().flatten().tolist()) == contribution & guidance


def reused_by_received_mass(probabilities: torch.Tensor, tau: float) -> set[int]:
    """Blocks of one head's float64 ``[T, T]`` to which the others attend least; never the one they attend to most."""
    received = {i: sum(float(row[i]) for row in probabilities) for i in range(len(probabilities))}
    chosen, running = set(), 0.0
    for i in sorted(received, key=received.get)[:-1]:
        running += received[i]
        if running <= tau * sum(received.values()):
            chosen.add(i)
    return chosen


@pytest.mark.parametrize("tau", [0.0, 0.1, 0.5, 0.8, 1.0])
@pytest.mark.parametrize(
    "batch, heads, blocks", [(2, 3, 13), (2, 9, 4), (1, 1, 1)], ids=["more-blocks", "more-heads", "one-block"]
)
def test_without_text_blocks_that_receive_least_attention_are_reused(batch, heads, blocks, tau):
    """Each head separately, in order of the attention received, while the running sum stays within tau."""
    layout = TokenLayout(0, BLOCK * blocks - 7, BLOCK)
    probabilities = pooled(layout, batch=batch, heads=heads)
    rows = row_mask(probabilities, layout, tau)
    for b in range(batch):
        for h in range(heads):
            expected = reused_by_received_mass(probabilities[b, h].double(), tau)
            assert set((~rows[b, h]).nonzero().flatten().tolist()) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU can be waited for")
@pytest.mark.parametrize("layout", [TEXT_FIRST, TokenLayout(0, 700, BLOCK)], ids=["text", "no-text"])
def test_rows_are_chosen_without_waiting_for_the_gpu(layout):
    """The choice can be captured in a CUDA graph, which a synchronisation would break."""
    probabilities = pooled(layout).cuda()
    expected = row_bits(probabilities, layout, 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bits = row_bits(probabilities, layout, 0.5)
    graph.replay()
    assert torch.equal(bits, expected)
