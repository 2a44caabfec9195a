"""FLUX's two kinds of blocks, as a recording, a sparse and a forecast call run them.

IP-Adapter projections and LoRA live inside the modules called here, and keep working.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor
from torch import nn
from torch.nn import functional

from dit_accel.kernels import add_gated, add_gated_norm_modulate, norm_modulate
from dit_accel.kernels.layout import TokenLayout
from dit_accel.models.block_context import BlockContext
from dit_accel.models.fused.block_hook import BlockHook
from dit_accel.models.fused.parts import (
    Rotary,
    feed_forward,
    join_streams,
    normalise_heads,
    normalise_pair,
    project_gelu,
)
from dit_accel.sparse.site import SparseSite

# Passed to every processor when an IP-Adapter is loaded; the plain processor takes no notice of them.
_IGNORED_ATTENTION_ARGUMENTS = {"ip_hidden_states", "ip_adapter_masks"}


class _FluxBlockHook(BlockHook):
    """What FLUX's block kinds share; both take text and image streams ``[B, S, C]`` and return the same two."""

    def attend_computed(
        self, site: SparseSite, attn: FluxAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, text: int
    ) -> torch.Tensor:
        """Joint attention ``[B, S, H, D]`` of a call that computes every row."""
        layout = TokenLayout(text, q.shape[1] - text, self.controller.preset.blocks.size)
        backend = getattr(attn.processor, "_attention_backend", None)
        return site.attend_computed(q, k, v, layout, lambda: self.attend_densely(q, k, v, backend))

    def why_dense(self, block: nn.Module, joint_attention_kwargs: dict[str, Any] | None = None, **_: Any) -> str | None:
        """Why this block's attention can't be replaced now, or None."""
        processor = block.attn.processor
        if type(processor) is not FluxAttnProcessor:
            return f"attention processor {type(processor).__name__}"
        if getattr(processor, "_parallel_config", None) is not None:
            return "context parallelism"
        unknown = set(joint_attention_kwargs or {}) - _IGNORED_ATTENTION_ARGUMENTS
        return f"joint_attention_kwargs {sorted(unknown)}" if unknown else None


