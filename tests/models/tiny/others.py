"""More tiny pipelines that are called with embeddings, of families of which no facts are known."""

import inspect

import diffusers
import torch

from tests.models.tiny.parts import HEADS, ROPE, TOKENS, TWO_KINDS, WIDTH, prompts
from tests.tiny import flux

# by pipeline: transformer, its sizes, and more arguments of the call
OTHERS = {
    "AuraFlowPipeline": (
        "AuraFlowTransformer2DModel",
        {**HEADS, "num_mmdit_layers": 1, "num_single_dit_layers": 1, "joint_attention_dim": WIDTH}
        | {"caption_projection_dim": 64},
        {},
    ),
    "CogView4Pipeline": (
        "CogView4Transformer2DModel",
        {**HEADS, "num_layers": 2, "in_channels": 4, "out_channels": 4, "text_embed_dim": WIDTH, "time_embed_dim": 16}
        | {"condition_dim": 8, "rope_axes_dim": (64, 64)},
        {},
    ),
    "CogView3PlusPipeline": (
        "CogView3PlusTransformer2DModel",
        {**HEADS, "num_layers": 2, "in_channels": 4, "out_channels": 4, "text_embed_dim": WIDTH, "time_embed_dim": 16}
        | {"condition_dim": 8},
        {},
    ),
    "PixArtSigmaPipeline": (
        "PixArtTransformer2DModel",
        {**HEADS, "num_layers": 2, "cross_attention_dim": 64, "caption_channels": WIDTH, "sample_size": 16},
        {"use_resolution_binning": False},
    ),
    "SanaPipeline": (
        "SanaTransformer2DModel",
        {**HEADS, "num_layers": 2, "in_channels": 4, "out_channels": 4, "caption_channels": WIDTH}
        | {"num_cross_attention_heads": 2, "cross_attention_head_dim": 32, "cross_attention_dim": 64},
        {"use_resolution_binning": False},
    ),
    "SanaVideoPipeline": (
        "SanaVideoTransformer3DModel",
        {**HEADS, "num_layers": 2, "in_channels": 4, "out_channels": 4, "caption_channels": WIDTH}
        | {"num_cross_attention_heads": 2, "cross_attention_head_dim": 32, "cross_attention_dim": 64},
        {"use_resolution_binning": False, "frames": 9},
    ),
    "OvisImagePipeline": (
        "OvisImageTransformer2DModel",
        {**TWO_KINDS, **ROPE, "in_channels": 16, "out_channels": 16, "joint_attention_dim": WIDTH},
        {},
    ),
    "BriaPipeline": (
        "BriaTransformer2DModel",
        TWO_KINDS | ROPE | {"in_channels": 16, "joint_attention_dim": WIDTH},
        {},
    ),
    "AllegroPipeline": (
        "AllegroTransformer3DModel",
        {**HEADS, "attention_head_dim": 24, "num_layers": 2, "cross_attention_dim": 48, "caption_channels": WIDTH}
        | {"sample_height": 16, "sample_width": 16, "sample_frames": 8},
        {"num_frames": 8},
    ),
}
OF_NOISE = ("CogView3PlusPipeline", "PixArtSigmaPipeline", "AllegroPipeline")  # others make flows
WANT_VAE = ("BriaPipeline",)  # for its configuration


def build(name: str):
    """A pipeline without encoders, and the arguments of its call."""
    transformer, sizes, arguments = OTHERS[name]
    kind = getattr(diffusers, name)
    taken = inspect.signature(kind).parameters.values()
    parts: dict = {part.name: None for part in taken if part.default is part.empty}
    parts["vae"] = flux.image_vae() if name in WANT_VAE else None
    parts["transformer"] = getattr(diffusers, transformer)(**sizes)
    parts["scheduler"] = (
        diffusers.DPMSolverMultistepScheduler() if name in OF_NOISE else diffusers.FlowMatchEulerDiscreteScheduler()
    )
    asked = inspect.signature(kind.__call__).parameters
    output = prompts(prompt_embeds=(1, TOKENS, WIDTH)) | {"negative_prompt": None}
    output |= dict.fromkeys(("prompt_attention_mask", "negative_prompt_attention_mask"), torch.ones(1, TOKENS))
    return kind(**parts), {**{item: value for item, value in output.items() if item in asked}, **arguments}
