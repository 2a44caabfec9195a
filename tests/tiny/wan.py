"""Tiny pipelines of the Wan family, and the arguments of their calls.

Each video has 3 latent frames of 48 tokens, ragged for blocks of 64 and of 128; sides must divide by 16.
"""

from functools import partial

import diffusers
from transformers import CLIPVisionModel

from tests.tiny import encoders, families
from tests.tiny.inputs import call_with, random_picture

LATENT_CHANNELS = 16
TEMPORAL_FACTOR = 2  # frames in one latent frame


def build(*, picture: bool = False, image_encoder: bool = False, experts: int = 1, expand_timesteps: bool = False):
    """Wan 2.1 or 2.2, text-to-video or image-to-video (`picture`), which in 2.1 has an `image_encoder`.

    2.2 A14B has two `experts`, for high noise and below `boundary_ratio`; in 2.2 TI2V 5B each token has a timestep
    (`expand_timesteps`), which keeps the first frame of an image clean.
    """
    # The image's latents and mask are concatenated to the noise, unless they replace the first frame.
    beside = LATENT_CHANNELS + TEMPORAL_FACTOR if picture and not expand_timesteps else 0
    transformer = partial(
        diffusers.WanTransformer3DModel,
        **families.SIZES,
        in_channels=LATENT_CHANNELS + beside,
        out_channels=LATENT_CHANNELS,
        text_dim=encoders.FEATURES,
        ffn_dim=192,
        rope_max_seq_len=64,
        **({"image_dim": encoders.FEATURES, "added_kv_proj_dim": 96} if image_encoder else {}),
    )
    steps = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    components = {
        **encoders.t5(model="UMT5"),
        "vae": diffusers.AutoencoderKLWan(
            base_dim=8,
            dim_mult=[1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            scale_factor_spatial=4,
            scale_factor_temporal=TEMPORAL_FACTOR,
        ),
        "scheduler": diffusers.UniPCMultistepScheduler(**steps),
        "transformer": transformer(),
        "transformer_2": transformer() if experts == 2 else None,
        "boundary_ratio": 0.875 if experts == 2 else None,
        "expand_timesteps": expand_timesteps,
    }
    if not picture:
        return diffusers.WanPipeline(**components)
    components["image_encoder"] = CLIPVisionModel(encoders.clip_vision_config()) if image_encoder else None
    components["image_processor"] = encoders.clip_image_processor() if image_encoder else None
    return diffusers.WanImageToVideoPipeline(**components)


inputs = call_with(64, 48, num_frames=5)
picture_inputs = call_with(64, 48, num_frames=5, image=random_picture)
# The transformer uses the last 512 tokens as text and the ones before as image.
encoded_picture_inputs = call_with(64, 48, num_frames=5, image=random_picture, max_sequence_length=512)
