"""Decoders of autoencoders, a page for each class, with the forward of its decoder on fused kernels.

A page has the names of diffusers' classes that a decoder may consist of, with layers of torch (``KNOWN``), and the
values that attributes of its modules must have (``REQUIRED``, by name, or by the end of a class's name and name).
``why_not_module`` on some pages returns why a module with these can't run either, or None. ``decode``, and ``encode``
on some pages, take the module, the arguments that a page knows, and ``layers``. On a page with ``SHARED_FROM``, ranks
share calls with at least as many latents. ``PEAKS`` = memory of the decoder and of the page, in elements per latent
(docs/results/decoding.json), in a first call and later. ``FLOAT32`` = classes whose weights may be so in half
precision; ``decode_clip`` replaces ``_decode_clip``, which calls the decoder for each tile.
"""

from types import ModuleType

import torch
from torch import nn

from dit_accel.stages.vae import (
    autoencoder_kl,
    causal,
    cogvideox,
    hunyuan_image,
    hunyuan_video,
    hunyuan_video15,
    ltx,
    minimax_h3,
)

PAGES = {  # by the name of an autoencoder's class
    "AutoencoderKL": autoencoder_kl,
    "AutoencoderKLCogVideoX": cogvideox,
    "AutoencoderKLFlux2": autoencoder_kl,
    "AutoencoderKLHunyuanImage": hunyuan_image,
    "AutoencoderKLHunyuanVideo": hunyuan_video,
    "AutoencoderKLHunyuanVideo15": hunyuan_video15,
    "AutoencoderKLLTX2Video": ltx,
    "AutoencoderKLLTXVideo": ltx,
    "AutoencoderKLMiniMaxH3": minimax_h3,
    "AutoencoderKLQwenImage": causal,
    "AutoencoderKLWan": causal,
}
LAYERS = {"ModuleList", "Sequential", "Conv2d", "Conv3d", "Linear", "GroupNorm", "LayerNorm", "RMSNorm"}
LAYERS |= {"SiLU", "Dropout", "Identity", "ZeroPad2d"}


def why_unknown(page: ModuleType, module: nn.Module) -> str | None:
    """Return why a module of a decoder or an encoder can't run on a page, or None."""
    kind = type(module).__name__
    if kind not in LAYERS | page.KNOWN:
        return f"is a {kind}"
    for path, values in page.REQUIRED.items():
        owner, _, name = path.rpartition(".")
        value = getattr(module, name, values[0])
        if kind.endswith(owner) and (isinstance(value, torch.Tensor | nn.Module) or value not in values):
            return f"has {name} = {value if isinstance(value, bool | int | float | str) else type(value).__name__}"
    return page.why_not_module(module) if hasattr(page, "why_not_module") else None
