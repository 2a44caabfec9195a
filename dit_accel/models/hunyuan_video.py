"""HunyuanVideo, from text and from an image: dual blocks, then single blocks over the joint sequence, text last.

diffusers masks the padding behind the text in every attention, which keeps a GPU from its fastest kernels (34 ms a
layer where 21 do, at 33K tokens). Here the padding is cut off instead, at the transformer's entrance.

Framepack is another transformer, which cuts its padding itself and is served by the driver for any model.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from dit_accel.errors import UnsupportedError
from dit_accel.models.family import Arguments, Family, OrderFacts, Stack, Tokens


def tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    """Patches of the latents, then text."""
    config = transformer.config
    _, _, frames, height, width = arguments["hidden_states"].shape
    grid = frames // config.patch_size_t, height // config.patch_size, width // config.patch_size
    return Tokens(arguments["encoder_hidden_states"].shape[1], math.prod(grid), text_first=False, grid=grid)


def replaces_first_frame(transformer: nn.Module) -> bool:
    """Whether the given image takes the place of the first frame."""
    return transformer.config.image_condition_type == "token_replace"


def used(transformer: nn.Module, output: torch.Tensor, arguments: Arguments) -> torch.Tensor:
    """Latents ``[B, C, F, H, W]`` without a first frame that the image replaces."""
    return output[:, :, 1:] if replaces_first_frame(transformer) else output


def parallel_plan(transformer: nn.Module) -> dict[str, Any]:
    """The video's tokens and those of the text are split where they enter the first block.

    Blocks mask padding by its place, which only an accelerated transformer's hooks set right when tokens are split.

    Raises:
        UnsupportedError: the given image takes the place of the first frame, which blocks find by the place of tokens.
    """
    from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

    if replaces_first_frame(transformer):
        raise UnsupportedError(
            "context parallelism splits the video's tokens, and this HunyuanVideo (image_condition_type token_replace) "
            "finds those of the given image by their place: run it on one device"
        )
    stream = ContextParallelInput(1, expected_dims=3)
    table = ContextParallelInput(0, expected_dims=2, split_output=True)
    return {
        "rope": {0: table, 1: table},
        "transformer_blocks.0": {"hidden_states": stream, "encoder_hidden_states": stream},
        "proj_out": ContextParallelOutput(1, expected_dims=3),
    }


FAMILY = Family(
    name="hunyuan_video",
    title="HunyuanVideo",
    model="HunyuanVideoTransformer3DModel",
    stacks=(Stack("transformer_blocks"), Stack("single_transformer_blocks", features=1, joint=True)),
    tokens=tokens,
    text_mask="encoder_attention_mask",
    cuts_padding=True,
    used=used,
    order=OrderFacts(tables={"rope": {0: 0, 1: 0}}, exit="norm_out"),  # tables [S, D], which image tokens alone have
    first_frame_apart=replaces_first_frame,
    parallel_plan=parallel_plan,
)
