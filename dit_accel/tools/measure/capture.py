"""Visit the attention layers of a running pipeline: measure, record or replace them.

def visit(site, q, k, v):
    print(site.block, site.step, q.shape)

with AttentionTap(pipe, visit):
    pipe("a red fox")
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dit_accel.errors import UnsupportedError
from dit_accel.kernels.layout import TokenLayout
from dit_accel.loop.tracker import SchedulerClock
from dit_accel.models import denoisers
from dit_accel.models.families import require_family
from dit_accel.models.families.family import Attention, Family, Tokens
from dit_accel.models.hooks import find_hook, parameter_names, register_hook, remove_hook
from dit_accel.models.interceptor import AttentionHook, Caught, key_lengths, with_leading_keys
from dit_accel.models.session import timestep_of
from dit_accel.sparse.inputs import Inputs
from dit_accel.sparse.token_order import Grid, token_order


@dataclass(frozen=True)
class Site:
    """One call of an attention layer."""

    block: str  # the transformer block's name, as in the report
    step: int  # from 0
    layout: TokenLayout  # of the sequence
    kv_len: torch.Tensor | None  # int32 [B], number of keys that each sample may attend to; None = all
    grid: Grid | None  # frames, rows and columns of a video's tokens, in raster order; None for images
    first_frame_apart: bool = False  # whether any token order must keep the tokens of a video's first frame first

    def places(self, order: str) -> torch.Tensor:
        """Return the indices, int64 ``[S]``, that sort a video's tokens into an order, as ``x[:, places]``."""
        places = torch.arange(self.layout.tokens)
        if self.grid is not None:
            start = self.layout.vision_start
            places[start : start + self.layout.vision] = start + token_order(
                order, self.grid, self.layout.block, first_frame_apart=self.first_frame_apart
            )
        return places


TAP_HOOK = "dit_accel_tap"
Visit = Callable[[Site, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]


class AttentionTap:
    """Context in which every self- or joint attention of the transformer's blocks calls ``visit(site, q, k, v)``.

    q, k and v are ``[B, S, H, D]`` after norms and RoPE. If ``visit`` returns a tensor ``[B, S, H, D]``, it replaces
    the attention's output; None keeps the output. Cross-attention and text refiners are not visited. Padded text that
    comes first is moved behind the image, so that the valid keys come first. Text without queries is moved too, and its
    queries are zeros. The pipeline, which must be plain, is unchanged after the context. ``block`` = tokens of a block.

    Raises:
        UnsupportedError: the transformer's family is unsupported. Inside the context: the pipeline is accelerated, or a
            block does not use torch's ``scaled_dot_product_attention``.
    """

    def __init__(self, pipe: Any, visit: Visit, *, block: int = 128) -> None:
        self._transformers = denoisers(pipe)
        self._families = {name: require_family(transformer) for name, transformer in self._transformers.items()}
        self._visit, self._block = visit, block
        self._clock = SchedulerClock(lambda: pipe.scheduler)
        self._undo, self._step = ExitStack(), 0
        self._tokens: Tokens | None = None  # of the transformer call in progress

    @property
    def blocks(self) -> list[str]:
        """Names of the visited blocks, in order."""
        named = self._transformers.items()
        return [layer for name, model in named for layer in self._families[name].blocks(model, name)]

    def __enter__(self) -> AttentionTap:
        if any(find_hook(transformer) is not None for transformer in self._transformers.values()):
            raise UnsupportedError("AttentionTap needs a plain pipeline, got an accelerated one: call restore_pipeline")
        for name, transformer in self._transformers.items():
            family = self._families[name]
            begin = partial(self._begin, family, parameter_names(transformer))
            self._undo.callback(transformer.register_forward_pre_hook(begin, with_kwargs=True).remove)
            self._undo.callback(transformer.register_forward_hook(self._end, always_call=True).remove)
            apart = family.first_frame_apart(transformer)
            for layer in family.all_attentions(transformer, name):
                attend, seen = partial(self._attend, layer, apart), partial(self._seen, layer.sees_text)
                register_hook(layer.module, AttentionHook(seen, attend, partial(_refuse, layer.site)), TAP_HOOK)
                self._undo.callback(remove_hook, layer.module, TAP_HOOK)
        return self

    def __exit__(self, *failure: Any) -> None:
        self._undo.close()

    def _begin(self, family: Family, names: list[str], model: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        self._step = self._clock.read(timestep_of(arguments)).step
        self._tokens = family.tokens(model, arguments)

    def _end(self, *_: Any) -> None:
        self._tokens = None

    def _seen(self, sees_text: bool) -> Tokens | None:
        return None if self._tokens is None else self._tokens.seen(sees_text)

    def _attend(self, attention: Attention, first_frame_apart: bool, caught: Caught) -> torch.Tensor | None:
        def visit(inputs: Inputs) -> torch.Tensor | None:
            grid = caught.tokens.grid
            site = Site(attention.site, self._step, inputs.layout, inputs.kv_len, grid, first_frame_apart)
            return self._visit(site, *inputs[:3])

        return with_leading_keys(visit, caught, self._block, key_lengths(caught.mask, caught.tokens))


def _refuse(site: str, reason: str) -> None:
    raise UnsupportedError(f"block {site} {reason}")
