"""Wan's block in recording, sparse and forecast calls: self-attention, cross-attention to the prompt, and an MLP.

Queries are normalised across all heads, so GEMM-Q computes all heads of a row-block if any of them computes. The same
row-blocks compute cross-attention; the others take its output from the forecast.
"""

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import nn

from dit_accel.kernels import add_gated, add_gated_norm_modulate, gemm_q, norm_modulate
from dit_accel.kernels.symbols import MAX_HEADS, AttentionPlan
from dit_accel.models.beside.quantized_linears import project, project_together
from dit_accel.models.fused import parts
from dit_accel.models.fused.block_hook import BlockHook
from dit_accel.models.fused.parts import Rotary
from dit_accel.sparse.head_site import HeadSite
from dit_accel.sparse.tile_site import TileSite

TEXT_TOKENS = 512  # tokens of a prompt behind image tokens; diffusers' processor has the same number


class WanBlockHook(BlockHook):
    """``WanTransformerBlock``."""

    processors = (WanAttnProcessor,)
    attentions = ("attn1", "attn2")

    def sliced(self, block: nn.Module) -> list[nn.Module]:
        attn, cross = block.attn1, block.attn2
        return [parts.query_projection(attn), attn.to_out[0], cross.to_q, cross.to_out[0]]

    def compute(self, block: nn.Module, inputs: SimpleNamespace) -> torch.Tensor:
        x, context = inputs.hidden_states, inputs.encoder_hidden_states
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = _modulation(block, inputs.temb, range(6))
        norm_x = self.normalise(norm_modulate, x, scale, shift, eps=block.norm1.eps)
        site = self.site()
        rows = _rows_of_any_head(site.plan) if site.dispatches else None
        if self.runs_attention(block, inputs):
            attended = self.attend(site, block.attn1, norm_x, inputs.rotary_emb, rows)
        else:
            attended = block.attn1(norm_x, None, None, inputs.rotary_emb)
        x, norm_x = self.add_and_normalise(x, attended, gate, block.norm2)
        if self.runs_attention(block, inputs):
            crossed = self.attend_to_prompt(block.attn2, norm_x, context, rows)
        else:
            crossed = block.attn2(norm_x, context, None, None)
        values, eps = (crossed, None, mlp_scale, mlp_shift), block.norm3.eps
        x, norm_x = self.normalise(add_gated_norm_modulate, x, *values, eps=eps)
        mlp = parts.feed_forward(block.ffn, norm_x)
        self.remember("attention and mlp", (attended, mlp))
        self.remember("cross-attention", (crossed,), by_row=True)
        return add_gated(x, mlp, mlp_gate)

    def forecast(self, block: nn.Module, inputs: SimpleNamespace) -> torch.Tensor:
        """Attention, cross-attention and MLP from the cache; gates are fresh."""
        gate, mlp_gate = _modulation(block, inputs.temb, (2, 5))
        attended, mlp = self.recall("attention and mlp")
        (crossed,) = self.recall("cross-attention")
        return add_gated(add_gated(add_gated(inputs.hidden_states, attended, gate), crossed, None), mlp, mlp_gate)

    def add_and_normalise(self, x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor, norm: nn.Module) -> Any:
        """Return ``x + update * gate`` and its norm, whose weight and bias are a modulation, or which is no norm."""
        if isinstance(norm, nn.Identity) or parts.why_not_plain(norm, x.device) is not None:
            x = add_gated(x, update, gate)
            return x, norm(x.float()).type_as(x)
        scale, shift = (norm.weight.float() - 1)[None, None], norm.bias.float()[None, None]
        return self.normalise(add_gated_norm_modulate, x, update, gate, scale, shift, eps=norm.eps)

    def attend(
        self, site: TileSite | HeadSite, attn: WanAttention, x: torch.Tensor, rotary: Rotary, rows: AttentionPlan | None
    ) -> torch.Tensor:
        """Self-attention ``[B, S, C]`` with its output projection; ``rows`` is the plan of a DISPATCH step."""
        if rows is None:
            q, k, v = parts.query_key_value(attn, x)
        else:
            q = gemm_q(x, *parts.query_weight(attn), rows, backend=self.preset.kernels.gemm)
            k, v = parts.key_value(attn, x)
        tables = tuple(table[0, :, 0].float() for table in rotary)  # of [1, S, 1, D]
        q, k = parts.normalise_pair((attn.norm_q, attn.norm_k), q, k, tables)
        o = self.attend_computed(site, attn, q, k, v, x=x) if rows is None else site.attend(site.plan, q, k, v)
        return attn.to_out[1](self.project_out(site, attn.to_out[0], o))

    def attend_to_prompt(
        self, attn: WanAttention, x: torch.Tensor, context: torch.Tensor, rows: AttentionPlan | None
    ) -> torch.Tensor:
        """Cross-attention ``[B, S, C]``; in a DISPATCH step projected in ``rows`` only, and forecast elsewhere."""
        gemm, out = self.preset.kernels.gemm, attn.to_out[0]
        if rows is None:
            q = parts.normalise_heads(attn.norm_q, parts.heads_of(attn, project(attn.to_q, x)))
            return attn.to_out[1](project(out, _prompt_attention(attn, q, context)))
        q = gemm_q(x, attn.to_q.weight, attn.to_q.bias, rows, backend=gemm)
        o = _prompt_attention(attn, parts.normalise_heads(attn.norm_q, q), context)
        (crossed,) = self.recall("cross-attention")
        gemm_q(o, out.weight, out.bias, rows, out=parts.heads_of(attn, crossed), backend=gemm)
        return crossed


def _rows_of_any_head(plan: AttentionPlan) -> AttentionPlan:
    """Return a plan for GEMM-Q in which a row-block computes all heads if it computes any."""
    every_head = (1 << plan.heads) - 1 if plan.heads < MAX_HEADS else -1
    return replace(plan, mask64=torch.where(plan.mask64 != 0, every_head, 0))


def _modulation(block: nn.Module, temb: torch.Tensor, parts: Iterable[int]) -> list[torch.Tensor]:
    """Return some of shift, scale and gate of attention, then of the MLP, float32 ``[B, 1 or S, C]``."""
    temb = temb if temb.ndim == 4 else temb[:, None]  # [B, 1 or S, 6, C]
    return [block.scale_shift_table[:, part] + temb[:, :, part].float() for part in parts]


def _prompt_attention(attn: WanAttention, q: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """Attention of q ``[B, S, H, D]`` to the prompt, plus attention to image tokens before it -> ``[B, S, C]``."""
    has_image, fused = attn.add_k_proj is not None, attn.fused_projections
    image_tokens = context.shape[1] - TEXT_TOKENS if has_image else 0
    text, image = context[:, image_tokens:], context[:, :image_tokens]
    key, value = attn.to_kv(text).chunk(2, dim=-1) if fused else project_together((attn.to_k, attn.to_v), text)
    o = _attention_to(attn, q, attn.norm_k(key), value)
    if not has_image:
        return o
    key, value = attn.to_added_kv(image).chunk(2, dim=-1) if fused else (attn.add_k_proj(image), attn.add_v_proj(image))
    return o + _attention_to(attn, q, attn.norm_added_k(key), value)


def _attention_to(attn: WanAttention, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of q ``[B, S, H, D]`` to tokens outside of the sequence, ``[B, N, H * D]``."""
    k, v = parts.heads_of(attn, key), parts.heads_of(attn, value)
    return dispatch_attention_fn(q, k, v, backend=attn.processor._attention_backend).type_as(q).flatten(2)


BLOCKS = {"blocks": WanBlockHook}
