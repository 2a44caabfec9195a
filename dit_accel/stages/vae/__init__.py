"""Decoders of autoencoders, a page for each class: why one can't run here, and its forward with fused kernels."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from dit_accel.stages.vae import autoencoder_kl, causal, hunyuan_image, hunyuan_video, ltx

PAGES = {
    "AutoencoderKL": autoencoder_kl,
    "AutoencoderKLFlux2": autoencoder_kl,
    "AutoencoderKLHunyuanImage": hunyuan_image,
    "AutoencoderKLHunyuanVideo": hunyuan_video,
    "AutoencoderKLLTX2Video": ltx,
    "AutoencoderKLLTXVideo": ltx,
    "AutoencoderKLQwenImage": causal,
    "AutoencoderKLWan": causal,
}


def page_of(autoencoder: Any) -> ModuleType | None:
    """The page of an autoencoder's class; None = there is none."""
    return PAGES.get(type(autoencoder).__name__)
