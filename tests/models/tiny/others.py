"""More tiny pipelines that are called with embeddings, of families of which no facts are known."""

import inspect

import diffusers
import torch

from tests.models.tiny.parts import TOKENS, WIDTH, prompts, small
from tests.tiny import flux

# by pipeline: transformer, and more arguments of the call
OTHERS = {
    "AuraFlowPipeline": ("AuraFlowTransformer2DModel", {}),
    "CogView4Pipeline": ("CogView4Transformer2DModel", {}),
    "CogView3PlusPipeline": ("CogView3PlusTransformer2DModel", {}),
    "PixArtSigmaPipeline": ("PixArtTransformer2DModel", {"use_resolution_binning": False}),
    "SanaPipeline": ("SanaTransformer2DModel", {"use_resolution_binning": False}),
    "SanaVideoPipeline": ("SanaVideoTransformer3DModel", {"use_resolution_binning": False, "frames": 9}),
    "OvisImagePipeline": ("OvisImageTransformer2DModel", {}),
    "BriaPipeline": ("BriaTransformer2DModel", {}),
    "AllegroPipeline": ("AllegroTransformer3DModel", {"num_frames": 8}),
}
OF_NOISE = ("CogView3PlusPipeline", "PixArtSigmaPipeline", "AllegroPipeline")  # others make flows
WANT_VAE = ("BriaPipeline",)  # for its configuration


def build(name: str):
    """A pipeline without encoders, and the arguments of its call."""
    transformer, arguments = OTHERS[name]
    kind = getattr(diffusers, name)
    taken = inspect.signature(kind).parameters.values()
    parts: dict = {part.name: None for part in taken if part.default is part.empty}
    parts["vae"] = flux.image_vae() if name in WANT_VAE else None
    parts["transformer"] = small(transformer)
    parts["scheduler"] = (
        diffusers.DPMSolverMultistepScheduler() if name in OF_NOISE else diffusers.FlowMatchEulerDiscreteScheduler()
    )
    asked = inspect.signature(kind.__call__).parameters
    output = prompts(prompt_embeds=(1, TOKENS, WIDTH)) | {"negative_prompt": None}
    output |= dict.fromkeys(("prompt_attention_mask", "negative_prompt_attention_mask"), torch.ones(1, TOKENS))
    return kind(**parts), {**{item: value for item, value in output.items() if item in asked}, **arguments}
