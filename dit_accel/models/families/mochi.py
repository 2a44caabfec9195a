"""Mochi: joint blocks, video first; text has a different width.

Attention runs over one sample after the other, each without its padding. Its schedule's noise levels run from 0 to 1.
"""

from torch import nn

from dit_accel.models.families.family import Arguments, BlockWork, Family, Load, OrderFacts, Stack, Tokens, video_tokens
from dit_accel.models.samples import TextMasks

_masks = TextMasks()  # diffusers reads them in every block


def tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    sizes, patch = arguments["hidden_states"].shape[2:], transformer.config.patch_size
    text = arguments["encoder_hidden_states"].shape[1]
    return video_tokens(sizes, (1, patch, patch), text, text_first=False, padding="sample")


def work(load: Load, block: nn.Module) -> BlockWork:
    """FLOPs with gated MLPs of 8/3 of the width; the last block returns no text."""
    tokens, width, batch, narrow = load.tokens, load.width, load.batch, load.transformer.config.pooled_projection_dim
    projection, of_text = 2 * batch * tokens.vision * width**2, 2 * batch * tokens.text * width * narrow
    gives_text, mlps = 0, 8 * projection
    if block.ff_context is not None:
        gives_text, mlps = of_text, mlps + 8 * 2 * batch * tokens.text * narrow**2
    lengths = _masks.lengths(load.arguments["encoder_attention_mask"]).lengths
    return BlockWork(
        tiles={"attn1": sum(4 * (tokens.vision + text) ** 2 * width for text in lengths)},
        rest=2 * (projection + of_text) + mlps,
        rows=2 * projection + of_text + gives_text,
        bias=projection + gives_text,
    )


FAMILY = Family(
    name="mochi",
    title="Mochi",
    model="MochiTransformer3DModel",
    stacks=(Stack("transformer_blocks"),),
    tokens=tokens,
    work=work,
    attentions={"attn1": True},
    parts=("attn1", "ff", "ff_context"),
    order=OrderFacts(tables={"rope": {0: 0, 1: 0}}, exit="norm_out"),  # tables [S, H, D / 2]
    makes="videos",
    frames_per_second=lambda _: 30.0,
    steps=64,
    unguided=1.0,
)
