"""Small configurations and inputs of transformers that no test of diffusers has, by class."""

from collections.abc import Callable
from typing import Any

import torch

WIDTH, TOKENS = 32, 6  # of prompts
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
U_NET = {**HEADS, "in_channels": 32, "norm_num_groups": 8, "cross_attention_dim": WIDTH}


def text(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random embeddings."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def prompt(batch: int, tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    return {"encoder_hidden_states": torch.randn(batch, tokens, WIDTH), "timestep": torch.full((batch,), 1000.0)}


def flow(batch: int) -> dict[str, torch.Tensor]:
    """Its timesteps end at 1."""
    return {**prompt(batch), "timestep": torch.ones(batch)}


def ids(tokens: int) -> torch.Tensor:
    """Positions of tokens along four axes."""
    return torch.arange(tokens)[:, None].repeat(1, 4).float()


def u_net(batch: int, tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    return {**prompt(batch, tokens), "hidden_states": torch.randn(batch, 32, 8, 8)}


def bria_fibo2(batch_size: int) -> dict[str, torch.Tensor]:
    bundles = {"encoder_hidden_states": torch.randn(batch_size, 2, TOKENS, WIDTH)}
    return {**flow(batch_size), **bundles, "hidden_states": torch.randn(batch_size, 4, 8, 8)}


def flux3(batch_size: int) -> dict[str, torch.Tensor]:
    tokens = {"hidden_states": torch.randn(batch_size, 16, 16), "img_ids": ids(16), "txt_ids": ids(TOKENS)}
    return {**flow(batch_size), **tokens}


def qwen_image21(batch_size: int) -> dict[str, Any]:
    shapes = [[(1, 4, 4)]] * batch_size
    return {**flow(batch_size), "hidden_states": torch.randn(batch_size, 16, 16), "img_shapes": shapes}


def kandinsky6(batch_size: int) -> dict[str, torch.Tensor]:
    return {
        **prompt(batch_size),
        "hidden_states": torch.randn(batch_size, 2, 8, 8, 4),
        "audio_hidden_states": torch.randn(batch_size, 5, 4),
        "pooled_projections": torch.randn(batch_size, WIDTH),
    }


def kandinsky6_sr(batch_size: int) -> dict[str, torch.Tensor]:
    return {"hidden_states": torch.randn(batch_size, 1, 16, 16, 9), "timestep": torch.full((batch_size,), 1000.0)}


def sana_wm(batch_size: int) -> dict[str, Any]:
    camera = torch.eye(4).flatten().repeat(batch_size, 3, 1)
    return {
        "hidden_states": torch.randn(batch_size, 4, 3, 4, 4),
        "timestep": torch.full((batch_size, 1, 3), 1000.0),
        "encoder_hidden_states": torch.randn(batch_size, 1, TOKENS, WIDTH),
        "mask": torch.ones(batch_size, TOKENS),
        "camera_conditions": torch.cat([camera, torch.tensor([4.0, 4.0, 2.0, 2.0]).expand(batch_size, 3, 4)], -1),
        "chunk_plucker": torch.randn(batch_size, 48, 3, 4, 4),
    }


def sana_wm_refiner(batch_size: int) -> dict[str, Any]:
    angles = torch.randn(1, 8, 32)  # of the tokens, and the channels of all heads
    return {
        "hidden_states": torch.randn(batch_size, 8, 4),
        "timestep": torch.full((batch_size, 8), 1000.0),
        "encoder_hidden_states": torch.randn(batch_size, TOKENS, WIDTH),
        "video_rotary_emb": (angles.cos(), angles.sin()),
    }


def stable_audio(batch_size: int) -> dict[str, torch.Tensor]:
    from diffusers.models.embeddings import get_1d_rotary_pos_embed

    return {
        **flow(batch_size),
        "hidden_states": torch.randn(batch_size, 4, 16),
        "global_hidden_states": torch.randn(batch_size, 1, WIDTH),
        "rotary_embedding": get_1d_rotary_pos_embed(8, 17, use_real=True, repeat_interleave_real=False),
    }


def cosmos(batch_size: int) -> dict[str, torch.Tensor]:
    return {**flow(batch_size), "hidden_states": torch.randn(batch_size, 4, 2, 8, 8)}


# by class: configuration, and the inputs of a batch; None = diffusers' tests have them
SMALL: dict[str, tuple[dict[str, Any], Callable[..., dict[str, Any]] | None]] = {
    "MiniMaxH3Transformer3DModel": (
        {**HEADS, "hidden_size": 24, "num_layers": 2, "num_refiner_layers": 2, "ffn_dim": 32, "in_channels": 24}
        | {"audio_in_channels": 32, "text_dim": WIDTH, "freq_dim": 8, "time_embed_hidden_dim": 24}
        | {"time_embed_dim": 16, "rope_freq_dim": 2},
        None,
    ),
    "BriaFibo2Transformer2DModel": (
        {"in_channels": 4, "dim": 64, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "cap_feat_dim": WIDTH}
        | {"injection_layer_ids": (1,), "perceiver_num_layers": 1, "min_num_gist_tokens": 8, "max_num_gist_tokens": 16}
        | {"gist_step": 8, "gist_min_text_len": 8, "gist_max_text_len": 16, "axes_dims": (8, 12, 12)}
        | {"axes_lens": (64, 32, 32)},
        bria_fibo2,
    ),
    "Flux3Transformer2DModel": (
        {**HEADS, "in_channels": 16, "cond_in_channels": 16, "num_layers": 1, "num_single_layers": 1}
        | {"joint_attention_dim": WIDTH, "timestep_channels": 32, "axes_dims_rope": (4, 4, 4, 4)},
        flux3,
    ),
    "QwenImage21Transformer2DModel": (
        {**HEADS, "in_channels": 16, "out_channels": 16, "num_layers": 2, "context_in_dim": WIDTH}
        | {"axes_dims_rope": (4, 6, 6)},
        qwen_image21,
    ),
    "Kandinsky6Transformer3DModel": (
        {"in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": WIDTH, "in_text_dim2": WIDTH, "time_dim": 16}
        | {"model_dim": 32, "ff_dim": 64, "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (4, 6, 6)}
        | {"visual_cond": False, "in_audio_dim": 4, "out_audio_dim": 4},
        kandinsky6,
    ),
    "Kandinsky6SRTransformer3DModel": (
        {"in_visual_dim": 4, "out_visual_dim": 4, "time_dim": 16, "model_dim": 32, "ff_dim": 64}
        | {"num_visual_blocks": 2, "axes_dims": (4, 6, 6)},
        kandinsky6_sr,
    ),
    "SanaWMTransformer3DModel": (
        {"in_channels": 4, "num_layers": 2, "hidden_size": 48, "num_attention_heads": 2, "linear_head_dim": 24}
        | {"chunk_plucker_post_attn_blocks": 2, "caption_channels": WIDTH, "softmax_every_n": 2}
        | {"mixed_precision": "no"},
        sana_wm,
    ),
    "SanaWMLTX2RefinerTransformer3DModel": (
        {**HEADS, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 32, "caption_channels": WIDTH}
        | {"num_layers": 2, "audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 2}
        | {"audio_attention_head_dim": 16, "audio_cross_attention_dim": 32},
        sana_wm_refiner,
    ),
    "StableAudioDiTModel": (
        {**HEADS, "sample_size": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2, "cross_attention_dim": 32}
        | {"num_key_value_attention_heads": 2, "time_proj_dim": 16, "global_states_input_dim": WIDTH}
        | {"cross_attention_input_dim": WIDTH},
        stable_audio,
    ),
    "CosmosTransformer3DModel": (
        {**HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "text_embed_dim": WIDTH, "adaln_lora_dim": 4}
        | {"max_size": (4, 32, 32), "concat_padding_mask": False},  # torchvision resizes the padding mask
        cosmos,
    ),
    "Transformer2DModel": (U_NET, lambda batch_size: u_net(batch_size)),
    "DreamLiteTransformer2DModel": (U_NET, lambda batch_size: u_net(batch_size)),
    "DualTransformer2DModel": (U_NET, lambda batch_size: u_net(batch_size, 77 + 257)),
}
