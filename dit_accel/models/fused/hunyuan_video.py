"""HunyuanVideo's attention, in double and single blocks, and in blocks of its image-to-video variant."""

from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from torch import nn
from torch.nn import functional

from dit_accel.kernels import gemm_q
from dit_accel.models.beside.quantized_linears import in_8_bits
from dit_accel.models.fused import parts
from dit_accel.models.fused.joint import DoubleBlockHook, JointBlockHook, SingleBlockHook
from dit_accel.models.fused.parts import Rotary
from dit_accel.sparse.head_site import HeadSite
from dit_accel.sparse.tile_site import TileSite


class _HunyuanBlockHook(JointBlockHook):
    processors = (HunyuanVideoAttnProcessor2_0,)
    text_first = False

    def new_forward(
        self,
        module: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the block's forward, without a mask if no padding is left; else the mask follows its exchanged keys."""
        if self.driver.facts.text is not None and not self.driver.facts.text.ragged:
            attention_mask = None
        elif self.driver.facts.exchange is not None:
            attention_mask = self.driver.facts.exchange.as_received(attention_mask, axis=-1)
        return super().new_forward(module, hidden_states, encoder_hidden_states, temb, attention_mask, *args, **kwargs)

    def why_unsupported(self, block: nn.Module, inputs: SimpleNamespace) -> str | None:
        norm = block.attn.norm_q
        return None if isinstance(norm, RMSNorm) else f"queries are normalised by {type(norm).__name__}, not RMSNorm"

    def attend_by_module(
        self, attn: Attention, inputs: SimpleNamespace, x: torch.Tensor, context: torch.Tensor | None
    ) -> Any:
        """Run the block's attention; the output of text padding is zeros, so that no mask is needed."""
        rotary = self.tables(inputs)
        if context is None:
            vision = inputs.hidden_states.shape[1]
            return torch.cat(self.attend_by_module(attn, inputs, x[:, :vision], x[:, vision:]), dim=1)
        if not self.is_ragged or self.driver.facts.exchange is not None:
            mask = inputs.attention_mask
            return attn(hidden_states=x, encoder_hidden_states=context, attention_mask=mask, image_rotary_emb=rotary)
        outputs = []
        for sample, length in self.driver.facts.text.samples():
            attn_x, attn_c = attn(
                hidden_states=x[sample], encoder_hidden_states=context[sample, :length], image_rotary_emb=rotary
            )
            outputs.append((attn_x, functional.pad(attn_c, (0, 0, 0, context.shape[1] - length))))
        attn_x, attn_c = zip(*outputs, strict=True)
        return torch.cat(attn_x), torch.cat(attn_c)

    def project(
        self, site: TileSite | HeadSite, attn: Attention, x: torch.Tensor, context: torch.Tensor | None, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project all tokens and rotate those of the image; in DISPATCH steps GEMM-Q computes the queries of ``x``."""
        together = not site.dispatches and in_8_bits(attn.to_q, x) is not None
        *qk, v = parts.query_key_value(attn, x) if together else [parts.heads_of(attn, attn.to_v(x))]
        if context is not None:
            q_c, k_c, v_c = parts.query_key_value(attn, context, added=True)
            v = parts.cat_tokens(v, v_c)
        q, k = torch.empty_like(v), torch.empty_like(v)
        if context is not None:
            vision = x.shape[1]
            parts.normalise_pair((attn.norm_added_q, attn.norm_added_k), q_c, k_c, out=(q[:, vision:], k[:, vision:]))
        text = (0, 0, 0, v.shape[1] - len(rotary[0]))  # tokens at the sequence's end, which are not rotated
        rotary = functional.pad(rotary[0], text, value=1.0), functional.pad(rotary[1], text)
        if together:
            tables, of_x = tuple(table[: x.shape[1]] for table in rotary), slice(x.shape[1])
            parts.normalise_pair((attn.norm_q, attn.norm_k), *qk, tables, out=(q[:, of_x], k[:, of_x]))
            return q, k, v
        self._project(attn, x, attn.to_k, attn.norm_k, rotary, out=k)
        if site.dispatches:
            site.query(x, attn.to_q.weight, attn.to_q.bias, attn.norm_q, rotary, out=q, offset=0)
        else:
            self._project(attn, x, attn.to_q, attn.norm_q, rotary, out=q)
        return q, k, v

    def _project(
        self, attn: Attention, x: torch.Tensor, linear: nn.Module, norm: RMSNorm, rotary: Rotary, *, out: torch.Tensor
    ) -> None:
        """Write queries or keys of the stream ``x`` ``[B, S, C]`` to the start of ``out`` ``[B, T, H, D]``."""
        is_plain = parts.why_not_plain(norm, x.device) is None and parts.why_not_sliceable(linear, x.device) is None
        if self.driver.facts.fuses and is_plain and norm.weight.dtype == x.dtype:
            plan = self.driver.every_row(*out.shape[:3], x.device)
            options = {"norm_weight": norm.weight, "norm_eps": norm.eps, "rope": rotary, "out": out}
            gemm_q(x, linear.weight, linear.bias, plan, **options, backend=self.preset.kernels.gemm)
        else:
            of_stream = tuple(table[: x.shape[1]] for table in rotary)
            parts.normalise_heads(norm, parts.heads_of(attn, linear(x)), of_stream, out=out[:, : x.shape[1]])


class HunyuanDualBlockHook(_HunyuanBlockHook, DoubleBlockHook):
    """Hook on ``HunyuanVideoTransformerBlock`` and ``HunyuanVideoTokenReplaceTransformerBlock``."""

    rotary = "freqs_cis"


class HunyuanSingleBlockHook(_HunyuanBlockHook, SingleBlockHook):
    """Hook on ``HunyuanVideoSingleTransformerBlock`` and ``HunyuanVideoTokenReplaceSingleTransformerBlock``."""


BLOCKS = {"transformer_blocks": HunyuanDualBlockHook, "single_transformer_blocks": HunyuanSingleBlockHook}
