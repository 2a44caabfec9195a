"""HunyuanVideo, from text and from an image: dual blocks, then single blocks over the joint sequence, text last.

diffusers masks the padding behind the text in every attention, and masked attention can't use a GPU's fastest kernels
(34 ms per layer instead of 21 ms at 33K tokens). Here the padding is cut off instead, before the transformer runs.

Framepack is another transformer that cuts its padding itself; the driver for any transformer accelerates it.
"""

import torch
from torch import nn

from dit_accel.models.families.family import Arguments, Family, OrderFacts, SplitFacts, Stack, Tokens, video_tokens
from dit_accel.models.samples import TextLengths

MASK = "encoder_attention_mask"


def tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    """Patches of the latents, then text."""
    config = transformer.config
    sizes, patches = arguments["hidden_states"].shape[2:], (config.patch_size_t, config.patch_size, config.patch_size)
    return video_tokens(sizes, patches, arguments["encoder_hidden_states"].shape[1], text_first=False)


def cut(arguments: Arguments, lengths: TextLengths) -> tuple[Arguments, TextLengths]:
    return arguments | {name: arguments[name][:, : lengths.end] for name in ("encoder_hidden_states", MASK)}, lengths


def replaces_first_frame(transformer: nn.Module) -> bool:
    return transformer.config.image_condition_type == "token_replace"


def used(transformer: nn.Module, output: torch.Tensor, arguments: Arguments) -> torch.Tensor:
    """Return the output ``[B, C, F, H, W]`` without the first frame if the given image replaces it."""
    return output[:, :, 1:] if replaces_first_frame(transformer) else output


FAMILY = Family(
    name="hunyuan_video",
    title="HunyuanVideo",
    model="HunyuanVideoTransformer3DModel",
    stacks=(Stack("transformer_blocks"), Stack("single_transformer_blocks", features=1, joint=True)),
    tokens=tokens,
    text_mask=MASK,
    cut=cut,
    used=used,
    order=OrderFacts(tables={"rope": {0: 0, 1: 0}}, exit="norm_out"),  # tables [S, D] of image tokens only
    first_frame_apart=replaces_first_frame,
    split=SplitFacts("transformer_blocks.0", ("hidden_states", "encoder_hidden_states"), exit="proj_out"),
    makes="videos",
    steps=50,
    sharing=("ulysses",),
    fused="head",
)
