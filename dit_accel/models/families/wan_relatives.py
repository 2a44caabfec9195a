"""Transformers with Wan's blocks but without hand-written ones: VACE, Animate and SkyReels-V2.

VACE's own blocks compute hints for Wan's blocks, in a sequence of the same length. Their inputs mix both sequences, and
Animate's face adapters between the blocks read tokens frame by frame, so tokens keep their order in both models. They
also keep it under SkyReels-V2's diffusion forcing and causal masks, which work by frames.
"""

from dataclasses import replace

from torch import nn

from dit_accel.models.families import wan
from dit_accel.models.families.family import Arguments, BlockWork, Load, Stack, Tokens, part_of

PARTS = ("attn1", "attn2", "ffn")


def vace_work(load: Load, block: nn.Module) -> BlockWork:
    """FLOPs of a block; a block for hints adds an output projection, and the first of them an input projection."""
    work = wan.work(load, block)
    projections = sum(part_of(block, name) is not None for name in ("proj_in", "proj_out"))
    return replace(work, rest=work.rest + projections * 2 * load.batch * load.tokens.vision * load.width**2)


def skyreels_tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    """Tokens of the video; no grid if each frame has its own timestep, or attends to earlier frames only."""
    by_frames = arguments.get("enable_diffusion_forcing") or transformer.config.num_frame_per_block > 1
    found = wan.tokens(transformer, arguments)
    return replace(found, grid=None) if by_frames else found


RELATIVE = replace(wan.FAMILY, parts=PARTS, order=None, distilled={}, sharing=(), fused=None)
VACE = replace(
    RELATIVE,
    name="wan_vace",
    title="Wan VACE",
    model="WanVACETransformer3DModel",
    stacks=(Stack("vace_blocks", features=4), Stack("blocks", features=3)),
    work=vace_work,
    parts=(*PARTS, "proj_in", "proj_out"),
    words=("vace",),
)
ANIMATE = replace(
    RELATIVE,
    name="wan_animate",
    title="Wan Animate",
    model="WanAnimateTransformer3DModel",
    names_transformer=False,
    frames_per_second=lambda _: 30.0,
    words=("wan22animate", "wananimate"),
    steps=20,
)
SKYREELS_V2 = replace(
    RELATIVE,
    name="skyreels_v2",
    title="SkyReels-V2",
    model="SkyReelsV2Transformer3DModel",
    tokens=skyreels_tokens,
    used=lambda _, output, __: output,  # diffusion forcing has a timestep per frame
    order=replace(wan.FAMILY.order, tables={"rope": {0: 1, 1: 1}}),
    names_transformer=False,
    frames_per_second=lambda _: 24.0,
    words=("skyreelsv2",),
)
FAMILIES = (VACE, ANIMATE, SKYREELS_V2)
