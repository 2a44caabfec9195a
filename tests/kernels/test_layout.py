"""Token layout: blocks, ragged tails, and the seam between text and vision."""

import pytest

from dit_accel.errors import ShapeError
from dit_accel.kernels.layout import TokenLayout


@pytest.mark.parametrize("text_first", [True, False], ids=["text-first", "text-last"])
@pytest.mark.parametrize("text, vision", [(0, 200), (64, 64), (64, 63), (37, 132), (70, 1), (128, 256), (9, 9)])
def test_blocks_are_text_if_they_hold_any(text, vision, text_first):
    """Text blocks have at least one text token, vision blocks none, and together they are all blocks."""
    layout = TokenLayout(text, vision, block=64, text_first=text_first)
    is_text = [True] * text + [False] * vision if text_first else [False] * vision + [True] * text
    blocks = [is_text[start : start + 64] for start in range(0, len(is_text), 64)]
    indices = range(layout.blocks)
    assert layout.blocks == len(blocks)
    assert list(indices[layout.text_blocks]) == [i for i in indices if any(blocks[i])]
    assert list(indices[layout.vision_blocks]) == [i for i in indices if not any(blocks[i])]
    assert is_text[layout.vision_start] is False
    assert not any(is_text[layout.vision_start : layout.vision_start + vision])


@pytest.mark.parametrize(
    "arguments, complaint",
    [({"block": 96}, r"must be one of \(64, 128\), got 96"), ({"text": -1}, "text=-1"), ({"vision": 0}, "vision=0")],
    ids=["block", "text", "vision"],
)
def test_impossible_layout_is_refused(arguments, complaint):
    with pytest.raises(ShapeError, match=complaint):
        TokenLayout(**{"text": 3, "vision": 5, **arguments})
