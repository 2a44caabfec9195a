"""Attention of a diffusers model, caught where its own processor hands queries, keys and values to it.

An :class:`Interceptor` wraps the processor that is in place, the way diffusers' users set one (``set_processor``).
The processor projects, normalises, rotates and projects back as before, so LoRA, IP-Adapter, fused projections and
quantised layers work as they are; what it would call torch's ``scaled_dot_product_attention`` with comes here. A
processor that somebody sets later takes its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

MISSED = (
    "attends by something else than torch's scaled_dot_product_attention: call "
    'transformer.set_attention_backend("native")'
)
FORWARDED = ("_attention_backend", "_parallel_config")  # that diffusers sets on processors

# q, k, v [B, S, H, D], keys that count int32 [B] or None, and dense attention of them; None = attend as before.
Attend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, Callable[[], torch.Tensor]], torch.Tensor | None
]


class Interceptor(nn.Module):
    """An attention processor that hands another one's attention over a sequence to somebody else.

    Args:
        own: the processor.
        tokens: length of the sequence to catch, asked for at each call; other attentions (to an image prompt, say) run
            as they are. None = catch nothing.
        attend: what attends.
        missed: called with a reason after a call in which nothing was caught though something was to be.
    """

    def __init__(
        self,
        own: Callable[..., Any],
        tokens: Callable[[], int | None],
        attend: Attend,
        missed: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.own = own
        self._tokens = tokens
        self._attend = attend
        self._missed = missed
        # diffusers reads from the signature of __call__ which arguments a processor takes.
        signature = functools.wraps(own.__call__)(lambda *args, **kwargs: None)
        object.__setattr__(self, "__call__", signature)

    def __call__(self, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tokens = self._tokens()
        if tokens is None:
            return self.own(attn, *args, **kwargs)
        with _Catching(tokens, self._attend) as catching:
            output = self.own(attn, *args, **kwargs)
        if not catching.caught:
            self._missed(MISSED)
        return output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "own":
                raise
            return getattr(self.own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FORWARDED:
            setattr(self.own, name, value)
        else:
            super().__setattr__(name, value)


def intercept(attn: nn.Module, tokens: Callable[[], int | None], attend: Attend, missed: Callable[[str], None]) -> None:
    """Puts an interceptor around the processor of a diffusers attention module."""
    attn.set_processor(Interceptor(attn.processor, tokens, attend, missed))


def release(attn: nn.Module, attend: Attend | None = None) -> bool:
    """Takes an interceptor (with ``attend``: one that hands to it) off an attention module; whether it was there."""
    held = attn.processor
    if not isinstance(held, Interceptor) or (attend is not None and held._attend != attend):
        return False
    attn.set_processor(held.own)
    return True


def own_processor(attn: nn.Module) -> Any:
    """The processor of an attention module beneath interceptors."""
    held = attn.processor
    while isinstance(held, Interceptor):
        held = held.own
    return held


class _Catching(TorchFunctionMode):
    """Within it, attentions ``[B, H, S, D]`` over so many tokens go to ``attend``."""

    def __init__(self, tokens: int, attend: Attend) -> None:
        super().__init__()
        self._length = tokens
        self._attend = attend
        self.caught = False

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is functional.scaled_dot_product_attention:
            output = self._catch(lambda: function(*args, **kwargs), *args, **kwargs)
            if output is not None:
                return output
        return function(*args, **kwargs)

    def _catch(
        self,
        dense: Callable[[], torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor | None:
        if query.shape[2] != self._length or key.shape[2] != self._length:
            return None
        self.caught = True
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        output = self._attend(q, k, v, key_lengths(attn_mask), lambda: dense().transpose(1, 2))
        return None if output is None else output.transpose(1, 2)


def key_lengths(attn_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Keys that count, int32 ``[B]``, from a mask ``[B, 1, 1 or S, S]`` that is True where keys may be read."""
    return None if attn_mask is None else attn_mask[:, 0, -1].sum(-1, dtype=torch.int32)


def text_last(
    text: int, attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]:
    """``attend`` of sequences ``[B, S, H, D]`` that begin with so many text tokens, run with these at the end.

    Kernels take keys that count first, and padded text is followed by nothing then.
    """

    def attend_turned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
        o = attend(*(torch.cat([x[:, text:], x[:, :text]], dim=1) for x in (q, k, v)))
        vision = q.shape[1] - text
        return None if o is None else torch.cat([o[:, vision:], o[:, :vision]], dim=1)

    return attend_turned
