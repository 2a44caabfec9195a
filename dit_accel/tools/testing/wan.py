"""Tiny pipelines of the Wan family, and what to call them with.

Each clip has 3 latent frames of 48 tokens, ragged for blocks of 64 and of 128; sides must divide by 16.
"""

import torch

from dit_accel.tools.testing import families, flux, pictures, text

LATENT_CHANNELS = 16
TEMPORAL_FACTOR = 2  # frames in one latent frame


def _transformer(in_channels: int, **options):
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        **families.SIZES,
        in_channels=in_channels,
        out_channels=LATENT_CHANNELS,
        text_dim=text.FEATURES,
        ffn_dim=192,
        rope_max_seq_len=64,
        **options,
    )


def build(*, picture: bool = False, image_encoder: bool = False, experts: int = 1, expand_timesteps: bool = False):
    """Wan 2.1 or 2.2, text-to-video or image-to-video.

    Args:
        picture: image-to-video.
        image_encoder: the picture also speaks to the cross-attention, through CLIP (2.1).
        experts: 2 gives one transformer for high noise and another below `boundary_ratio` (2.2 A14B).
        expand_timesteps: one timestep a token, which keeps the first frame of a picture clean (2.2 TI2V 5B).
    """
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline

    # A picture's latents and mask lie beside the noise, unless they replace the first frame.
    beside = LATENT_CHANNELS + TEMPORAL_FACTOR if picture and not expand_timesteps else 0
    options = {"image_dim": pictures.FEATURES, "added_kv_proj_dim": 96} if image_encoder else {}
    components = {
        "tokenizer": text.t5_tokenizer(),
        "text_encoder": text.t5_text_encoder(multilingual=True),
        "vae": AutoencoderKLWan(
            base_dim=8,
            dim_mult=[1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            scale_factor_spatial=4,
            scale_factor_temporal=TEMPORAL_FACTOR,
        ),
        "scheduler": UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        "transformer": _transformer(LATENT_CHANNELS + beside, **options),
        "transformer_2": _transformer(LATENT_CHANNELS + beside, **options) if experts == 2 else None,
        "boundary_ratio": 0.875 if experts == 2 else None,
        "expand_timesteps": expand_timesteps,
    }
    if not picture:
        return WanPipeline(**components)
    components["image_encoder"] = pictures.clip_image_encoder() if image_encoder else None
    components["image_processor"] = pictures.clip_image_processor() if image_encoder else None
    return WanImageToVideoPipeline(**components)


inputs = families.clip_of(5, 64, 48)


def picture_inputs(generator: torch.Generator, *, height: int = 64, width: int = 48, tokens: int | None = None) -> dict:
    """A first frame of the clip's size; `tokens` of text, by default as many as every pipeline here."""
    arguments = inputs(generator, height=height, width=width)
    arguments["max_sequence_length"] = tokens or flux.TEXT_TOKENS
    return {**arguments, "image": pictures.random_picture(generator, height, width)}
