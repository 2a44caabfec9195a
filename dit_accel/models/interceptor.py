"""Attention of a diffusers model, caught where its own processor hands queries, keys and values to it.

While an attention module runs, what its processor calls torch's ``scaled_dot_product_attention`` with comes here. The
processor projects, normalises, rotates and projects back as before, so LoRA, IP-Adapter, fused projections and
quantised layers work as they are, and a processor that is set later is caught alike. The processor itself is not
replaced: diffusers makes new ones from the class of the old (``load_ip_adapter``) and keeps them for later
(``fuse_qkv_projections``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dit_accel.errors import UnsupportedError
from dit_accel.models.families.family import Tokens
from dit_accel.models.hooks import Hook
from dit_accel.sparse.tile_site import Inputs

# Tokens, q, k, v [B, S, H, D], the mask that they came with, and dense attention of them; None = attend as before.
Attend = Callable[
    [Tokens, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, Callable[[], torch.Tensor]],
    torch.Tensor | None,
]
MISSED = (
    "attends by something else than torch's scaled_dot_product_attention: call "
    'transformer.set_attention_backend("native")'
)
MASKED = "attends under a mask"
WEIGHED = f"{MASKED} that adds to the scores; tiles are left out under one that hides padding, which is bool"
PERTURBED = "all_perturbed"  # argument of attentions that by LTX-2's guidance give values as they are
NABLA = "sparse_params"  # argument of Kandinsky's attentions in checkpoints that were trained to leave tiles out
OWN_TILES = "leaves tiles out by itself, as the checkpoint was trained to"
OTHER_KEYS = "attends over other keys than its own tokens', as with a key-value cache"


class AttentionHook(Hook):
    """Hands what an attention module attends with to somebody else.

    Args:
        tokens: of the attention to catch, asked for at each call; others (to an image prompt, say) run as they are.
            None = catch nothing.
        attend: what attends.
        missed: called with a reason after a call in which nothing was caught though something was to be.
    """

    def __init__(self, tokens: Callable[[], Tokens | None], attend: Attend, missed: Callable[[str], None]) -> None:
        super().__init__()
        self._tokens = tokens
        self._attend = attend
        self._missed = missed

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tokens = self._tokens()
        if tokens is None:
            return self.fn_ref.original_forward(*args, **kwargs)
        with Catching(tokens, self._attend) as catching:
            output = self.fn_ref.original_forward(*args, **kwargs)
        if catching.missed is not None and not kwargs.get(PERTURBED):
            self._missed(catching.missed if kwargs.get(NABLA) is None else OWN_TILES)
        return output


class Catching(TorchFunctionMode):
    """Within it, attentions ``[B, H, S, D]`` over these tokens go to ``attend``; ``missed`` says why none has."""

    def __init__(self, tokens: Tokens, attend: Attend) -> None:
        super().__init__()
        self._tokens = tokens
        self._attend = attend
        self.missed: str | None = MISSED

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
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor | None:
        tokens = self._tokens.of_attention(query.shape[2], key.shape[2])
        if tokens is None:
            self.missed = OTHER_KEYS if self.missed is MISSED else self.missed
            return None
        usual = query.shape[-1] ** -0.5
        if dropout_p or is_causal or enable_gqa or (scale is not None and abs(scale - usual) > 1e-4 * usual):
            self.missed = "attends with dropout, a causal mask, shared keys or a scale of its own"
            return None
        self.missed = None
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        output = self._attend(tokens, q, k, v, attn_mask, lambda: dense().transpose(1, 2))
        return None if output is None else output.transpose(1, 2)


def hides_keys_alone(attn_mask: torch.Tensor) -> bool:
    """Whether a mask has the form of one that hides padding: bool ``[B, 1, 1 or S, S]``."""
    return attn_mask.dtype == torch.bool and attn_mask.dim() == 4 and attn_mask.shape[1] == 1


def key_lengths(attn_mask: torch.Tensor | None, tokens: Tokens) -> torch.Tensor | None:
    """Keys that count, int32 ``[B]``, from a padding mask ``[B, 1, 1 or S, S]`` that is True where keys may be read.

    Args:
        tokens: of the attention; what a vision token may read tells, for padding may read nothing.

    Raises:
        UnsupportedError: it is another kind of mask.
    """
    if attn_mask is None:
        return None
    if not hides_keys_alone(attn_mask):
        raise UnsupportedError(
            f"attention masks must be bool [B, 1, 1 or S, S], True for keys that count, got {attn_mask.dtype} "
            f"{list(attn_mask.shape)}"
        )
    return attn_mask[:, 0, -1 if tokens.text_first and tokens.padding != "all" else 0].sum(-1, dtype=torch.int32)


def with_leading_keys(
    attend: Callable[[Inputs], torch.Tensor | None],
    tokens: Tokens,
    block: int,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dense: Callable[[], torch.Tensor],
    kv_len: torch.Tensor | None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """``attend`` of q, k and v, with padded text that comes first put behind the image, for kernels take keys that
    count first, and as many queries as keys: those that text lacks are zeros, and what they give is dropped.

    Args:
        tokens: of the attention.
        block: tokens in a block of the layout.
        qkv, dense, kv_len: as :class:`~dit_accel.sparse.tile_site.Inputs` have them.
        mask: of :func:`key_lengths`, where it tells which text counts.
    """
    is_padded = kv_len is not None and tokens.padding != "all"
    if not (tokens.text and tokens.text_first) or (tokens.text_asks and not is_padded):
        return attend(Inputs(*qkv, tokens.layout(block), dense, kv_len))
    text, layout, order = tokens.text, replace(tokens, text_first=False).layout(block), None
    if tokens.padding == "mask" and mask is not None:
        order = (~mask[:, 0, -1, :text]).int().argsort(dim=1, stable=True)[..., None, None]

    def arranged(x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] == tokens.vision:
            return functional.pad(x, (0, 0, 0, 0, 0, text))
        return torch.cat([x[:, text:], x[:, :text] if order is None else x.take_along_dim(order, 1)], dim=1)

    q, k, v = map(arranged, qkv)
    o = attend(Inputs(q, k, v, layout, lambda: arranged(dense()), kv_len))
    if o is None:
        return None
    of_vision, of_text = o.split([tokens.vision, text], dim=1)
    if not tokens.text_asks:
        return of_vision
    return torch.cat([of_text if order is None else of_text.take_along_dim(order.argsort(dim=1), 1), of_vision], dim=1)
