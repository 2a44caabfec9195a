"""Token layout: place of text in the joint sequence, and the sequence's blocks."""

from dataclasses import dataclass

from dit_accel.errors import ShapeError

BLOCK_SIZES = (64, 128)
Grid = tuple[int, int, int]  # tokens of a video along frames, height and width


def block_count(tokens: int, block: int) -> int:
    """Number of token blocks, the last of which may be ragged: ``ceil(tokens / block)``."""
    return -(-tokens // block)


@dataclass(frozen=True)
class TokenLayout:
    """One joint attention sequence of ``text + vision`` tokens, cut into blocks of ``block`` tokens.

    A block of the joint sequence may hold text *and* vision tokens; it counts as text, whose rows always compute.
    """

    text: int  # tokens, may be 0
    vision: int  # tokens: latents, and reference tokens after them
    block: int = 128  # tokens in a block, 64 or 128
    text_first: bool = True  # text precedes vision (FLUX); False: it follows (HunyuanVideo)
    grid: Grid | None = None  # of a video's vision tokens

    def __post_init__(self) -> None:
        if self.block not in BLOCK_SIZES:
            raise ShapeError(f"block must be one of {BLOCK_SIZES}, got {self.block}")
        if self.text < 0 or self.vision < 1:
            raise ShapeError(f"a layout needs text >= 0 and vision >= 1, got text={self.text}, vision={self.vision}")

    @property
    def tokens(self) -> int:
        return self.text + self.vision

    @property
    def blocks(self) -> int:
        return block_count(self.tokens, self.block)

    @property
    def vision_start(self) -> int:
        """Index of the first vision token."""
        return self.text if self.text_first else 0

    @property
    def text_blocks(self) -> slice:
        """Blocks that hold at least one text token."""
        if self.text_first:
            return slice(0, block_count(self.text, self.block))
        return slice(self.vision // self.block if self.text else self.blocks, self.blocks)

    @property
    def vision_blocks(self) -> slice:
        """Blocks that hold vision tokens only."""
        text = self.text_blocks
        return slice(text.stop, self.blocks) if self.text_first else slice(0, text.start)
