"""FLUX's attention, in double and single blocks.

IP-Adapters and LoRA keep working, because they are inside the modules that this file calls.
"""

from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor
from torch import nn

from dit_accel.models.fused import parts
from dit_accel.models.fused.joint import DoubleBlockHook, JointBlockHook, SingleBlockHook
from dit_accel.models.fused.parts import Rotary
from dit_accel.sparse.head_site import HeadSite
from dit_accel.sparse.tile_site import TileSite

# Passed to every processor when an IP-Adapter is loaded; the plain processor ignores them.
_IGNORED_ATTENTION_ARGUMENTS = {"ip_hidden_states", "ip_adapter_masks"}


class FluxBlockHook(JointBlockHook):
    """Attention of FLUX, which FLUX.2 and Qwen-Image have too."""

    processors = (FluxAttnProcessor,)
    text_first = True

    def why_unsupported(self, block: nn.Module, inputs: SimpleNamespace) -> str | None:
        unknown = set(inputs.joint_attention_kwargs or {}) - _IGNORED_ATTENTION_ARGUMENTS
        return f"joint_attention_kwargs {sorted(unknown)}" if unknown else None

    query_projection = staticmethod(parts.query_projection)

    def bounded(self, x: torch.Tensor) -> torch.Tensor:
        """Clamp the residual stream, which overflows in fp16; diffusers clamps it the same way."""
        return x.clip(-65504, 65504) if x.dtype == torch.float16 else x

    def attend_by_module(
        self, attn: FluxAttention, inputs: SimpleNamespace, x: torch.Tensor, context: torch.Tensor | None
    ) -> Any:
        extra = inputs.joint_attention_kwargs or {}
        return attn(hidden_states=x, encoder_hidden_states=context, image_rotary_emb=inputs.image_rotary_emb, **extra)

    def project(
        self, site: TileSite | HeadSite, attn: nn.Module, x: torch.Tensor, context: torch.Tensor | None, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project and rotate both streams; in DISPATCH steps GEMM-Q computes queries of the image or the sequence."""
        of_x = parts.key_value(attn, x) if site.dispatches else parts.query_key_value(attn, x)
        v, text = of_x[-1], 0 if context is None else context.shape[1]
        if context is not None:
            q_c, k_c, v_c = parts.query_key_value(attn, context, added=True)
            v = parts.cat_tokens(v_c, v)
        q, k = torch.empty_like(v), torch.empty_like(v)
        if context is not None:
            norms, text_rotary = (attn.norm_added_q, attn.norm_added_k), tuple(table[:text] for table in rotary)
            parts.normalise_pair(norms, q_c, k_c, text_rotary, out=(q[:, :text], k[:, :text]))
        x_rotary = tuple(table[text:] for table in rotary)
        if site.dispatches:
            parts.normalise_heads(attn.norm_k, of_x[0], x_rotary, out=k[:, text:])
            site.query(x, *parts.query_weight(attn), attn.norm_q, rotary, out=q, offset=text)
        else:
            parts.normalise_pair((attn.norm_q, attn.norm_k), *of_x[:2], x_rotary, out=(q[:, text:], k[:, text:]))
        return q, k, v


class FluxDoubleBlockHook(FluxBlockHook, DoubleBlockHook):
    """``FluxTransformerBlock``."""


class FluxSingleBlockHook(FluxBlockHook, SingleBlockHook):
    """``FluxSingleTransformerBlock``."""


BLOCKS = {"transformer_blocks": FluxDoubleBlockHook, "single_transformer_blocks": FluxSingleBlockHook}
