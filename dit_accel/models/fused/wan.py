"""Wan's block, as a recording, a sparse and a forecast call run it: self-attention, cross-attention to the prompt, MLP.

Queries are normalised across all heads, so GEMM-Q computes a row-block whole if any of its heads computes. The same
row-blocks compute cross-attention; the others take its output from the forecast.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import nn
from torch.nn import functional

from dit_accel.kernels import add_gated, add_gated_norm_modulate, gemm_q, norm_modulate
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.symbols import MAX_HEADS, AttentionPlan
from dit_accel.models.block_context import BlockContext
from dit_accel.models.fused.block_hook import BlockHook
from dit_accel.models.fused.parts import Rotary, feed_forward, normalise_heads, normalise_pair, why_not_plain
from dit_accel.sparse.site import SparseSite

TEXT_TOKENS = 512  # of a prompt, where image tokens precede it; diffusers' processor has the same number


class WanBlockHook(BlockHook):
    """``WanTransformerBlock``."""

    def why_dense(self, block: nn.Module, **arguments: Any) -> str | None:
        for processor in (block.attn1.processor, block.attn2.processor):
            if type(processor) is not WanAttnProcessor:
                return f"attention processor {type(processor).__name__}"
            if getattr(processor, "_parallel_config", None) is not None:
                return "context parallelism"
        return None

    def sliced(self, block: nn.Module) -> list[nn.Module]:
        attn, cross = block.attn1, block.attn2
        return [attn.to_qkv if attn.fused_projections else attn.to_q, attn.to_out[0], cross.to_q, cross.to_out[0]]

    def compute(
        self,
        block: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        x = hidden_states
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = _modulation(block, temb, range(6))
        norm_x = norm_modulate(x, scale, shift, eps=block.norm1.eps)
        site = self.site()
        rows = _rows_of_any_head(site.plan) if site.dispatches else None
        if self.runs_attention(block):
            attended = self.attend(site, block.attn1, norm_x, rotary_emb, rows)
        else:
            attended = block.attn1(norm_x, None, None, rotary_emb)
        x, norm_x = _add_and_normalise(x, attended, gate, block.norm2)
        if self.runs_attention(block):
            crossed = self.attend_to_prompt(block.attn2, norm_x, encoder_hidden_states, rows)
        else:
            crossed = block.attn2(norm_x, encoder_hidden_states, None, None)
        x, norm_x = add_gated_norm_modulate(x, crossed, None, mlp_scale, mlp_shift, eps=block.norm3.eps)
        mlp = feed_forward(block.ffn, norm_x)
        self.remember("attention and mlp", (attended, mlp))
        self.remember("cross-attention", (crossed,), by_row=True)
        return add_gated(x, mlp, mlp_gate)

    def forecast(
        self,
        block: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Attention, cross-attention and MLP from the cache; gates are fresh."""
        gate, mlp_gate = _modulation(block, temb, (2, 5))
        attended, mlp = self.recall("attention and mlp")
        (crossed,) = self.recall("cross-attention")
        x = add_gated(add_gated(hidden_states, attended, gate), crossed, None)
        return add_gated(x, mlp, mlp_gate)

    def attend(
        self,
        site: SparseSite,
        attn: WanAttention,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        rows: AttentionPlan | None,
    ) -> torch.Tensor:
        """Self-attention ``[B, S, C]`` through its output projection; ``rows`` of a DISPATCH step."""
        out = attn.to_out[0]
        if rows is None:
            q, k, v = _query_key_value(attn, x)
        else:
            q = gemm_q(x, *_query_weight(attn), rows, backend=self.controller.preset.kernels.gemm).flatten(2)
            k, v = _key_value(attn, x)
        tables, v = _tables(rotary), _split(attn, v)
        q, k = normalise_pair((attn.norm_q, attn.norm_k), _split(attn, q), _split(attn, k), tables)
        if rows is None:
            layout = TokenLayout(0, x.shape[1], self.controller.preset.blocks.size)
            backend = attn.processor._attention_backend
            o = site.attend_computed(q, k, v, layout, lambda: self.attend_densely(q, k, v, backend))
        else:
            o = site.attend(q, k, v)
        projected = site.project_out(o, out.weight, out.bias) if site.caches_bias else out(o.flatten(2))
        return attn.to_out[1](projected)

    def attend_to_prompt(
        self, attn: WanAttention, x: torch.Tensor, context: torch.Tensor, rows: AttentionPlan | None
    ) -> torch.Tensor:
        """Cross-attention ``[B, S, C]``; of a DISPATCH step fresh in ``rows``, and forecast elsewhere.

        There both projections run in ``rows`` alone. The softmax over the prompt's few keys runs everywhere, on
        whatever the other queries hold, and what it gives there is not read.
        """
        gemm, out = self.controller.preset.kernels.gemm, attn.to_out[0]
        if rows is None:
            q = _split(attn, attn.to_q(x))
            return attn.to_out[1](out(_prompt_attention(attn, normalise_heads(attn.norm_q, q), context)))
        q = gemm_q(x, attn.to_q.weight, attn.to_q.bias, rows, backend=gemm)
        o = _prompt_attention(attn, normalise_heads(attn.norm_q, q), context)
        (crossed,) = self.recall("cross-attention")
        gemm_q(o, out.weight, out.bias, rows, out=_split(attn, crossed), backend=gemm)
        return crossed


