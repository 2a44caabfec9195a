"""FLUX's two kinds of blocks, as a recording, a sparse and a forecast call run them.

A hook stands in for its block's forward only in those calls; in all others diffusers' own forward runs. IP-Adapter
projections and LoRA live inside the modules called here, and keep working.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.hooks import ModelHook
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor
from torch import nn
from torch.nn import functional

from dit_accel.adapters.generic import why_not_replaceable
from dit_accel.adapters.sparse_site import SparseSite, why_not_sliceable
from dit_accel.controller import Controller
from dit_accel.forecast import History
from dit_accel.layout import TokenLayout
from dit_accel.schedule import StepMode

# Passed to every processor when an IP-Adapter is loaded; the plain processor takes no notice of them.
_IGNORED_ATTENTION_ARGUMENTS = {"ip_hidden_states", "ip_adapter_masks"}


class _BlockHook(ModelHook):
    """What both block kinds share: when to stand in for the block, and features that are forecast whole."""

    def __init__(self, controller: Controller, name: str) -> None:
        super().__init__()
        self.controller = controller
        self.name = name

    def new_forward(
        self,
        module: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The block's forward: text and image streams ``[B, S, C]`` in, the same two out."""
        call, preset = self.controller.call, self.controller.preset
        extra = joint_attention_kwargs or {}

        def original() -> tuple[torch.Tensor, torch.Tensor]:
            return self.fn_ref.original_forward(
                hidden_states, encoder_hidden_states, temb, image_rotary_emb, joint_attention_kwargs
            )

        if call is None or not (call.records or call.mode is StepMode.DISPATCH):
            return original()
        reason = why_not_replaceable(module)
        if reason is None and preset.forecast.scope == "head":
            reason = self.why_dense(module, extra, hidden_states.device)
            if reason is None and call.mode is StepMode.DISPATCH and call.site(self.name).plan is None:
                reason = "no symbols: the block could not run sparsely at the latest UPDATE"
        if reason is not None:
            call.dense.add(self.name)
            self.controller.fall_back(self.name, reason)
            return original()
        whole_layer = preset.forecast.scope == "layer" or call.site(self.name).degraded
        if call.mode is StepMode.DISPATCH and whole_layer:
            return self.forecast(module, hidden_states, encoder_hidden_states, temb)
        return self.compute(module, hidden_states, encoder_hidden_states, temb, image_rotary_emb, extra)

    def remember(self, feature: str, value: tuple[torch.Tensor, ...]) -> None:
        """Records a whole feature if a later DISPATCH step may forecast it."""
        call, preset = self.controller.call, self.controller.preset
        if call.records and (preset.forecast.scope == "layer" or preset.reuse.degrade_below > 0):
            features = call.site(self.name).features
            features.setdefault(feature, History(preset.forecast.order)).record(call.coordinate, value)

    def recall(self, feature: str) -> tuple[torch.Tensor, ...]:
        """The forecast of a whole feature."""
        call = self.controller.call
        return self.controller.forecast(call.site(self.name).features[feature], call.coordinate, call.branch.order)

    def site(self) -> SparseSite:
        return SparseSite(self.name, self.controller.call, self.controller.preset)

    def dense_attention(
        self, attn: FluxAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, text: int
    ) -> torch.Tensor:
        """Dense joint attention ``[B, S, H, D]`` of a recording call; an UPDATE also draws new symbols."""
        call, site = self.controller.call, self.site()
        o = dispatch_attention_fn(q, k, v, backend=getattr(attn.processor, "_attention_backend", None)).to(q.dtype)
        site.record(o)
        if call.mode is StepMode.UPDATE:
            layout = TokenLayout(text, q.shape[1] - text, self.controller.preset.blocks.size)
            site.refresh(q, k, layout)
        return o

    def why_dense(self, block: nn.Module, extra: dict[str, Any], device: torch.device) -> str | None:
        """Why this block can't run sparsely now, or None."""
        attn = block.attn
        if type(attn.processor) is not FluxAttnProcessor:
            return f"attention processor {type(attn.processor).__name__}"
        if getattr(attn.processor, "_parallel_config", None) is not None:
            return "context parallelism"
        if set(extra) - _IGNORED_ATTENTION_ARGUMENTS:
            return f"joint_attention_kwargs {sorted(set(extra) - _IGNORED_ATTENTION_ARGUMENTS)}"
        sliced = [attn.to_qkv if attn.fused_projections else attn.to_q, self.out_projection(block)]
        reasons = (why_not_sliceable(module, device) for module in sliced)
        return next((reason for reason in reasons if reason is not None), None)


