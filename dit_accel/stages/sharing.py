"""Sharing of a decode among the ranks that make one image or video together; each gets the whole output.

Each rank decodes a band of rows. Before each 3 x 3 convolution neighbours exchange a row, moments of groups are added
up, and the input of the middle block's attention and the output are gathered. Ranks vote before they share, so that all
do or none does. A rank that fails exchanges empty tensors, so that no other waits; then all decode by themselves.
"""

from __future__ import annotations  # a torch without distributed has no ProcessGroup

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from dit_accel.models import denoisers
from dit_accel.models.caller import local_of
from dit_accel.models.parallel.branches import GROUP
from dit_accel.models.parallel.context_parallel import config_of
from dit_accel.stages.rows import FAILED, NO, YES, Ranks, Rows
from dit_accel.stages.vae.layers import Layers

LEAST_ROWS = 8  # of latents, in a band


def group_of(pipe: Any) -> dist.ProcessGroup | None:
    """Return the ranks that share the tokens or the branches of a pipeline's calls; None = it runs on one device."""
    for transformer in denoisers(pipe).values():
        config = config_of(transformer)
        group = getattr(transformer, GROUP, None) if config is None else config._flattened_mesh.get_group()
        if group is not None and dist.get_world_size(group) > 1:
            return group
    return None


def ranks_of(group: dist.ProcessGroup | None, device: torch.device) -> Ranks | None:
    """Return the ranks of a group whose tensors are on this device; None = it has no backend for them."""
    if group is None or not any(item.type == device.type for item in group._device_types):
        return None
    return Ranks(group, device)


def all_decode(pipe: Any, device: torch.device, *, can_share: bool) -> bool:
    """Return True if several ranks make a call of this pipeline together and each will decode its result.

    Every rank must ask, at the beginning of the call, and say if its autoencoder's decodes can be shared. Outside of a
    call, as where one rank alone encodes a prompt, no rank is asked.
    """
    ranks, wanted = ranks_of(group_of(pipe), device), local_of(pipe, "output_type")
    if ranks is None or wanted is None:
        return False
    return ranks.vote(YES if can_share and wanted != "latent" else NO) == YES


class Bands:
    """A decode whose calls all decode this rank's band of rows, by a page's function.

    Sharing is faster from a call of ``least`` latents on (pixels of all frames).
    """

    def __init__(self, ranks: Ranks, decode: Callable[..., torch.Tensor], least: int) -> None:
        self.is_agreed: bool | None = None  # None = the ranks have not voted
        self.failure: Exception | None = None  # of this rank
        self.shapes: set[tuple] = set()  # of the latents of each call that was not shared
        self.ranks = ranks
        self._decode = decode
        self._least = least

    def agree(self, shapes: set[tuple], about: Any) -> bool:
        """Return True if all ranks want to share a decode, whose calls have latents of these shapes.

        Without shapes this rank can't share it. Ranks that vote about different latents and settings do not share.
        """
        heights = [shape[-2] for shape in shapes] or [0]
        is_able = min(heights) >= self.ranks.count and max(heights) // self.ranks.count >= LEAST_ROWS
        is_large = max((math.prod(shape[2:]) for shape in shapes), default=0) >= self._least
        self.is_agreed = self.ranks.vote(YES if is_able and is_large else NO, about) == YES
        return self.is_agreed

    def output(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], layers: Layers) -> torch.Tensor:
        """Return the whole output of a call; once this rank has failed, zeros."""
        before = pytree.tree_map(lambda leaf: leaf, (args, kwargs))  # lists of their own
        layers.bands = Rows(self.ranks, args[0].shape[-2])
        if self.failure is None:
            try:
                return self._decode(module, *args, **kwargs, layers=layers)
            except Exception as error:  # whatever memory, a compiler or a kernel raises: other ranks wait for this one
                self.failure = error.with_traceback(None)  # which keeps features alive
        dtype = args[0].dtype  # kept frames may be narrower, but not in the reference
        args, named = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to("meta", dtype), before)
        meta = {id(item): nn.Parameter(item.to("meta"), requires_grad=False) for item in module.parameters()}
        meta |= {id(item): item.to("meta") for item in module.buffers()}
        shapes = Layers("reference")
        shapes.bands = layers.bands.replay()
        form = self._decode(copy.deepcopy(module, meta), *args, **named, layers=shapes)
        for name, kept in kwargs.items():
            if isinstance(kept, list):
                kept[:] = named[name]
        return torch.zeros(form.shape, dtype=form.dtype, device=self.ranks.device)

    def end(self) -> None:
        """End a shared decode, or raise :class:`FailedError` if a rank has failed."""
        if self.ranks.vote(YES if self.failure is None else FAILED) == FAILED:
            raise FailedError from self.failure


class FailedError(Exception):
    """A rank could not decode its share; the cause is its reason if it is this rank."""
