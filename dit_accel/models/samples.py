"""Prompts of a transformer call's batch: their rows, the arguments for some rows, and the prompts' lengths.

Only an argument's name shows if its first dimension is the batch: position ids of as many tokens as there are prompts
have the same shape. So the names are listed here, and a call with a tensor of another name is not divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from dit_accel.loop.rows import Rows, take_rows

BATCHED = {  # tensors, or lists of them, with one entry per sample, or one for all
    *("hidden_states", "timestep", "timestep_r", "guidance", "ofs", "fps"),
    *("encoder_hidden_states", "encoder_attention_mask", "encoder_hidden_states_mask", "attention_mask"),
    *("encoder_hidden_states_2", "encoder_attention_mask_2", "encoder_hidden_states_image", "image_embeds"),
    "pooled_projections",
    *("controlnet_block_samples", "controlnet_single_block_samples", "block_controlnet_hidden_states"),
    *("attention_kwargs", "joint_attention_kwargs"),  # a LoRA's scale, images of IP adapters
    *("control_hidden_states", "pose_hidden_states", "face_pixel_values"),
    *("audio_hidden_states", "audio_encoder_hidden_states", "audio_encoder_attention_mask", "audio_timestep"),
    *("sigma", "audio_sigma", "video_coords", "audio_coords"),
    *("position_ids", "segment_ids", "indicator"),  # of Ideogram 4; see _is_shared
}
LISTED = frozenset(["img_shapes"])  # lists with one entry per sample, or one for all
SHARED = {"img_ids", "txt_ids", "image_rotary_emb", "rope_interpolation_scale"}  # arguments that all samples share
SHARED |= {"visual_rope_pos", "text_rope_pos", "scale_factor", "control_hidden_states_scale"}
AXES = 3  # coordinates of a token in position ids [tokens, AXES], which all samples share
UNCONDITIONAL_FIRST = "cond_uncond"  # diffusers' name of a batch that holds every prompt twice


def guidance_parts(transformer: torch.nn.Module) -> int | None:
    """Number of parts into which the attention processors split a batch; None = they do not split it."""
    processors = (vars(module).get("processor") for module in transformer.modules())
    names = [type(processor).__name__ for processor in processors if processor is not None]
    if not (perturbed := [name for name in names if name.startswith("PAG")]):
        return None
    # Perturbed-attention guidance: (unconditional,) conditional, perturbed.
    return 3 if any(name.startswith("PAGCFG") for name in perturbed) else 2


def prompt_rows(context: str | None, latents: torch.Tensor, parts: int | None = None) -> Sequence[Rows]:
    """Return the rows of each prompt in a batch of latents ``[B, …]``.

    A batch with all parts of guidance holds every prompt once in each part. The rows of a prompt must compute in the
    same step: guidance multiplies their difference, in which equal errors cancel. If ``parts`` is None and ``context``
    names no single branch (some pipelines name both without guidance), parts are counted by how often latents repeat.
    """
    batch = len(latents)
    if parts is None:
        parts = _repetitions(latents, context) if context in (None, UNCONDITIONAL_FIRST) else 1
    elif batch % parts:
        return [None]
    count = batch // parts
    return [tuple(range(row, batch, count)) for row in range(count)] if count > 1 else [None]


def _repetitions(latents: torch.Tensor, context: str | None) -> int:
    """Number of equal consecutive pieces in a batch of latents; 1 = they differ.

    Prompts with the same seed have equal latents too, so several numbers may fit. Nearly all guidance has two parts,
    the smallest. If three fits as well and the context names no two parts, the largest divides no prompt.
    """
    batch = len(latents)
    counts = (parts for parts in range(2, batch + 1) if batch % parts == 0)
    fitting = [parts for parts in counts if torch.equal(latents[batch // parts :], latents[: -(batch // parts)])]
    return max(fitting) if context is None and 3 in fitting else min(fitting, default=1)


def why_not_divisible(arguments: dict[str, Any]) -> str | None:
    """Return why a call can't run for some samples of its batch only, or None."""
    if "hidden_states" not in arguments:
        return "latents that are not called hidden_states may have no dimension for samples"
    batch = len(arguments["hidden_states"])
    for name, value in arguments.items():
        if _is_shared(name, value):
            continue
        if name in LISTED and isinstance(value, list):
            if len(value) not in (1, batch):
                return f"argument {name} has {len(value)} entries in a batch of {batch}"
            continue
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if name not in BATCHED and (tensors or isinstance(value, (list, tuple, dict))):
            return f"argument {name} is unknown and may or may not have one entry per sample"
        for tensor in tensors:
            if tensor.ndim > 0 and len(tensor) not in (1, batch):
                return f"argument {name} has a tensor of shape {list(tensor.shape)} in a batch of {batch}"
    return None


