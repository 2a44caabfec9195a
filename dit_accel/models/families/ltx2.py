"""LTX-2: blocks of a video and an audio stream. Each has the parts of LTX-Video's blocks, and attends to the other.

The video's self-attention takes nearly all of the time; only there tiles are skipped.
"""

from dataclasses import replace

from torch import nn

from dit_accel.models.families import ltx
from dit_accel.models.families.family import BlockWork, Load, Stack

PARTS = ltx.FAMILY.parts


def work(load: Load, block: nn.Module) -> BlockWork:
    """FLOPs of both streams, and of the attention between them, which has the audio stream's width."""
    audio, prompt = (load.arguments[name].shape[1] for name in ("audio_hidden_states", "encoder_hidden_states"))
    video = load.tokens.vision
    width, audio_width = block.attn1.inner_dim, block.audio_attn1.inner_dim
    of_audio = load.beside_prompt("audio_attn1", audio, prompt, audio_width, 8)
    between = 2 * 4 * load.batch * audio_width * (video * width + audio * audio_width + video * audio)
    of_video = load.beside_prompt("attn1", video, prompt, width, 8)
    return replace(of_video, rest=of_video.rest + of_audio.plain + between)


FAMILY = replace(
    ltx.FAMILY,
    name="ltx2",
    title="LTX-2",
    model="LTX2VideoTransformer3DModel",
    stacks=(Stack("transformer_blocks", features=4),),
    work=work,
    parts=(*PARTS, *(f"audio_{part}" for part in PARTS), "audio_to_video_attn", "video_to_audio_attn"),
    words=("ltx2",),
    steps=30,
    sharing=(),
    fused="layer",
)
