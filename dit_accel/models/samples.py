"""A transformer call's batch as prompts: which rows are one prompt's, and the arguments of a call for some rows.

Nothing tells whether a tensor's first dimension is the batch but its name: position ids of as many tokens as there are
prompts look the same. So the names are listed, and a call with a tensor of another name is not divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dit_accel.loop.rows import Rows, take_rows

BATCHED = frozenset(  # tensors, or lists of them, with an entry a sample, or with one for all
    [
        *("hidden_states", "timestep", "timestep_r", "guidance", "ofs", "fps"),
        *("encoder_hidden_states", "encoder_attention_mask", "encoder_hidden_states_mask", "pooled_projections"),
        *("encoder_hidden_states_2", "encoder_attention_mask_2", "encoder_hidden_states_image", "image_embeds"),
        *("controlnet_block_samples", "controlnet_single_block_samples", "block_controlnet_hidden_states"),
        *("attention_kwargs", "joint_attention_kwargs"),  # a LoRA's scale, pictures of IP adapters
    ]
)
SHARED = frozenset(["img_ids", "txt_ids", "image_rotary_emb", "rope_interpolation_scale"])  # by all samples
UNCONDITIONAL_FIRST = "cond_uncond"  # what diffusers calls a batch that holds every prompt twice


def prompt_rows(context: str | None, latents: torch.Tensor) -> Sequence[Rows]:
    """The rows of each prompt in a batch of latents ``[B, …]``.

    A call with both branches of guidance in one batch holds every prompt twice, in halves, and the rows of a prompt
    must compute together: guidance multiplies their difference, so errors that both have alike cancel.

    Args:
        context: of diffusers' cache. Where it names no single branch, halves of equal latents are the two; some
            pipelines name both without guidance too.
    """
    batch = len(latents)
    half = batch // 2
    may_be_doubled = batch % 2 == 0 and context in (None, UNCONDITIONAL_FIRST)
    is_doubled = may_be_doubled and torch.equal(latents[:half], latents[half:])
    prompts = [(row, row + half) for row in range(half)] if is_doubled else [(row,) for row in range(batch)]
    return prompts if len(prompts) > 1 else [None]


def why_not_divisible(arguments: dict[str, Any]) -> str | None:
    """Why a call can't be made for some samples of its batch only, or None."""
    batch = len(arguments["hidden_states"])
    for name, value in arguments.items():
        if name in SHARED:
            continue
        leaves = pytree.tree_leaves(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if name not in BATCHED and (tensors or isinstance(value, (list, tuple, dict))):
            return f"whether argument {name} has an entry a sample is not known"
        for tensor in tensors:
            if tensor.ndim > 0 and len(tensor) not in (1, batch):
                return f"argument {name} has a tensor of shape {list(tensor.shape)} in a batch of {batch}"
    return None


def arguments_of_rows(arguments: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """The arguments of a call that :func:`why_not_divisible` allows, for some samples of its batch."""
    batch = len(arguments["hidden_states"])

    def take(leaf: Any) -> Any:
        has_samples = isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and len(leaf) == batch
        return take_rows(leaf, rows) if has_samples else leaf

    return {name: pytree.tree_map(take, value) if name in BATCHED else value for name, value in arguments.items()}
