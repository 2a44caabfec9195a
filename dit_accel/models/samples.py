"""A transformer call's batch as prompts: which rows are one prompt's, the arguments of a call for some rows, and how
long the prompts are.

Nothing tells whether a tensor's first dimension is the batch but its name: position ids of as many tokens as there are
prompts look the same. So the names are listed, and a call with a tensor of another name is not divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from dit_accel.loop.rows import Rows, take_rows

BATCHED = frozenset(  # tensors, or lists of them, with an entry a sample, or with one for all
    [
        *("hidden_states", "timestep", "timestep_r", "guidance", "ofs", "fps"),
        *("encoder_hidden_states", "encoder_attention_mask", "encoder_hidden_states_mask", "attention_mask"),
        *("encoder_hidden_states_2", "encoder_attention_mask_2", "encoder_hidden_states_image", "image_embeds"),
        "pooled_projections",
        *("controlnet_block_samples", "controlnet_single_block_samples", "block_controlnet_hidden_states"),
        *("attention_kwargs", "joint_attention_kwargs"),  # a LoRA's scale, pictures of IP adapters
        *("control_hidden_states", "pose_hidden_states", "face_pixel_values"),
        *("audio_hidden_states", "audio_encoder_hidden_states", "audio_encoder_attention_mask", "audio_timestep"),
        *("sigma", "audio_sigma", "video_coords", "audio_coords"),
    ]
)
LISTED = frozenset(["img_shapes"])  # lists with an entry a sample, or with one for all
SHARED = frozenset(  # by all samples
    [
        *("img_ids", "txt_ids", "image_rotary_emb", "rope_interpolation_scale"),
        *("visual_rope_pos", "text_rope_pos", "scale_factor", "control_hidden_states_scale"),
    ]
)
UNCONDITIONAL_FIRST = "cond_uncond"  # what diffusers calls a batch that holds every prompt twice


def guidance_parts(transformer: torch.nn.Module) -> int | None:
    """Number of parts in a batch that the transformer's attention processors split, None if they split none.

    Perturbed-attention guidance puts processors into some layers which treat the last part otherwise than the others.
    Their names say whether there are three parts (unconditional, conditional, perturbed) or the latter two.
    """
    processors = (vars(module).get("processor") for module in transformer.modules())
    names = [type(processor).__name__ for processor in processors if processor is not None]
    perturbed = [name for name in names if name.startswith("PAG")]
    if not perturbed:
        return None
    return 3 if any(name.startswith("PAGCFG") for name in perturbed) else 2


def prompt_rows(context: str | None, latents: torch.Tensor, parts: int | None = None) -> Sequence[Rows]:
    """The rows of each prompt in a batch of latents ``[B, …]``.

    A call with all parts of guidance in one batch holds every prompt once in each part, and the rows of a prompt must
    compute together: guidance multiplies their difference, so errors that all have alike cancel.

    Args:
        context: of diffusers' cache. Where it names no single branch, the batch is as many parts as it is repeated
            latents; some pipelines name both branches without guidance too.
        parts: of guidance, where that is known; None = as the latents tell.
    """
    batch = len(latents)
    if parts is None:
        parts = _repetitions(latents, context) if context in (None, UNCONDITIONAL_FIRST) else 1
    elif batch % parts:
        return [None]
    count = batch // parts
    return [tuple(range(row, batch, count)) for row in range(count)] if count > 1 else [None]


def _repetitions(latents: torch.Tensor, context: str | None) -> int:
    """Number of equal pieces, one after the other, that a batch of latents is taken to consist of; 1 = they differ.

    Prompts from one seed have equal latents too, so several numbers may fit. Two is the number of parts that nearly all
    guidance has. Where three fits as well and no name says that there are two, the largest is taken: its pieces are
    parts of the others', so no prompt is divided, though some may compute together.
    """
    batch = len(latents)
    counts = (parts for parts in range(2, batch + 1) if batch % parts == 0)
    fitting = [parts for parts in counts if torch.equal(latents[batch // parts :], latents[: -(batch // parts)])]
    is_unclear = context is None and 3 in fitting
    return max(fitting) if is_unclear else min(fitting, default=1)


def why_not_divisible(arguments: dict[str, Any]) -> str | None:
    """Why a call can't be made for some samples of its batch only, or None."""
    if "hidden_states" not in arguments:
        return "latents that are not called hidden_states may have no dimension for samples"
    batch = len(arguments["hidden_states"])
    for name, value in arguments.items():
        if name in SHARED:
            continue
        if name in LISTED and isinstance(value, list):
            if len(value) not in (1, batch):
                return f"argument {name} has {len(value)} entries in a batch of {batch}"
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

    def of_rows(name: str, value: Any) -> Any:
        if name in LISTED and isinstance(value, list) and len(value) == batch:
            return [value[row] for row in rows]
        return pytree.tree_map(take, value) if name in BATCHED else value

    return {name: of_rows(name, value) for name, value in arguments.items()}


@dataclass(frozen=True)
class TextLengths:
    """Text tokens of each sample that attention may read; they come first.

    Args:
        lengths: one a sample, or one for all.
        counts: the same on the device, int32 ``[B]``.
        end: text tokens behind which every sample has padding only.
        leading: whether all that count come first.
    """

    lengths: tuple[int, ...]
    counts: torch.Tensor
    end: int
    leading: bool = True

    @property
    def ragged(self) -> bool:
        """Whether some sample still has padding among its first ``end`` tokens."""
        return min(self.lengths) < self.end

    def divisible(self, shares: int, most: int) -> TextLengths:
        """These with some padding kept, so that so many devices can share the text tokens; never more than ``most``."""
        end = min(-(-self.end // shares) * shares, most)
        return self if end == self.end else replace(self, end=end)

    def of_rows(self, rows: Sequence[int]) -> TextLengths:
        """Those of some samples."""
        if len(self.lengths) == 1:
            return self
        lengths = tuple(self.lengths[row] for row in rows)
        return TextLengths(lengths, take_rows(self.counts, rows), self.end, self.leading)

    def samples(self) -> Iterator[tuple[slice, int]]:
        """Each sample's slice of the batch with its length; one entry stands for the whole batch."""
        for i, length in enumerate(self.lengths):
            yield slice(i, i + 1) if len(self.lengths) > 1 else slice(None), length


class TextMasks:
    """Reads masks, each once: pipelines pass one object at every step."""

    def __init__(self) -> None:
        self._measured = WeakIdKeyDictionary()  # mask -> its version, TextLengths

    def lengths(self, mask: torch.Tensor) -> TextLengths:
        """The prompts' lengths from the mask ``[B, T]``; one host synchronisation a mask.

        A transformer reads as many text tokens as the mask has ones, wherever they are, and a text refiner reads those
        that the mask marks.
        """
        version = 0 if mask.is_inference() else mask._version
        known = self._measured.get(mask)
        if known is None or known[0] != version:
            counts = mask.sum(dim=1, dtype=torch.int32).clamp(min=1)  # no prompt at all is no number in diffusers
            position = torch.arange(1, mask.shape[1] + 1, device=mask.device)
            last = (position * (mask != 0)).amax(dim=1)
            lengths, ends = torch.stack([counts, last]).tolist()
            leading = all(length == max(end, 1) for length, end in zip(lengths, ends, strict=True))
            found = TextLengths(tuple(lengths), counts, max(*lengths, *ends), leading)
            self._measured[mask] = known = version, found
        return known[1]
