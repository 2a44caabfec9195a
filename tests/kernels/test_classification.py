"""The three classes of each row: their sizes, their order, and the bits of every backend."""

import pytest
import torch

from dit_accel.kernels import classify_tiles, pack_bits, unpack_bits

NO_BLOCKS = slice(0, 0)
CASES = {  # blocks, critical, negligible, always, valid_blocks
    "paper": (40, 0.05, 0.10, NO_BLOCKS, None),
    "single-block": (1, 0.05, 0.10, NO_BLOCKS, None),
    "halves-round-up": (10, 0.25, 0.25, NO_BLOCKS, None),
    "text-first": (19, 0.2, 0.3, slice(0, 3), None),
    "text-last-and-padding": (19, 0.2, 0.3, slice(17, 19), (18, 7)),
    "no-valid-key": (9, 0.5, 0.5, NO_BLOCKS, (0, 1)),
    "nothing-critical": (9, 0.0, 0.4, NO_BLOCKS, None),
    "all-critical": (9, 1.0, 0.0, NO_BLOCKS, (9, 4)),
    "all-negligible": (9, 0.0, 1.0, NO_BLOCKS, None),
    "all-marginal": (9, 0.0, 0.0, NO_BLOCKS, (5, 9)),
}


def pooled(blocks: int) -> torch.Tensor:
    """A map of two samples and two heads with many equal probabilities, zeros among them."""
    probabilities = torch.randn(2, 2, blocks, blocks, generator=torch.Generator().manual_seed(0)).softmax(-1)
    return (probabilities * 32).round() / 32


def classes_by_definition(row, i, critical, negligible, always, valid):
    """Critical and marginal columns of one row, by sorting it."""
    text = set(range(len(row))[always])
    candidates = sorted(set(range(valid)) - text, key=lambda j: (-row[j], j))
    if i in text:
        return set(range(valid)), set()
    count = len(candidates)
    most = min(max(int(critical * count + 0.5), 1), count) if critical else 0
    least = min(int(negligible * count + 0.5), count - most)
    return set(candidates[:most]) | (text & set(range(valid))), set(candidates[most : count - least])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_fall_into_classes_by_rank(case, backend, device):
    """The highest are critical and the lowest negligible, the earlier first where they are equal; text is critical."""
    blocks, critical, negligible, always, valid_blocks = case
    probabilities = pooled(blocks)
    valid = (blocks, blocks) if valid_blocks is None else valid_blocks
    lengths = None if valid_blocks is None else torch.tensor(valid_blocks, dtype=torch.int32, device=device)
    options = {"always": always, "valid_blocks": lengths, "backend": backend}
    bits = classify_tiles(probabilities.to(device), critical, negligible, **options)
    classes = [unpack_bits(bits_of_class.cpu(), blocks) for bits_of_class in bits]
    assert all(map(torch.equal, map(pack_bits, classes), [item.cpu() for item in bits]))  # 0 beyond the last block
    for b, h, i in torch.ones(probabilities.shape[:3]).nonzero().tolist():
        row = probabilities[b, h, i].tolist()
        expected = classes_by_definition(row, i, critical, negligible, always, valid[b])
        assert tuple(set(tiles[b, h, i].nonzero().flatten().tolist()) for tiles in classes) == expected