def _rows_of_any_head(plan: AttentionPlan) -> AttentionPlan:
    """A plan for GEMM-Q in which a row-block computes with all heads where it does with any."""
    every_head = (1 << plan.heads) - 1 if plan.heads < MAX_HEADS else -1
    return replace(plan, mask64=torch.where(plan.mask64 != 0, every_head, 0))


def _modulation(block: nn.Module, temb: torch.Tensor, parts: Iterable[int]) -> list[torch.Tensor]:
    """Chosen ones of shift, scale and gate of attention, then of the MLP, float32 ``[B, 1, C]``.

    With a timestep per token, as ``expand_timesteps`` gives, they are ``[B, S, C]``.
    """
    temb = temb if temb.ndim == 4 else temb[:, None]  # [B, 1 or S, 6, C]
    return [block.scale_shift_table[:, part] + temb[:, :, part].float() for part in parts]


def _add_and_normalise(
    x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor, norm: nn.Module
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x + update * gate``, and its norm, whose weight and bias are a modulation; some models have none there."""
    if isinstance(norm, nn.Identity) or why_not_plain(norm, x.device) is not None:
        x = add_gated(x, update, gate)
        return x, norm(x.float()).type_as(x)
    scale, shift = (norm.weight.float() - 1)[None, None], norm.bias.float()[None, None]
    return add_gated_norm_modulate(x, update, gate, scale, shift, eps=norm.eps)


def _tables(rotary: tuple[torch.Tensor, torch.Tensor]) -> Rotary:
    """Wan's RoPE tables ``[1, S, 1, D]`` as ``[S, D]``."""
    return tuple(table[0, :, 0].float() for table in rotary)


def _dense(attn: WanAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return dispatch_attention_fn(q, k, v, backend=attn.processor._attention_backend).type_as(q)


def _prompt_attention(attn: WanAttention, q: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """Attention of q ``[B, S, H, D]`` to the prompt, plus that to image tokens before it -> ``[B, S, C]``."""
    image_tokens = 0 if attn.add_k_proj is None else context.shape[1] - TEXT_TOKENS
    text = context[:, image_tokens:]
    key, value = attn.to_kv(text).chunk(2, dim=-1) if attn.fused_projections else (attn.to_k(text), attn.to_v(text))
    o = _dense(attn, q, _split(attn, attn.norm_k(key)), _split(attn, value)).flatten(2)
    if attn.add_k_proj is None:
        return o
    image = context[:, :image_tokens]
    if attn.fused_projections:
        key, value = attn.to_added_kv(image).chunk(2, dim=-1)
    else:
        key, value = attn.add_k_proj(image), attn.add_v_proj(image)
    return o + _dense(attn, q, _split(attn, attn.norm_added_k(key)), _split(attn, value)).flatten(2)


def _split(attn: WanAttention, x: torch.Tensor) -> torch.Tensor:
    """``[B, S, H * D]`` -> ``[B, S, H, D]``."""
    return x.unflatten(2, (attn.heads, -1))


def _query_key_value(attn: WanAttention, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values ``[B, S, H * D]``, before their norms."""
    return attn.to_qkv(x).chunk(3, dim=-1) if attn.fused_projections else (attn.to_q(x), attn.to_k(x), attn.to_v(x))


def _query_weight(attn: WanAttention) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight ``[H * D, C]`` and bias of the query projection, a slice where q, k and v are fused."""
    if not attn.fused_projections:
        return attn.to_q.weight, attn.to_q.bias
    return attn.to_qkv.weight[: attn.inner_dim], attn.to_qkv.bias[: attn.inner_dim]


def _key_value(attn: WanAttention, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Keys and values ``[B, S, H * D]`` without the queries."""
    if not attn.fused_projections:
        return attn.to_k(x), attn.to_v(x)
    projection = attn.to_qkv
    return functional.linear(x, projection.weight[attn.inner_dim :], projection.bias[attn.inner_dim :]).chunk(2, dim=-1)


def block_hook(name: str, block: nn.Module, context: BlockContext) -> BlockHook:
    """Stands in for one of Wan's blocks."""
    return WanBlockHook(name, context)
