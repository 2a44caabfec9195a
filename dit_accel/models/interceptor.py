"""Interception of a diffusers model's attention, at the call of torch's ``scaled_dot_product_attention``.

While an attention module runs, this receives the queries, keys and values that its processor passes to torch. So LoRA,
IP-Adapter, fused projections and quantised layers keep working, and processors that are set later are intercepted too.
The processor is not replaced, because diffusers creates new ones from its class (``load_ip_adapter``) and stores it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dit_accel.errors import UnsupportedError
from dit_accel.models.families.family import Tokens
from dit_accel.models.hooks import Hook, parameter_names
from dit_accel.sparse.inputs import Inputs


class Caught(NamedTuple):
    """One call of torch's attention, of the tokens of a module's call."""

    tokens: Tokens
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # [B, S, H, D] each
    mask: torch.Tensor | None  # may mark the valid text tokens
    dense: Callable[[], torch.Tensor]  # the model's own attention, [B, S, H, D]
    x: torch.Tensor | None = None  # the module's first argument


Attend = Callable[[Caught], torch.Tensor | None]  # to the output [B, S, H, D]; None = run the model's own
MISSED = (
    "attends without calling torch's scaled_dot_product_attention: select it with "
    'transformer.set_attention_backend("native")'
)
MASKED = "attends under a mask"
WEIGHED = f"{MASKED} that adds to the scores; tiles are skipped only under a bool mask that hides padding"
PERTURBED = "all_perturbed"  # argument with which LTX-2's guidance makes an attention return its values
NABLA = "sparse_params"  # argument of Kandinsky's attention in checkpoints that were trained to skip tiles
OWN_TILES = "already skips tiles, as the checkpoint was trained to"
OTHER_KEYS = "attends to other keys than its own tokens', for example a key-value cache"


class AttentionHook(Hook):
    """Passes attention of a module to ``attend``.

    ``tokens`` returns the tokens of a call to intercept, or None. Other attentions of the module, such as those to an
    image prompt, run unchanged. ``missed`` gets the reason why a call was not intercepted.
    """

    def __init__(self, tokens: Callable[[], Tokens | None], attend: Attend, missed: Callable[[str], None]) -> None:
        super().__init__()
        self._tokens = tokens
        self._attend = attend
        self._missed = missed

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (tokens := self._tokens()) is None:
            return self.fn_ref.original_forward(*args, **kwargs)
        x = args[0] if args else kwargs[parameter_names(module)[0]]
        with Catching(tokens, lambda caught: self._attend(caught._replace(x=x))) as catching:
            output = self.fn_ref.original_forward(*args, **kwargs)
        if catching.missed is not None and not kwargs.get(PERTURBED):
            self._missed(catching.missed if kwargs.get(NABLA) is None else OWN_TILES)
        return output


class Catching(TorchFunctionMode):
    """Context that passes attention ``[B, H, S, D]`` over the tokens to ``attend``; ``missed`` = why none came."""

    def __init__(self, tokens: Tokens, attend: Attend) -> None:
        super().__init__()
        self._tokens = tokens
        self._attend = attend
        self.missed: str | None = MISSED

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
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
        if (tokens := self._tokens.of_attention(query.shape[2], key.shape[2])) is None:
            self.missed = OTHER_KEYS if self.missed is MISSED else self.missed
            return None
        usual = query.shape[-1] ** -0.5
        if dropout_p or is_causal or enable_gqa or (scale is not None and abs(scale - usual) > 1e-4 * usual):
            self.missed = "attends with dropout, a causal mask, shared keys or its own scale"
            return None
        self.missed = None
        qkv = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        output = self._attend(Caught(tokens, qkv, attn_mask, lambda: dense().transpose(1, 2)))
        return None if output is None else output.transpose(1, 2)


def hides_keys_alone(attn_mask: torch.Tensor) -> bool:
    """Return True if a mask has the form of a padding mask: bool ``[B, 1, 1 or S, S]``."""
    return attn_mask.dtype == torch.bool and attn_mask.dim() == 4 and attn_mask.shape[1] == 1


def key_lengths(attn_mask: torch.Tensor | None, tokens: Tokens) -> torch.Tensor | None:
    """Number of valid keys, int32 ``[B]``, from a bool padding mask ``[B, 1, 1 or S, S]``; other forms are refused."""
    if attn_mask is None:
        return None
    if not hides_keys_alone(attn_mask):
        got = f"{attn_mask.dtype} {list(attn_mask.shape)}"
        raise UnsupportedError(f"attention masks must be bool [B, 1, 1 or S, S], True for valid keys, got {got}")
    # At a vision token, because rows of padding may be all False.
    return attn_mask[:, 0, -1 if tokens.text_first and tokens.padding != "all" else 0].sum(-1, dtype=torch.int32)


def with_leading_keys(
    attend: Callable[[Inputs], torch.Tensor | None], caught: Caught, block: int, kv_len: torch.Tensor | None
) -> torch.Tensor | None:
    """Run ``attend`` with padded text moved from the front to behind the image, because kernels need valid keys first.

    Kernels also need as many queries as keys: if text has no queries, zeros stand for them and their output is dropped.
    ``kv_len`` is that of :class:`~dit_accel.sparse.inputs.Inputs`.
    """
    tokens, qkv, mask, dense, x = caught
    is_padded = kv_len is not None and tokens.padding != "all"
    if not (tokens.text and tokens.text_first) or (tokens.text_asks and not is_padded):
        return attend(Inputs(*qkv, tokens.layout(block), dense, kv_len, x=x))
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
