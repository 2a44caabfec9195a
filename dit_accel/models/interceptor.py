"""Attention of a diffusers model, caught where it runs."""

from __future__ import annotations

import torch

from dit_accel.errors import UnsupportedError
from dit_accel.loop.controller import Controller
from dit_accel.loop.tracker import SchedulerClock
from dit_accel.models import adapter_class
from dit_accel.models.block_adapter import BlockAdapter
from dit_accel.presets import load_preset


def reader(name: str, transformer: torch.nn.Module) -> BlockAdapter:
    """The family's adapter, which is not attached: it only says what the arguments of a call mean."""
    cls = adapter_class(transformer)
    if not issubclass(cls, BlockAdapter):
        raise UnsupportedError(
            f"the blocks of {type(transformer).__name__} are not known here: it must be a pipeline or transformer of "
            "FLUX, HunyuanVideo or Wan"
        )
    return cls(transformer, Controller(load_preset("exact"), SchedulerClock(lambda: None), cls.family), name)


def attention_of(block: torch.nn.Module) -> torch.nn.Module:
    """The block's attention over its own tokens; Wan's blocks have another one, over the prompt."""
    return block.attn1 if hasattr(block, "attn1") else block.attn


def key_lengths(attn_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Keys before the padding, int32 ``[B]``, from a mask ``[B, 1, 1 or S, S]`` that is True where keys may be read."""
    return None if attn_mask is None else attn_mask[:, 0, -1].sum(-1, dtype=torch.int32)
