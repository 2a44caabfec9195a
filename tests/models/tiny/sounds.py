"""Tiny pipelines that make sound alone."""

import diffusers
import torch

from tests.tiny import encoders, redraw


def longcat_audio():
    """A transformer over the latents of a waveform; guidance calls it twice a step."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        transformer = diffusers.LongCatAudioDiTTransformer(
            dit_dim=64, dit_depth=2, dit_heads=2, dit_text_dim=encoders.FEATURES, latent_dim=8
        )
        vae = diffusers.LongCatAudioDiTVae(
            channels=16,
            c_mults=[1, 2],
            strides=[2],
            latent_dim=8,
            encoder_latent_dim=16,
            downsampling_ratio=2,
            sample_rate=100,
        )
        redraw(transformer)
        pipe = diffusers.LongCatAudioDiTPipeline(vae, **encoders.t5(model="UMT5"), transformer=transformer)
    for module in (transformer, vae, pipe.text_encoder):
        module.eval()
    pipe.set_progress_bar_config(disable=True)
    return pipe
