"""Tiny pipelines of the HunyuanVideo family, and what to call them with.

Two double-stream and two single-stream blocks (HunyuanVideo 1.5: double only), a text refiner of one, three heads of 32
features. Clips have 3 latent frames of 48 tokens and up to 37 text tokens, of which a prompt fills a part.
"""

import torch

from dit_accel.tools.testing import families, flux, pictures, text

LATENT_CHANNELS = 4
HEIGHT, WIDTH = 64, 48  # pixels
# The pipelines' own templates are hundreds of characters long, and a character is a token here.
TEMPLATE = {"template": "{}", "crop_start": 0}
PICTURE_TEMPLATE = {
    "template": f"{text.IMAGE_MARK}{text.HEADER_END}{{}}{text.HEADER_END}ok{text.HEADER_END}",
    "crop_start": 3,  # the beginning of the sequence, the picture's mark, and the end of the first header
    "image_emb_start": 1,
    "image_emb_end": 1 + pictures.PICTURE_TOKENS,
    "image_emb_len": pictures.PICTURE_TOKENS,
}


def _vae():
    """`AutoencoderKLHunyuanVideo` at a quarter of the sides and of the frames."""
    from diffusers import AutoencoderKLHunyuanVideo

    return AutoencoderKLHunyuanVideo(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(8, 8, 8),
        down_block_types=("HunyuanVideoDownBlock3D",) * 3,
        up_block_types=("HunyuanVideoUpBlock3D",) * 3,
        layers_per_block=1,
        norm_num_groups=4,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
    )


def _transformer_sizes(**options) -> dict:
    return {
        **families.SIZES,
        "num_single_layers": 2,
        "num_refiner_layers": 1,
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "text_embed_dim": text.FEATURES,
        "pooled_projection_dim": text.FEATURES,
        "rope_axes_dim": (8, 12, 12),
        **options,
    }