class DoubleBlockHook(_BlockHook):
    """``FluxTransformerBlock``."""

    @staticmethod
    def out_projection(block: nn.Module) -> nn.Module:
        return block.attn.to_out[0]

    def compute(
        self,
        block: nn.Module,
        x: torch.Tensor,
        context: torch.Tensor,
        temb: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        extra: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norm_x, gate_msa, shift_mlp, scale_mlp, gate_mlp = block.norm1(x, emb=temb)
        norm_c, c_gate_msa, c_shift_mlp, c_scale_mlp, c_gate_mlp = block.norm1_context(context, emb=temb)
        attended = self.attend(block.attn, norm_x, norm_c, rotary, extra)
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
        self, block: nn.Module, x: torch.Tensor, context: torch.Tensor, temb: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention and MLP from the cache; gates are fresh."""
        attn_x, attn_c, *ip = self.recall("attention")
        mlp_x, mlp_c = self.recall("mlp")
        gate_msa, gate_mlp = _double_gates(block.norm1, temb)
        c_gate_msa, c_gate_mlp = _double_gates(block.norm1_context, temb)
        x = x + gate_msa * attn_x + gate_mlp * mlp_x
        for image_prompt in ip:
            x = x + image_prompt
        context = context + c_gate_msa * attn_c + c_gate_mlp * mlp_c
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
        if self.controller.preset.forecast.scope == "layer":
            return attn(hidden_states=x, encoder_hidden_states=context, image_rotary_emb=rotary, **extra)
        call, site, text = self.controller.call, self.site(), context.shape[1]
        out = attn.to_out[0]
        dispatch = call.mode is StepMode.DISPATCH
        q_c, k_c, v_c = _context_query_key_value(attn, context)
        q_c, k_c = attn.norm_added_q(q_c), attn.norm_added_k(k_c)
        if dispatch:
            k, v = _key_value(attn, x)
        else:
            q, k, v = _query_key_value(attn, x)
        k, v = _rotate(torch.cat([k_c, attn.norm_k(k)], dim=1), rotary), torch.cat([v_c, v], dim=1)
        if dispatch:
            q = torch.empty_like(k)
            q[:, :text] = _rotate(q_c, (rotary[0][:text], rotary[1][:text]))
            site.query(x, *_query_weight(attn), attn.norm_q, rotary, out=q, offset=text)
            o = site.attend(q, k, v)
        else:
            o = self.dense_attention(attn, _rotate(torch.cat([q_c, attn.norm_q(q)], dim=1), rotary), k, v, text)
        if dispatch or call.mode is StepMode.UPDATE:
            projected = site.project_out(o, out.weight, out.bias, dispatch=dispatch, offset=text)
        else:
            projected = out(o[:, text:].flatten(2))
        return attn.to_out[1](projected), attn.to_add_out(o[:, :text].flatten(2))


class SingleBlockHook(_BlockHook):
    """``FluxSingleTransformerBlock``: its ``proj_out`` is ``[W_attn | W_mlp]``, and the cached bias is of W_attn."""

    @staticmethod
    def out_projection(block: nn.Module) -> nn.Module:
        return block.proj_out

    def compute(
        self,
        block: nn.Module,
        x: torch.Tensor,
        context: torch.Tensor,
        temb: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        extra: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        text = context.shape[1]
        residual = torch.cat([context, x], dim=1)
        norm_x, gate = block.norm(residual, emb=temb)
        mlp = block.act_mlp(block.proj_mlp(norm_x))
        if self.controller.preset.forecast.scope == "layer":
            attended = block.attn(hidden_states=norm_x, image_rotary_emb=rotary, **extra)
            out = block.proj_out(torch.cat([attended, mlp], dim=2))
        else:
            out = self.attend(block, norm_x, mlp, rotary, text)
        self.remember("attention and mlp", (out,))
        joint = _clip_half(residual + gate.unsqueeze(1) * out)
        return joint[:, :text], joint[:, text:]

    def forecast(
        self, block: nn.Module, x: torch.Tensor, context: torch.Tensor, temb: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention and MLP from the cache; the gate is fresh."""
        (out,) = self.recall("attention and mlp")
        gate = block.norm.linear(block.norm.silu(temb)).chunk(3, dim=1)[2]
        joint = _clip_half(torch.cat([context, x], dim=1) + gate.unsqueeze(1) * out)
        return joint[:, : context.shape[1]], joint[:, context.shape[1] :]

    def attend(
        self,
        block: nn.Module,
        x: torch.Tensor,
        mlp: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        text: int,
    ) -> torch.Tensor:
        """Attention of the joint sequence, and ``proj_out`` of it and of the MLP."""
        call, site, attn, out = self.controller.call, self.site(), block.attn, block.proj_out
        dispatch = call.mode is StepMode.DISPATCH
        if dispatch:
            k, v = _key_value(attn, x)
            k = _rotate(attn.norm_k(k), rotary)
            q = site.query(x, *_query_weight(attn), attn.norm_q, rotary, out=torch.empty_like(k), offset=0)
            o = site.attend(q, k, v)
        else:
            q, k, v = _query_key_value(attn, x)
            o = self.dense_attention(attn, _rotate(attn.norm_q(q), rotary), _rotate(attn.norm_k(k), rotary), v, text)
            if call.mode is StepMode.FULL:
                return out(torch.cat([o.flatten(2), mlp], dim=2))
        width = attn.inner_dim
        projected = site.project_out(o, out.weight[:, :width], out.bias, dispatch=dispatch)
        return projected + functional.linear(mlp, out.weight[:, width:])


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
