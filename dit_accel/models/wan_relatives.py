"""Transformers with Wan's blocks, known by facts alone: VACE, Animate and SkyReels-V2.

VACE's own blocks make hints for Wan's, in a sequence of the same length. Their inputs mix both sequences, and Animate's
face adapters between the blocks read tokens frame by frame, so tokens keep their order in both.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from dit_accel.models import wan
from dit_accel.models.family import Arguments, BlockWork, Stack, Tokens, batch_of, width_of

PARTS = ("attn1", "attn2", "ffn")


def vace_work(transformer: nn.Module, arguments: Arguments, tokens: Tokens, block: nn.Module) -> BlockWork:
    """A block that makes hints has a projection at its exit, and the first one another at its entrance."""
    work = wan.work(transformer, arguments, tokens, block)
    has_exit = getattr(block, "proj_out", None) is not None
    projection = 2 * batch_of(arguments) * tokens.vision * width_of(transformer) ** 2
    return replace(work, rest=work.rest + has_exit * projection)


VACE = replace(
    wan.FAMILY,
    name="wan_vace",
    title="Wan VACE",
    model="WanVACETransformer3DModel",
    stacks=(Stack("vace_blocks", features=4), Stack("blocks", features=3)),
    work=vace_work,
    parts=(*PARTS, "proj_in", "proj_out"),
    order=None,
)
ANIMATE = replace(
    wan.FAMILY,
    name="wan_animate",
    title="Wan Animate",
    model="WanAnimateTransformer3DModel",
    parts=PARTS,
    order=None,
    names_transformer=False,
)
SKYREELS_V2 = replace(
    wan.FAMILY,
    name="skyreels_v2",
    title="SkyReels-V2",
    model="SkyReelsV2Transformer3DModel",
    parts=PARTS,
    used=lambda _, output, __: output,  # diffusion forcing has timesteps of frames, and runs plainly
    order=replace(wan.FAMILY.order, tables={"rope": {0: 1, 1: 1}}),
    names_transformer=False,
)
