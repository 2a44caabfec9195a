"""Tiny pipelines of the HunyuanVideo family, and the arguments of their calls.

Two double-stream and two single-stream blocks (HunyuanVideo 1.5: double only), a text refiner of one, three heads of 32
features. Videos have 3 latent frames of 48 tokens and up to 37 text tokens, of which a prompt fills a part.
"""

import diffusers
import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration

from tests.tiny import encoders, families
from tests.tiny.inputs import TEXT_TOKENS, call_with, random_picture

LATENT_CHANNELS = 4
HEIGHT, WIDTH = 64, 48  # pixels
# The pipelines' own templates are hundreds of characters long, and a character is a token here.
TEMPLATE = {"template": "{}", "crop_start": 0}
PICTURE_TEMPLATE = {
    "template": f"{encoders.IMAGE_MARK}{encoders.HEADER_END}{{}}{encoders.HEADER_END}ok{encoders.HEADER_END}",
    "crop_start": 3,  # the beginning of the sequence, the image's mark, and the end of the first header
    "image_emb_start": 1,
    "image_emb_end": 1 + encoders.PICTURE_TOKENS,
    "image_emb_len": encoders.PICTURE_TOKENS,
}
BLOCK_SIZES = {
    **families.SIZES,
    "num_refiner_layers": 1,
    "out_channels": LATENT_CHANNELS,
    "text_embed_dim": encoders.FEATURES,
    "rope_axes_dim": (8, 12, 12),
}


def _components(
    model: str = "HunyuanVideoTransformer3DModel", *, in_channels: int = LATENT_CHANNELS, **options
) -> dict:
    """The modules that the pipelines of the first generation share; `options` go to the transformer."""
    sizes = {"num_single_layers": 2, "in_channels": in_channels, "pooled_projection_dim": encoders.FEATURES}
    return {
        "transformer": getattr(diffusers, model)(**BLOCK_SIZES, **sizes, **options),
        **encoders.llama(),
        **encoders.clip("_2"),
        "vae": diffusers.AutoencoderKLHunyuanVideo(
            latent_channels=LATENT_CHANNELS,
            block_out_channels=(8, 8, 8),
            layers_per_block=1,
            down_block_types=("HunyuanVideoDownBlock3D",) * 3,
            up_block_types=("HunyuanVideoUpBlock3D",) * 3,
            norm_num_groups=4,
            spatial_compression_ratio=4,
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    }


def build():
    """HunyuanVideo text-to-video, with its distilled guidance."""
    return diffusers.HunyuanVideoPipeline(**_components())


def build_picture(condition: str):
    """HunyuanVideo image-to-video: "token_replace", where the image is the first latent frame with its own gates, or
    "latent_concat", where it is concatenated to the noise with a mask.
    """
    beside = condition == "latent_concat"
    channels = 2 * LATENT_CHANNELS + 1 if beside else LATENT_CHANNELS
    components = _components(in_channels=channels, guidance_embeds=not beside, image_condition_type=condition)
    models = {"vision_config": encoders.clip_vision_config(), "text_config": {"model_type": "llama", **encoders.LLAMA}}
    tokens = {"image_token_id": components["tokenizer"].convert_tokens_to_ids(encoders.IMAGE_MARK)}
    tokens |= {"image_seq_length": encoders.PICTURE_TOKENS, "pad_token_id": encoders.LLAMA["pad_token_id"]}
    components["text_encoder"] = LlavaForConditionalGeneration(LlavaConfig(**models, **tokens))
    return diffusers.HunyuanVideoImageToVideoPipeline(**components, image_processor=encoders.clip_image_processor())


def build_framepack():
    """Framepack, which makes a video in sections, the last first, from an image and its previous sections."""
    components = _components(
        "HunyuanVideoFramepackTransformer3DModel",
        has_image_proj=True,
        image_proj_dim=encoders.FEATURES,
        has_clean_x_embedder=True,
    )
    components["scheduler"] = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return diffusers.HunyuanVideoFramepackPipeline(**components, **encoders.siglip())


def build_15(*, picture: bool = False):
    """HunyuanVideo 1.5, whose guidance is a component of the pipeline."""
    components = {
        **encoders.qwen(language_model=True),
        **encoders.t5("_2", byte_tokens=True),
        "transformer": diffusers.HunyuanVideo15Transformer3DModel(
            **BLOCK_SIZES,
            in_channels=2 * LATENT_CHANNELS + 1,
            target_size=HEIGHT,
            task_type="i2v" if picture else "t2v",
            text_embed_2_dim=encoders.FEATURES,
            image_embed_dim=encoders.FEATURES,
        ),
        "vae": diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=LATENT_CHANNELS,
            block_out_channels=(16, 32, 64, 64),
            layers_per_block=1,
            spatial_compression_ratio=8,
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    }
    kind = diffusers.HunyuanVideo15ImageToVideoPipeline if picture else diffusers.HunyuanVideo15Pipeline
    pipe = kind(**components, **encoders.siglip() if picture else {})
    pipe.vae.enable_slicing()  # its decoder's mask serves one video at a time
    # These are fixed in the pipeline's constructor and not in its configuration.
    pipe.system_message, pipe.prompt_template_encode_start_idx = "", 0
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length = TEXT_TOKENS, 9
    pipe.vision_num_semantic_tokens = encoders.PICTURE_TOKENS
    return pipe


# Guidance by a second branch needs `negative_prompt` and `true_cfg_scale`.
inputs = call_with(HEIGHT, WIDTH, num_frames=9, prompt_template=TEMPLATE)
picture_inputs = call_with(HEIGHT, WIDTH, num_frames=9, image=random_picture, prompt_template=PICTURE_TEMPLATE)
# Two sections of three latent frames; the result's latents are a list, whose last entry is the whole video.
sections = {"num_frames": 13, "latent_window_size": 3, "image": random_picture, "prompt_template": TEMPLATE}
framepack_inputs = call_with(HEIGHT, WIDTH, **sections)
# The second text encoder of HunyuanVideo 1.5 reads words of the prompt that stand in quotes.
inputs_15 = call_with(HEIGHT, WIDTH, num_frames=9, max_sequence_length=None)


def picture_inputs_15(generator: torch.Generator, *, height: int = HEIGHT, width: int = WIDTH) -> dict:
    """A first frame, whose proportions choose the video's size."""
    return {"num_frames": 9, "image": random_picture(generator, height, width)}
