"""Tiny pipelines of the other families, and what to call them with.

Two blocks each and three heads of 32 features. Pictures have 132 tokens and clips 126 to 168, all ragged for blocks
of 64 and of 128 tokens. Every one runs with classifier-free guidance.
"""

import torch

from dit_accel.tools.testing import flux, text

SIZES = {"num_attention_heads": 3, "attention_head_dim": 32, "num_layers": 2}  # of every transformer here


def build_sd3(dual_attention_layers=()):
    """With layers named there as in 3.5-medium: their second attention is over the image alone."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=flux.image_vae(),
        # The two CLIP encodings lie side by side in the width of T5's.
        text_encoder=text.clip_text_encoder(width=text.FEATURES // 2, projection=True),
        tokenizer=text.clip_tokenizer(),
        text_encoder_2=text.clip_text_encoder(width=text.FEATURES // 2, projection=True),
        tokenizer_2=text.clip_tokenizer(),
        text_encoder_3=text.t5_text_encoder(),
        tokenizer_3=text.t5_tokenizer(),
        transformer=SD3Transformer2DModel(
            **SIZES,
            sample_size=32,
            in_channels=flux.LATENT_CHANNELS,
            out_channels=flux.LATENT_CHANNELS,
            joint_attention_dim=text.FEATURES,
            caption_projection_dim=96,
            pooled_projection_dim=text.FEATURES,
            qk_norm="rms_norm",
            dual_attention_layers=dual_attention_layers,
        ),
    )


def build_qwen_image():
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    pipe = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=AutoencoderKLQwenImage(base_dim=8, dim_mult=[1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True]),
        text_encoder=text.qwen_text_encoder(),
        tokenizer=text.qwen_tokenizer(),
        transformer=QwenImageTransformer2DModel(**SIZES, joint_attention_dim=text.FEATURES, axes_dims_rope=(8, 12, 12)),
    )
    # The template's first 34 tokens are dropped, which holds for the real vocabulary and not for one of bytes.
    pipe.prompt_template_encode, pipe.prompt_template_encode_start_idx = "{}", 0
    return pipe


def qwen_image_inputs(generator: torch.Generator, **size: int) -> dict:
    """Its guidance needs a negative prompt to be given."""
    return {**flux.inputs(generator, **size), "negative_prompt": "blurred"}


def build_cogvideox():
    from diffusers import (
        AutoencoderKLCogVideoX,
        CogVideoXDDIMScheduler,
        CogVideoXPipeline,
        CogVideoXTransformer3DModel,
    )

    return CogVideoXPipeline(
        tokenizer=text.t5_tokenizer(),
        text_encoder=text.t5_text_encoder(),
        vae=AutoencoderKLCogVideoX(
            block_out_channels=(8, 8, 8),
            down_block_types=("CogVideoXDownBlock3D",) * 3,
            up_block_types=("CogVideoXUpBlock3D",) * 3,
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=4,
        ),
        transformer=CogVideoXTransformer3DModel(
            **SIZES,
            in_channels=4,
            out_channels=4,
            text_embed_dim=text.FEATURES,
            sample_height=16,
            sample_width=14,
            sample_frames=9,
            max_text_seq_length=flux.TEXT_TOKENS,
            use_rotary_positional_embeddings=True,
        ),
        scheduler=CogVideoXDDIMScheduler(prediction_type="v_prediction", timestep_spacing="trailing"),
    )


def build_mochi():
    from diffusers import (
        AutoencoderKLMochi,
        FlowMatchEulerDiscreteScheduler,
        MochiPipeline,
        MochiTransformer3DModel,
    )

    return MochiPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        vae=AutoencoderKLMochi(
            encoder_block_out_channels=(32, 32, 32, 32),  # its group norms have 32 groups
            decoder_block_out_channels=(32, 32, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
        ),
        text_encoder=text.t5_text_encoder(),
        tokenizer=text.t5_tokenizer(),
        transformer=MochiTransformer3DModel(
            **SIZES,
            pooled_projection_dim=text.FEATURES,
            text_embed_dim=text.FEATURES,
            max_sequence_length=flux.TEXT_TOKENS,
        ),
    )


def build_ltx():
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXPipeline,
        LTXVideoTransformer3DModel,
    )

    return LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=AutoencoderKLLTXVideo(
            latent_channels=8,
            block_out_channels=(8, 8),
            down_block_types=("LTXVideoDownBlock3D",) * 2,
            decoder_block_out_channels=(8, 8),
            layers_per_block=(1, 1, 1),
            decoder_layers_per_block=(1, 1, 1),
            spatio_temporal_scaling=(True, False),
            decoder_spatio_temporal_scaling=(True, False),
            decoder_inject_noise=(False, False, False),
        ),
        text_encoder=text.t5_text_encoder(),
        tokenizer=text.t5_tokenizer(),
        transformer=LTXVideoTransformer3DModel(
            **SIZES, in_channels=8, out_channels=8, cross_attention_dim=96, caption_channels=text.FEATURES
        ),
    )


def clip_of(frames: int, height: int, width: int):
    """Inputs for a clip of that many frames and, unless told, pixels."""

    def clip_inputs(generator: torch.Generator, *, height: int = height, width: int = width) -> dict:
        return {"height": height, "width": width, "num_frames": frames, "max_sequence_length": flux.TEXT_TOKENS}

    return clip_inputs


cogvideox_inputs = clip_of(9, 64, 56)  # 3 latent frames of 56 tokens
mochi_inputs = clip_of(13, 112, 96)  # 3 latent frames of 42 tokens: this pipeline fixes its factors at 8 and 6
ltx_inputs = clip_of(5, 32, 96)  # 3 latent frames of 48 tokens; sides must divide by 32