def arguments_of_rows(arguments: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Return the arguments for some samples of a call's batch, which :func:`why_not_divisible` must allow."""
    batch = len(arguments["hidden_states"])

    def take(leaf: Any) -> Any:
        has_samples = isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and len(leaf) == batch
        return take_rows(leaf, rows) if has_samples else leaf

    def of_rows(name: str, value: Any) -> Any:
        if _is_shared(name, value):
            return value
        if name in LISTED and isinstance(value, list) and len(value) == batch:
            return [value[row] for row in rows]
        return pytree.tree_map(take, value) if name in BATCHED else value

    return {name: of_rows(name, value) for name, value in arguments.items()}


def _is_shared(name: str, value: Any) -> bool:
    """Return True for an argument that all samples share; position ids are shared if they have no batch dimension."""
    has_tokens_first = name == "position_ids" and isinstance(value, torch.Tensor) and value.shape[1:] == (AXES,)
    return name in SHARED or has_tokens_first


@dataclass(frozen=True)
class TextLengths:
    """Valid text tokens of each sample, which attention may read."""

    lengths: tuple[int, ...]  # one per sample, or one for all
    counts: torch.Tensor  # the same on the device, int32 [B]
    end: int  # text tokens behind which every sample has padding only
    leading: bool = True  # all valid tokens come first

    @property
    def ragged(self) -> bool:
        """Return True if some sample has padding among its first ``end`` tokens."""
        return min(self.lengths) < self.end

    def divisible(self, shares: int, most: int) -> TextLengths:
        """Extend ``end`` to a multiple of ``shares``, the number of devices that share the text; at most ``most``."""
        end = min(-(-self.end // shares) * shares, most)
        return self if end == self.end else replace(self, end=end)

    def of_rows(self, rows: Sequence[int]) -> TextLengths:
        if len(self.lengths) == 1:
            return self
        lengths = tuple(self.lengths[row] for row in rows)
        return TextLengths(lengths, take_rows(self.counts, rows), self.end, self.leading)

    def samples(self) -> Iterator[tuple[slice, int]]:
        """Yield each sample's slice of the batch with its length; one entry if all share a length."""
        for i, length in enumerate(self.lengths):
            yield slice(i, i + 1) if len(self.lengths) > 1 else slice(None), length


class TextMasks:
    """Reads each mask once: pipelines pass the same object at every step."""

    def __init__(self) -> None:
        self._measured = WeakIdKeyDictionary()  # mask -> its version, TextLengths

    def lengths(self, mask: torch.Tensor) -> TextLengths:
        """Return the prompts' lengths from the mask ``[B, T]``; each new mask costs one host synchronisation."""
        version = 0 if mask.is_inference() else mask._version
        known = self._measured.get(mask)
        if known is None or known[0] != version:
            counts = mask.sum(dim=1, dtype=torch.int32).clamp(min=1)  # without any prompt token diffusers gives NaN
            last = (torch.arange(1, mask.shape[1] + 1, device=mask.device) * (mask != 0)).amax(dim=1)
            lengths, ends = torch.stack([counts, last]).tolist()
            leading = all(length == max(end, 1) for length, end in zip(lengths, ends, strict=True))
            found = TextLengths(tuple(lengths), counts, max(*lengths, *ends), leading)
            self._measured[mask] = known = version, found
        return known[1]