class DoubleBlockHook(_FluxBlockHook):
    """``FluxTransformerBlock``."""

    def sliced(self, block: nn.Module) -> list[nn.Module]:
        return [_query_projection(block.attn), block.attn.to_out[0]]

    def compute(
        self,
        block: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor],
        joint_attention_kwargs: dict[str, Any] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, context = hidden_states, encoder_hidden_states
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = _modulations(block.norm1, temb, 6)
        c_shift, c_scale, c_gate, c_mlp_shift, c_mlp_scale, c_mlp_gate = _modulations(block.norm1_context, temb, 6)
        norm_x, norm_c = norm_modulate(x, scale, shift), norm_modulate(context, c_scale, c_shift)
        attended = self.attend(block, norm_x, norm_c, image_rotary_emb, joint_attention_kwargs)
        self.remember("attention", attended)
        attn_x, attn_c, *ip = attended
        x, norm_x = add_gated_norm_modulate(x, attn_x, gate, mlp_scale, mlp_shift)
        context, norm_c = add_gated_norm_modulate(context, attn_c, c_gate, c_mlp_scale, c_mlp_shift)
        mlp_x, mlp_c = feed_forward(block.ff, norm_x), feed_forward(block.ff_context, norm_c)
        self.remember("mlp", (mlp_x, mlp_c))
        x, context = add_gated(x, mlp_x, mlp_gate), add_gated(context, mlp_c, c_mlp_gate)
        for image_prompt in ip:
            x = x + image_prompt
        return _clip_half(context), x

    def forecast(
        self,
        block: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention and MLP from the cache; gates are fresh."""
        attn_x, attn_c, *ip = self.recall("attention")
        mlp_x, mlp_c = self.recall("mlp")
        gate, mlp_gate = _modulations(block.norm1, temb, 6)[2::3]
        c_gate, c_mlp_gate = _modulations(block.norm1_context, temb, 6)[2::3]
        x = add_gated(add_gated(hidden_states, attn_x, gate), mlp_x, mlp_gate)
        for image_prompt in ip:
            x = x + image_prompt
        context = add_gated(add_gated(encoder_hidden_states, attn_c, c_gate), mlp_c, c_mlp_gate)
        return _clip_half(context), x

    def attend(
        self,
        block: nn.Module,
        x: torch.Tensor,
        context: torch.Tensor,
        rotary: Rotary,
        joint_attention_kwargs: dict[str, Any] | None,
    ) -> tuple[torch.Tensor, ...]:
        """Joint attention of both streams, through their output projections."""
        attn = block.attn
        if not self.runs_attention(block, joint_attention_kwargs=joint_attention_kwargs):
            extra = joint_attention_kwargs or {}
            return attn(hidden_states=x, encoder_hidden_states=context, image_rotary_emb=rotary, **extra)
        site, text, out = self.site(), context.shape[1], attn.to_out[0]
        text_rotary, image_rotary = (
            tuple(table[part] for table in rotary) for part in (slice(text), slice(text, None))
        )
        q_c, k_c, v_c = _context_query_key_value(attn, context)
        if site.dispatches:
            k_x, v_x = _key_value(attn, x)
        else:
            q_x, k_x, v_x = _query_key_value(attn, x)
        v = torch.cat([v_c, v_x], dim=1)
        q, k = torch.empty_like(v), torch.empty_like(v)
        context_norms = attn.norm_added_q, attn.norm_added_k
        normalise_pair(context_norms, q_c, k_c, text_rotary, out=(q[:, :text], k[:, :text]))
        if site.dispatches:
            normalise_heads(attn.norm_k, k_x, image_rotary, out=k[:, text:])
            site.query(x, *_query_weight(attn), attn.norm_q, rotary, out=q, offset=text)
            o = site.attend(q, k, v)
        else:
            normalise_pair((attn.norm_q, attn.norm_k), q_x, k_x, image_rotary, out=(q[:, text:], k[:, text:]))
            o = self.attend_computed(site, attn, q, k, v, text)
        if site.caches_bias:
            projected = site.project_out(o, out.weight, out.bias, offset=text)
        else:
            projected = out(o[:, text:].flatten(2))
        return attn.to_out[1](projected), attn.to_add_out(o[:, :text].flatten(2))


class SingleBlockHook(_FluxBlockHook):
    """``FluxSingleTransformerBlock``: its ``proj_out`` is ``[W_attn | W_mlp]``, and the cached bias is of W_attn."""

    def sliced(self, block: nn.Module) -> list[nn.Module]:
        return [_query_projection(block.attn), block.proj_out]

    def compute(
        self,
        block: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor],
        joint_attention_kwargs: dict[str, Any] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        text = encoder_hidden_states.shape[1]
        residual = join_streams(encoder_hidden_states, hidden_states)
        shift, scale, gate = _modulations(block.norm, temb, 3)
        norm_x = norm_modulate(residual, scale, shift)
        mlp = project_gelu(block.proj_mlp, block.act_mlp, norm_x)
        if self.runs_attention(block, joint_attention_kwargs=joint_attention_kwargs):
            out = self.attend(block, norm_x, mlp, image_rotary_emb, text)
        else:
            extra = joint_attention_kwargs or {}
            attended = block.attn(hidden_states=norm_x, image_rotary_emb=image_rotary_emb, **extra)
            out = block.proj_out(torch.cat([attended, mlp], dim=2))
        self.remember("attention and mlp", (out,))
        joint = _clip_half(add_gated(residual, out, gate))
        return joint[:, :text], joint[:, text:]

    def forecast(
        self,
        block: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention and MLP from the cache; the gate is fresh."""
        (out,) = self.recall("attention and mlp")
        _, _, gate = _modulations(block.norm, temb, 3)
        joint = _clip_half(add_gated(join_streams(encoder_hidden_states, hidden_states), out, gate))
        text = encoder_hidden_states.shape[1]
        return joint[:, :text], joint[:, text:]

    def attend(
        self,
        block: nn.Module,
        x: torch.Tensor,
        mlp: torch.Tensor,
        rotary: Rotary,
        text: int,
    ) -> torch.Tensor:
        """Attention of the joint sequence, and ``proj_out`` of it and of the MLP."""
        site, attn, out = self.site(), block.attn, block.proj_out
        if site.dispatches:
            k, v = _key_value(attn, x)
            k = normalise_heads(attn.norm_k, k, rotary)
            q = site.query(x, *_query_weight(attn), attn.norm_q, rotary, out=torch.empty_like(k), offset=0)
            o = site.attend(q, k, v)
        else:
            q, k, v = _query_key_value(attn, x)
            q, k = normalise_pair((attn.norm_q, attn.norm_k), q, k, rotary)
            o = self.attend_computed(site, attn, q, k, v, text)
        if not site.caches_bias:
            return out(torch.cat([o.flatten(2), mlp], dim=2))
        width = attn.inner_dim
        return site.project_out(o, out.weight[:, :width], out.bias) + functional.linear(mlp, out.weight[:, width:])


def _modulations(norm: nn.Module, temb: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """The ``count`` values ``[B, 1, C]`` of a block's norm: shift, scale and gate of attention, then of the MLP."""
    return norm.linear(norm.silu(temb)).unsqueeze(1).chunk(count, dim=2)


def _clip_half(x: torch.Tensor) -> torch.Tensor:
    """fp16 overflows in FLUX's residual stream; diffusers clips it the same way."""
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


def _query_key_value(attn: FluxAttention, x: torch.Tensor) -> list[torch.Tensor]:
    """Queries, keys and values ``[B, S, H, D]``, before their norms."""
    fused = attn.fused_projections
    parts = attn.to_qkv(x).chunk(3, dim=-1) if fused else (attn.to_q(x), attn.to_k(x), attn.to_v(x))
    return [part.unflatten(-1, (-1, attn.head_dim)) for part in parts]


def _context_query_key_value(attn: FluxAttention, x: torch.Tensor) -> list[torch.Tensor]:
    """The text stream's queries, keys and values ``[B, S, H, D]``, before their norms."""
    if attn.fused_projections:
        parts = attn.to_added_qkv(x).chunk(3, dim=-1)
    else:
        parts = attn.add_q_proj(x), attn.add_k_proj(x), attn.add_v_proj(x)
    return [part.unflatten(-1, (-1, attn.head_dim)) for part in parts]


def _query_projection(attn: FluxAttention) -> nn.Module:
    """The linear layer that holds the query projection's weight."""
    return attn.to_qkv if attn.fused_projections else attn.to_q


def _query_weight(attn: FluxAttention) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight ``[H * D, C]`` and bias of the query projection, a slice where q, k and v are fused."""
    if not attn.fused_projections:
        return attn.to_q.weight, attn.to_q.bias
    bias = attn.to_qkv.bias
    return attn.to_qkv.weight[: attn.inner_dim], None if bias is None else bias[: attn.inner_dim]


def _key_value(attn: FluxAttention, x: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values ``[B, S, H, D]`` without the queries."""
    if attn.fused_projections:
        weight, bias = attn.to_qkv.weight[attn.inner_dim :], attn.to_qkv.bias
        parts = functional.linear(x, weight, None if bias is None else bias[attn.inner_dim :]).chunk(2, dim=-1)
    else:
        parts = attn.to_k(x), attn.to_v(x)
    return [part.unflatten(-1, (-1, attn.head_dim)) for part in parts]


def block_hook(name: str, block: nn.Module, context: BlockContext) -> BlockHook:
    """Stands in for one of FLUX's blocks."""
    return (DoubleBlockHook if name.startswith("transformer_blocks") else SingleBlockHook)(name, context)
