"""Decoders of autoencoders, a page for each class: why one can't run here, and its forward with fused kernels.

On a page with ``SHARED_FROM``, ranks share calls with at least as many latents (:mod:`dit_accel.stages.sharing`).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from dit_accel.stages.vae import autoencoder_kl, causal, cogvideox, hunyuan_image, hunyuan_video, hunyuan_video15, ltx

PAGES = {
    "AutoencoderKL": autoencoder_kl,
    "AutoencoderKLCogVideoX": cogvideox,
    "AutoencoderKLFlux2": autoencoder_kl,
    "AutoencoderKLHunyuanImage": hunyuan_image,
    "AutoencoderKLHunyuanVideo": hunyuan_video,
    "AutoencoderKLHunyuanVideo15": hunyuan_video15,
    "AutoencoderKLLTX2Video": ltx,
    "AutoencoderKLLTXVideo": ltx,
    "AutoencoderKLQwenImage": causal,
    "AutoencoderKLWan": causal,
}


def page_of(autoencoder: Any) -> ModuleType | None:
    """The page of an autoencoder's class; None = there is none."""
    return PAGES.get(type(autoencoder).__name__)
