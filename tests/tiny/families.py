"""Tiny pipelines of the other families, and the arguments of their calls.

Two blocks each and three heads of 32 features. Images have 132 tokens and videos 126 to 168, all ragged for blocks of
64 and of 128 tokens. Every one runs with classifier-free guidance.
"""

import diffusers

from tests.tiny import encoders, flux
from tests.tiny.inputs import TEXT_TOKENS, call_with

SIZES = {"num_attention_heads": 3, "attention_head_dim": 32, "num_layers": 2}  # of every transformer here


def build_sd3(dual_attention_layers=()):
    """With layers named there as in 3.5-medium: their second attention is over the image alone."""
    return diffusers.StableDiffusion3Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=flux.image_vae(),
        # The two CLIP encodings lie side by side in the width of T5's.
        **encoders.clip(width=encoders.FEATURES // 2, projection=True),
        **encoders.clip("_2", width=encoders.FEATURES // 2, projection=True),
        **encoders.t5("_3"),
        transformer=diffusers.SD3Transformer2DModel(
            **SIZES,
            sample_size=32,
            in_channels=flux.LATENT_CHANNELS,
            out_channels=flux.LATENT_CHANNELS,
            joint_attention_dim=encoders.FEATURES,
            pooled_projection_dim=encoders.FEATURES,
            caption_projection_dim=96,
            qk_norm="rms_norm",
            dual_attention_layers=dual_attention_layers,
        ),
    )


def build_qwen_image():
    pipe = diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=diffusers.AutoencoderKLQwenImage(
            base_dim=8, dim_mult=[1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True]
        ),
        **encoders.qwen(),
        transformer=diffusers.QwenImageTransformer2DModel(
            **SIZES, joint_attention_dim=encoders.FEATURES, axes_dims_rope=(8, 12, 12)
        ),
    )
    # The template's first 34 tokens are dropped, which holds for the real vocabulary and not for one of bytes.
    pipe.prompt_template_encode, pipe.prompt_template_encode_start_idx = "{}", 0
    return pipe


def build_cogvideox():
    return diffusers.CogVideoXPipeline(
        **encoders.t5(),
        vae=diffusers.AutoencoderKLCogVideoX(
            block_out_channels=(8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=4,
            down_block_types=("CogVideoXDownBlock3D",) * 3,
            up_block_types=("CogVideoXUpBlock3D",) * 3,
        ),
        transformer=diffusers.CogVideoXTransformer3DModel(
            **SIZES,
            in_channels=4,
            out_channels=4,
            text_embed_dim=encoders.FEATURES,
            sample_height=16,
            sample_width=14,
            sample_frames=9,
            max_text_seq_length=TEXT_TOKENS,
            use_rotary_positional_embeddings=True,
        ),
        scheduler=diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction", timestep_spacing="trailing"),
    )


def build_mochi():
    return diffusers.MochiPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        vae=diffusers.AutoencoderKLMochi(
            encoder_block_out_channels=(32, 32, 32, 32),  # its group norms have 32 groups
            decoder_block_out_channels=(32, 32, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
        ),
        **encoders.t5(),
        transformer=diffusers.MochiTransformer3DModel(
            **SIZES,
            pooled_projection_dim=encoders.FEATURES,
            text_embed_dim=encoders.FEATURES,
            max_sequence_length=TEXT_TOKENS,
        ),
    )


def build_ltx():
    return diffusers.LTXPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=diffusers.AutoencoderKLLTXVideo(
            latent_channels=8,
            block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            layers_per_block=(1, 1, 1),
            decoder_layers_per_block=(1, 1, 1),
            spatio_temporal_scaling=(True, False),
            decoder_spatio_temporal_scaling=(True, False),
            down_block_types=("LTXVideoDownBlock3D",) * 2,
            decoder_inject_noise=(False, False, False),
        ),
        **encoders.t5(),
        transformer=diffusers.LTXVideoTransformer3DModel(
            **SIZES, in_channels=8, out_channels=8, cross_attention_dim=96, caption_channels=encoders.FEATURES
        ),
    )


qwen_image_inputs = call_with(flux.HEIGHT, flux.WIDTH, negative_prompt="blurred")  # without one it is not guided
cogvideox_inputs = call_with(64, 56, num_frames=9)  # 3 latent frames of 56 tokens
mochi_inputs = call_with(112, 96, num_frames=13)  # 3 latent frames of 42 tokens: its factors are fixed at 8 and 6
ltx_inputs = call_with(32, 96, num_frames=5)  # 3 latent frames of 48 tokens; sides must divide by 32
