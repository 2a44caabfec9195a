"""FLUX's two kinds of blocks, as a recording, a sparse and a forecast call run them.

IP-Adapter projections and LoRA live inside the modules called here, and keep working.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor
from torch import nn
from torch.nn import functional

from dit_accel.adapters.block_hook import BlockHook
from dit_accel.adapters.sparse_site import SparseSite
from dit_accel.layout import TokenLayout

# Passed to every processor when an IP-Adapter is loaded; the plain processor takes no notice of them.
_IGNORED_ATTENTION_ARGUMENTS = {"ip_hidden_states", "ip_adapter_masks"}


class _FluxBlockHook(BlockHook):
    """What FLUX's block kinds share; both take text and image streams ``[B, S, C]`` and return the same two."""

    def attend_computed(
        self, site: SparseSite, attn: FluxAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, text: int
    ) -> torch.Tensor:
        """Joint attention ``[B, S, H, D]`` of a call that computes every row."""

        def dense() -> torch.Tensor:
            backend = getattr(attn.processor, "_attention_backend", None)
            return dispatch_attention_fn(q, k, v, backend=backend).to(q.dtype)

        layout = TokenLayout(text, q.shape[1] - text, self.controller.preset.blocks.size)
        return site.attend_computed(q, k, v, layout, dense)

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
        norm_x, gate_msa, shift_mlp, scale_mlp, gate_mlp = block.norm1(x, emb=temb)
        norm_c, c_gate_msa, c_shift_mlp, c_scale_mlp, c_gate_mlp = block.norm1_context(context, emb=temb)
        attended = self.attend(block.attn, norm_x, norm_c, image_rotary_emb, joint_attention_kwargs or {})
        self.remember("attention", attended)
        attn_x, attn_c, *ip = attended
        x = x + gate_msa.unsqueeze(1) * attn_x
        norm_x = block.norm2(x) * (1 + scale_mlp[:, None]) + shift_mlp[:, None]
        mlp_x = block.ff(norm_x)
        x = x + gate_mlp.unsqueeze(1) * mlp_x
        for image_prompt in ip:
            x = x + image_prompt
        context = context + c_gate_msa.unsqueeze(1) * attn_c
        norm_c = block.norm2_context(context) * (1 + c_scale_mlp[:, None]) + c_shift_mlp[:, None]
        mlp_c = block.ff_context(norm_c)
        context = context + c_gate_mlp.unsqueeze(1) * mlp_c
        self.remember("mlp", (mlp_x, mlp_c))
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
        gate_msa, gate_mlp = _double_gates(block.norm1, temb)
        c_gate_msa, c_gate_mlp = _double_gates(block.norm1_context, temb)
        x = hidden_states + gate_msa * attn_x + gate_mlp * mlp_x
        for image_prompt in ip:
            x = x + image_prompt
        context = encoder_hidden_states + c_gate_msa * attn_c + c_gate_mlp * mlp_c
        return _clip_half(context), x

    def attend(
        self,
        attn: FluxAttention,
        x: torch.Tensor,
        context: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        extra: dict[str, Any],
    ) -> tuple[torch.Tensor, ...]:
        """Joint attention of both streams, through their output projections."""
        if not self.attends:
            return attn(hidden_states=x, encoder_hidden_states=context, image_rotary_emb=rotary, **extra)
        site, text, out = self.site(), context.shape[1], attn.to_out[0]
        q_c, k_c, v_c = _context_query_key_value(attn, context)
        q_c, k_c = attn.norm_added_q(q_c), attn.norm_added_k(k_c)
        if site.dispatches:
            k, v = _key_value(attn, x)
        else:
            q, k, v = _query_key_value(attn, x)
        k, v = _rotate(torch.cat([k_c, attn.norm_k(k)], dim=1), rotary), torch.cat([v_c, v], dim=1)
        if site.dispatches:
            q = torch.empty_like(k)
            q[:, :text] = _rotate(q_c, (rotary[0][:text], rotary[1][:text]))
            site.query(x, *_query_weight(attn), attn.norm_q, rotary, out=q, offset=text)
            o = site.attend(q, k, v)
        else:
            q = _rotate(torch.cat([q_c, attn.norm_q(q)], dim=1), rotary)
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
        residual = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        norm_x, gate = block.norm(residual, emb=temb)
        mlp = block.act_mlp(block.proj_mlp(norm_x))
        if self.attends:
            out = self.attend(block, norm_x, mlp, image_rotary_emb, text)
        else:
            extra = joint_attention_kwargs or {}
            attended = block.attn(hidden_states=norm_x, image_rotary_emb=image_rotary_emb, **extra)
            out = block.proj_out(torch.cat([attended, mlp], dim=2))
        self.remember("attention and mlp", (out,))
        joint = _clip_half(residual + gate.unsqueeze(1) * out)
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
        gate = block.norm.linear(block.norm.silu(temb)).chunk(3, dim=1)[2]
        joint = _clip_half(torch.cat([encoder_hidden_states, hidden_states], dim=1) + gate.unsqueeze(1) * out)
        text = encoder_hidden_states.shape[1]
        return joint[:, :text], joint[:, text:]

    def attend(
        self,
        block: nn.Module,
        x: torch.Tensor,
        mlp: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        text: int,
    ) -> torch.Tensor:
        """Attention of the joint sequence, and ``proj_out`` of it and of the MLP."""
        site, attn, out = self.site(), block.attn, block.proj_out
        if site.dispatches:
            k, v = _key_value(attn, x)
            k = _rotate(attn.norm_k(k), rotary)
            q = site.query(x, *_query_weight(attn), attn.norm_q, rotary, out=torch.empty_like(k), offset=0)
            o = site.attend(q, k, v)
        else:
            q, k, v = _query_key_value(attn, x)
            q, k = _rotate(attn.norm_q(q), rotary), _rotate(attn.norm_k(k), rotary)
            o = self.attend_computed(site, attn, q, k, v, text)
        if not site.caches_bias:
            return out(torch.cat([o.flatten(2), mlp], dim=2))
        width = attn.inner_dim
        return site.project_out(o, out.weight[:, :width], out.bias) + functional.linear(mlp, out.weight[:, width:])


def _double_gates(norm: nn.Module, temb: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and MLP gates ``[B, 1, C]`` of an ``AdaLayerNormZero``, without normalising anything."""
    _, _, gate_msa, _, _, gate_mlp = norm.linear(norm.silu(temb)).unsqueeze(1).chunk(6, dim=2)
    return gate_msa, gate_mlp


def _rotate(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return apply_rotary_emb(x, rotary, sequence_dim=1)


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