def _components(transformer) -> dict:
    """The modules that the pipelines of the first generation share."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return {
        "text_encoder": text.llama_text_encoder(),
        "tokenizer": text.llama_tokenizer(),
        "text_encoder_2": text.clip_text_encoder(),
        "tokenizer_2": text.clip_tokenizer(),
        "transformer": transformer,
        "vae": _vae(),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=7.0),
    }


def build():
    """HunyuanVideo text-to-video, with its distilled guidance."""
    from diffusers import HunyuanVideoPipeline, HunyuanVideoTransformer3DModel

    return HunyuanVideoPipeline(**_components(HunyuanVideoTransformer3DModel(**_transformer_sizes())))


def build_picture(condition: str):
    """HunyuanVideo image-to-video.

    Args:
        condition: "token_replace", where the picture is the first latent frame and has gates of its own, or
            "latent_concat", where it lies beside the noise with a mask.
    """
    from diffusers import HunyuanVideoImageToVideoPipeline, HunyuanVideoTransformer3DModel
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    beside = condition == "latent_concat"
    sizes = _transformer_sizes(
        in_channels=2 * LATENT_CHANNELS + 1 if beside else LATENT_CHANNELS,
        guidance_embeds=not beside,
        image_condition_type=condition,
    )
    components = _components(HunyuanVideoTransformer3DModel(**sizes))
    language_model = {"model_type": "llama", **text.llama_config()}
    components["text_encoder"] = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=pictures.clip_vision_config(),
            text_config=language_model,
            image_token_id=components["tokenizer"].convert_tokens_to_ids(text.IMAGE_MARK),
            image_seq_length=pictures.PICTURE_TOKENS,
            pad_token_id=language_model["pad_token_id"],
        )
    )
    return HunyuanVideoImageToVideoPipeline(**components, image_processor=pictures.clip_image_processor())


def build_framepack():
    """Framepack, which makes a clip in sections, the last first, from a picture and what it made before."""
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoFramepackPipeline,
        HunyuanVideoFramepackTransformer3DModel,
    )

    transformer = HunyuanVideoFramepackTransformer3DModel(
        **_transformer_sizes(has_image_proj=True, image_proj_dim=pictures.FEATURES, has_clean_x_embedder=True)
    )
    components = _components(transformer)
    components["scheduler"] = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return HunyuanVideoFramepackPipeline(
        **components,
        image_encoder=pictures.siglip_image_encoder(),
        feature_extractor=pictures.siglip_image_processor(),
    )


def build_15(*, picture: bool = False):
    """HunyuanVideo 1.5, whose guidance is a component of the pipeline."""
    import diffusers
    from transformers import T5Config, T5EncoderModel

    sizes = {**_transformer_sizes(), "in_channels": 2 * LATENT_CHANNELS + 1}
    for key in ("num_single_layers", "pooled_projection_dim"):
        del sizes[key]
    components = {
        "text_encoder": text.qwen_language_model(),
        "tokenizer": text.qwen_tokenizer(),
        "text_encoder_2": T5EncoderModel(
            T5Config(vocab_size=text.VOCABULARY, d_model=text.FEATURES, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
        ),
        "tokenizer_2": text.byt5_tokenizer(),
        "transformer": diffusers.HunyuanVideo15Transformer3DModel(
            **sizes,
            text_embed_2_dim=text.FEATURES,
            image_embed_dim=pictures.FEATURES,
            target_size=HEIGHT,
            task_type="i2v" if picture else "t2v",
        ),
        "vae": diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=LATENT_CHANNELS,
            block_out_channels=(16, 32, 64, 64),
            layers_per_block=1,
            spatial_compression_ratio=8,
            temporal_compression_ratio=4,
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    }
    if picture:
        pipe = diffusers.HunyuanVideo15ImageToVideoPipeline(
            **components,
            image_encoder=pictures.siglip_image_encoder(),
            feature_extractor=pictures.siglip_image_processor(),
        )
    else:
        pipe = diffusers.HunyuanVideo15Pipeline(**components)
    pipe.vae.enable_slicing()  # its decoder's mask serves one clip at a time
    # These are fixed in the pipeline's constructor and not in its configuration.
    pipe.system_message, pipe.prompt_template_encode_start_idx = "", 0
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length = flux.TEXT_TOKENS, 9
    pipe.vision_num_semantic_tokens = pictures.PICTURE_TOKENS
    return pipe


def inputs(generator: torch.Generator, *, height: int = HEIGHT, width: int = WIDTH) -> dict:
    """What HunyuanVideo is called with; guidance by a second branch needs `negative_prompt` and `true_cfg_scale`."""
    return {
        "height": height,
        "width": width,
        "num_frames": 9,
        "max_sequence_length": flux.TEXT_TOKENS,
        "prompt_template": TEMPLATE,
    }


def picture_inputs(generator: torch.Generator, *, height: int = HEIGHT, width: int = WIDTH) -> dict:
    """A first frame of the clip's size beside the prompt."""
    return {
        **inputs(generator, height=height, width=width),
        "image": pictures.random_picture(generator, height, width),
        "prompt_template": PICTURE_TEMPLATE,
    }


def framepack_inputs(generator: torch.Generator, *, height: int = HEIGHT, width: int = WIDTH) -> dict:
    """Two sections of three latent frames; the result's latents are a list, whose last entry is the whole clip."""
    arguments = {**picture_inputs(generator, height=height, width=width), "prompt_template": TEMPLATE}
    return {**arguments, "num_frames": 13, "latent_window_size": 3}


def inputs_15(generator: torch.Generator, *, height: int = HEIGHT, width: int = WIDTH) -> dict:
    """What HunyuanVideo 1.5 is called with; its second text encoder reads words of the prompt that stand in quotes."""
    return {"height": height, "width": width, "num_frames": 9}


def picture_inputs_15(generator: torch.Generator, *, height: int = HEIGHT, width: int = WIDTH) -> dict:
    """A first frame, whose proportions choose the clip's size."""
    return {"num_frames": 9, "image": pictures.random_picture(generator, height, width)}
