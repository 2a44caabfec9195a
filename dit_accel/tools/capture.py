"""A pipeline's attentions as they run: their queries, keys and values, to measure, to keep, or to attend otherwise.

def visit(site, q, k, v):
    print(site.block, site.step, q.shape)

with AttentionTap(pipe, visit):
    pipe("a red fox")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dit_accel.errors import UnsupportedError
from dit_accel.kernels.layout import TokenLayout
from dit_accel.loop.tracker import SchedulerClock
from dit_accel.models import denoisers
from dit_accel.models.block_adapter import BlockAdapter
from dit_accel.models.interceptor import attention_of, key_lengths, reader
from dit_accel.models.token_order_hook import VideoAdapter
from dit_accel.models.transformer_hook import find_hook
from dit_accel.sparse.token_order import Grid, token_order


@dataclass(frozen=True)
class Site:
    """Where an attention runs.

    Args:
        block: the transformer block's name, as in the report.
        step: denoising step, from 0. Of a bare transformer: how often its timestep has changed under the tap.
        layout: tokens of the sequence.
        kv_len: int32 ``[B]``, keys of each sample that the attention may read; None = all.
        grid: of a clip's tokens, which run in raster order; None for pictures.
        first_frame_apart: whether an order of the clip's tokens must keep those of the first frame first.
    """

    block: str
    step: int
    layout: TokenLayout
    kv_len: torch.Tensor | None
    grid: Grid | None
    first_frame_apart: bool = False

    def places(self, order: str) -> torch.Tensor:
        """Puts the clip's tokens into an order of :mod:`dit_accel.sparse.token_order`.

        Returns:
            int64 ``[S]``, for ``x[:, places]``.
        """
        places = torch.arange(self.layout.tokens)
        if self.grid is not None:
            start = self.layout.vision_start
            places[start : start + self.layout.vision] = start + token_order(
                order, self.grid, self.layout.block, first_frame_apart=self.first_frame_apart
            )
        return places


Visit = Callable[[Site, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]


class AttentionTap(TorchFunctionMode):
    """While it is on, every self- or joint attention of the transformer's blocks calls ``visit(site, q, k, v)``.

    q, k and v are ``[B, S, H, D]`` after norms and RoPE. A tensor that ``visit`` returns, ``[B, S, H, D]``, takes the
    place of the attention's output, and gradients flow through it; None leaves the attention as it is. Cross-attention
    and text refiners are not visited. The pipeline is as before once the tap is off.

    Args:
        pipe: a plain (not accelerated) pipeline of FLUX, HunyuanVideo or Wan, or a transformer of one.
        visit: called for each attention, in the order in which they run.
        block: tokens in a block of ``site.layout``.

    Raises:
        UnsupportedError: the blocks of this transformer are not known here; and while the tap is on: the pipeline is
            accelerated, or a block attends by something else than torch's ``scaled_dot_product_attention``.
    """

    def __init__(self, pipe: Any, visit: Visit, *, block: int = 128) -> None:
        super().__init__()
        is_pipeline = not isinstance(pipe, torch.nn.Module)
        transformers = denoisers(pipe) if is_pipeline else {"transformer": pipe}
        self._visit = visit
        self._block = block
        self._clock = SchedulerClock(lambda: pipe.scheduler) if is_pipeline else _ChangeClock()
        self._adapters = [reader(name, transformer) for name, transformer in transformers.items()]
        self._handles: list[Any] = []
        self._call: Site | None = None  # the transformer call in progress; its block and kv_len are not set
        self._block_name: str | None = None  # the block whose attention is in progress
        self._visited = False  # whether it has come by

    @property
    def blocks(self) -> list[str]:
        """Names of the blocks that are visited, in order."""
        return [name for adapter in self._adapters for name in adapter.blocks()]

    def __enter__(self) -> AttentionTap:
        for adapter in self._adapters:
            if find_hook(adapter.transformer) is not None:
                raise UnsupportedError(
                    "an AttentionTap needs a plain pipeline, got an accelerated one: restore it first"
                )
        for adapter in self._adapters:
            begin, end = self._call_hooks(adapter)
            self._handles.append(adapter.transformer.register_forward_pre_hook(begin, with_kwargs=True))
            self._handles.append(adapter.transformer.register_forward_hook(end, always_call=True))
            for name, block in adapter.blocks().items():
                begin, end = self._attention_hooks(name)
                self._handles.append(attention_of(block).register_forward_pre_hook(begin))
                self._handles.append(attention_of(block).register_forward_hook(end, always_call=True))
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        while self._handles:
            self._handles.pop().remove()

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is functional.scaled_dot_product_attention and self._block_name is not None:
            replacement = self._attention(*args, **kwargs)
            if replacement is not None:
                return replacement
        return function(*args, **kwargs)

    def _call_hooks(self, adapter: BlockAdapter) -> tuple[Callable, Callable]:
        def begin(model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            arguments = adapter.named(args, kwargs)
            self._call = Site(
                block="",
                step=self._clock.read(arguments["timestep"]).step,
                layout=replace(adapter.layout(arguments), block=self._block),
                kv_len=None,
                grid=adapter.grid(arguments) if isinstance(adapter, VideoAdapter) else None,
                first_frame_apart=isinstance(adapter, VideoAdapter) and adapter.first_frame_apart,
            )

        def end(*_: Any) -> None:
            self._call = None

        return begin, end

    def _attention_hooks(self, name: str) -> tuple[Callable, Callable]:
        def begin(*_: Any) -> None:
            self._block_name, self._visited = name, False

        def end(attn: torch.nn.Module, inputs: Any, output: Any) -> None:
            self._block_name = None
            if not self._visited and output is not None:  # None where the attention raised
                raise UnsupportedError(
                    f"block {name} attends by something else than torch's scaled_dot_product_attention: "
                    'call transformer.set_attention_backend("native")'
                )

        return begin, end

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor | None:
        """One attention ``[B, H, S, D]`` within a block's attention module, which may run others (IP-Adapter)."""
        tokens = self._call.layout.tokens
        if query.shape[2] != tokens or key.shape[2] != tokens:
            return None
        self._visited = True
        site = replace(self._call, block=self._block_name, kv_len=key_lengths(attn_mask))
        output = self._visit(site, *(x.transpose(1, 2) for x in (query, key, value)))
        return None if output is None else output.transpose(1, 2)


class _ChangeClock:
    """Counts how often the timestep of a transformer's calls changes."""

    def __init__(self) -> None:
        self.step = -1
        self._timestep: float | None = None

    def read(self, timestep: torch.Tensor | float) -> _ChangeClock:
        value = float(timestep.max()) if isinstance(timestep, torch.Tensor) else float(timestep)
        if value != self._timestep:
            self._timestep = value
            self.step += 1
        return self
