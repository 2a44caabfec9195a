"""HunyuanVideo's two kinds of blocks, as a recording, a sparse and a forecast call run them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from torch import nn
from torch.nn import functional

from dit_accel.kernels import add_gated, add_gated_norm_modulate, gemm_q, norm_modulate
from dit_accel.kernels.layout import TokenLayout
from dit_accel.models.block_context import BlockContext
from dit_accel.models.fused.block_hook import BlockHook
from dit_accel.models.fused.hunyuan_video_modulation import by_frame, modulations
from dit_accel.models.fused.parts import (
    Rotary,
    feed_forward,
    join_streams,
    normalise_heads,
    normalise_pair,
    project_gelu,
    why_not_plain,
    why_not_sliceable,
)
from dit_accel.sparse.site import SparseSite


class _HunyuanBlockHook(BlockHook):
    """What both block kinds share; both take image and text streams ``[B, S, C]`` and return the same two."""

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
        """The block's forward; where no padding is left, without its mask."""
        if self.context.text is not None and not self.context.text.ragged:
            attention_mask = None
        return super().new_forward(module, hidden_states, encoder_hidden_states, temb, attention_mask, *args, **kwargs)

    def stands_in(self) -> bool:
        """Also where prompts differ in length, whose attention goes sample by sample."""
        return super().stands_in() or self._is_ragged

    def why_dense(self, block: nn.Module, **_: Any) -> str | None:
        """Why this block's attention can't be replaced now, or None."""
        attn = block.attn
        processor = attn.processor
        if type(processor) is not HunyuanVideoAttnProcessor2_0:
            return f"attention processor {type(processor).__name__}"
        if processor._parallel_config is not None:
            return "context parallelism"
        if not isinstance(attn.norm_q, RMSNorm):
            return f"queries are normalised by {type(attn.norm_q).__name__}, not RMSNorm"
        return None

    @property
    def _is_ragged(self) -> bool:
        return self.context.text is not None and self.context.text.ragged

    def project(
        self,
        attn: Attention,
        x: torch.Tensor,
        linear: nn.Module,
        norm: RMSNorm,
        rotary: Rotary,
        *,
        out: torch.Tensor,
    ) -> None:
        """Queries or keys of the stream ``x`` ``[B, S, C]`` that begins the joint sequence, into ``out``.

        Args:
            rotary: tables of the joint sequence.
            out: ``[B, T, H, D]`` of the joint sequence, whose first S tokens are written.
        """
        is_plain = why_not_plain(norm, x.device) is None and why_not_sliceable(linear, x.device) is None
        if self.context.fuses and is_plain and norm.weight.dtype == x.dtype:
            plan = self.context.every_row(*out.shape[:3], x.device)
            options = {"norm_weight": norm.weight, "norm_eps": norm.eps, "rope": rotary, "out": out}
            gemm_q(x, linear.weight, linear.bias, plan, **options, backend=self.controller.preset.kernels.gemm)
        else:
            own = tuple(table[: x.shape[1]] for table in rotary)
            normalise_heads(norm, _heads(attn, linear(x)), own, out=out[:, : x.shape[1]])

    def attend_by_module(
        self, attn: Attention, x: torch.Tensor, context: torch.Tensor, mask: torch.Tensor | None, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of both streams by the block's own module; padding among the text gets zeros, and needs no mask."""
        if not self._is_ragged:
            return attn(hidden_states=x, encoder_hidden_states=context, attention_mask=mask, image_rotary_emb=rotary)
        outputs = []
        for sample, length in _samples(self.context.text.lengths):
            attn_x, attn_c = attn(
                hidden_states=x[sample], encoder_hidden_states=context[sample, :length], image_rotary_emb=rotary
            )
            outputs.append((attn_x, functional.pad(attn_c, (0, 0, 0, context.shape[1] - length))))
        attn_x, attn_c = zip(*outputs, strict=True)
        return torch.cat(attn_x), torch.cat(attn_c)

    def attend_computed(
        self, site: SparseSite, attn: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, vision: int
    ) -> torch.Tensor:
        """Joint attention ``[B, S, H, D]`` of a call that computes every row."""
        kv_len, backend = self.kv_len(vision), attn.processor._attention_backend

        def dense() -> torch.Tensor:
            if not self._is_ragged or (backend is None and self.context.attends_by_kernel(q)):
                return self.attend_densely(q, k, v, backend, kv_len)
            parts = [
                dispatch_attention_fn(
                    q[sample], k[sample, : vision + text], v[sample, : vision + text], backend=backend
                )
                for sample, text in _samples(self.context.text.lengths)
            ]
            return torch.cat(parts)

        layout = TokenLayout(q.shape[1] - vision, vision, self.controller.preset.blocks.size, text_first=False)
        return site.attend_computed(q, k, v, layout, dense, kv_len=kv_len)

    def kv_len(self, vision: int) -> torch.Tensor | None:
        """int32 ``[B]``, joint tokens of each sample before its padding; None where there is none."""
        return self.context.text.counts + vision if self._is_ragged else None


class DualBlockHook(_HunyuanBlockHook):
    """``HunyuanVideoTransformerBlock`` and ``HunyuanVideoTokenReplaceTransformerBlock``."""

    def sliced(self, block: nn.Module) -> list[nn.Module]:
        return [block.attn.to_q, block.attn.to_out[0]]

    def compute(
        self,
        block: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        attention_mask: torch.Tensor | None,
        freqs_cis: Rotary,
        token_replace_emb: torch.Tensor | None = None,
        num_tokens: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, context = hidden_states, encoder_hidden_states
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulations(block.norm1, temb, token_replace_emb, 6)
        context_values = modulations(block.norm1_context, temb, None, 6)
        c_shift, c_scale, c_gate, c_mlp_shift, c_mlp_scale, c_mlp_gate = (value for (value,) in context_values)
        norm_x = by_frame(norm_modulate, (x,), num_tokens, scale, shift)
        norm_c = norm_modulate(context, c_scale, c_shift)
        if self.runs_attention(block):
            attended = self.attend(block.attn, norm_x, norm_c, freqs_cis)
        else:
            attended = self.attend_by_module(block.attn, norm_x, norm_c, attention_mask, freqs_cis)
        self.remember("attention", attended)
        attn_x, attn_c = attended
        x, norm_x = by_frame(add_gated_norm_modulate, (x, attn_x), num_tokens, gate, mlp_scale, mlp_shift)
        context, norm_c = add_gated_norm_modulate(context, attn_c, c_gate, c_mlp_scale, c_mlp_shift)
        mlp_x, mlp_c = feed_forward(block.ff, norm_x), feed_forward(block.ff_context, norm_c)
        self.remember("mlp", (mlp_x, mlp_c))
        return by_frame(add_gated, (x, mlp_x), num_tokens, mlp_gate), add_gated(context, mlp_c, c_mlp_gate)

    def forecast(
        self,
        block: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        token_replace_emb: torch.Tensor | None = None,
        num_tokens: int | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention and MLP from the cache; gates are fresh."""
        x, context = hidden_states, encoder_hidden_states
        gates = modulations(block.norm1, temb, token_replace_emb, 6)[2::3]
        context_gates = modulations(block.norm1_context, temb, None, 6)[2::3]
        for feature, gate, (context_gate,) in zip(("attention", "mlp"), gates, context_gates, strict=True):
            update_x, update_c = self.recall(feature)
            x = by_frame(add_gated, (x, update_x), num_tokens, gate)
            context = add_gated(context, update_c, context_gate)
        return x, context

    def attend(
        self, attn: Attention, x: torch.Tensor, context: torch.Tensor, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Joint attention of both streams, through their output projections."""
        site, vision, out = self.site(), x.shape[1], attn.to_out[0]
        q_c, k_c, v_c = (
            _heads(attn, project(context)) for project in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        )
        rotary = _joint(rotary, context.shape[1])
        v = torch.cat([_heads(attn, attn.to_v(x)), v_c], dim=1)
        q, k = torch.empty_like(v), torch.empty_like(v)
        normalise_pair((attn.norm_added_q, attn.norm_added_k), q_c, k_c, out=(q[:, vision:], k[:, vision:]))
        self.project(attn, x, attn.to_k, attn.norm_k, rotary, out=k)
        if site.dispatches:
            site.query(x, attn.to_q.weight, attn.to_q.bias, attn.norm_q, rotary, out=q, offset=0)
            o = site.attend(q, k, v, kv_len=self.kv_len(vision))
        else:
            self.project(attn, x, attn.to_q, attn.norm_q, rotary, out=q)
            o = self.attend_computed(site, attn, q, k, v, vision)
        if site.caches_bias:
            projected = site.project_out(o, out.weight, out.bias, length=vision)
        else:
            projected = out(o[:, :vision].flatten(2))
        return attn.to_out[1](projected), attn.to_add_out(o[:, vision:].flatten(2))


class SingleBlockHook(_HunyuanBlockHook):
    """``HunyuanVideoSingleTransformerBlock`` and ``HunyuanVideoTokenReplaceSingleTransformerBlock``.

    ``proj_out`` is ``[W_attn | W_mlp]``, and the cached bias is of W_attn.
    """

    def sliced(self, block: nn.Module) -> list[nn.Module]:
        return [block.attn.to_q, block.proj_out]

    def compute(
        self,
        block: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        attention_mask: torch.Tensor | None,
        image_rotary_emb: Rotary,
        token_replace_emb: torch.Tensor | None = None,
        num_tokens: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        vision = hidden_states.shape[1]
        residual = join_streams(hidden_states, encoder_hidden_states)
        shift, scale, gate = modulations(block.norm, temb, token_replace_emb, 3)
        norm_x = by_frame(norm_modulate, (residual,), num_tokens, scale, shift)
        mlp = project_gelu(block.proj_mlp, block.act_mlp, norm_x)
        if self.runs_attention(block):
            out = self.attend(block, norm_x, mlp, image_rotary_emb, vision)
        else:
            streams = norm_x[:, :vision], norm_x[:, vision:]
            attended = self.attend_by_module(block.attn, *streams, attention_mask, image_rotary_emb)
            out = block.proj_out(torch.cat([torch.cat(attended, dim=1), mlp], dim=2))
        self.remember("attention and mlp", (out,))
        joint = by_frame(add_gated, (residual, out), num_tokens, gate)
        return joint[:, :vision], joint[:, vision:]

    def forecast(
        self,
        block: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        token_replace_emb: torch.Tensor | None = None,
        num_tokens: int | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention and MLP from the cache; the gate is fresh."""
        (out,), vision = self.recall("attention and mlp"), hidden_states.shape[1]
        _, _, gate = modulations(block.norm, temb, token_replace_emb, 3)
        joint = by_frame(add_gated, (join_streams(hidden_states, encoder_hidden_states), out), num_tokens, gate)
        return joint[:, :vision], joint[:, vision:]

    def attend(self, block: nn.Module, x: torch.Tensor, mlp: torch.Tensor, rotary: Rotary, vision: int) -> torch.Tensor:
        """Attention of the joint sequence, and ``proj_out`` of it and of the MLP."""
        site, attn, out, width = self.site(), block.attn, block.proj_out, x.shape[2]
        rotary = _joint(rotary, x.shape[1] - vision)
        v = _heads(attn, attn.to_v(x))
        q, k = torch.empty_like(v), torch.empty_like(v)
        self.project(attn, x, attn.to_k, attn.norm_k, rotary, out=k)
        if site.dispatches:
            site.query(x, attn.to_q.weight, attn.to_q.bias, attn.norm_q, rotary, out=q, offset=0)
            o = site.attend(q, k, v, kv_len=self.kv_len(vision))
        else:
            self.project(attn, x, attn.to_q, attn.norm_q, rotary, out=q)
            o = self.attend_computed(site, attn, q, k, v, vision)
        if not site.caches_bias:
            return out(torch.cat([o.flatten(2), mlp], dim=2))
        return site.project_out(o, out.weight[:, :width], out.bias) + functional.linear(mlp, out.weight[:, width:])


def _samples(lengths: Sequence[Any]) -> Iterator[tuple[slice, Any]]:
    """Each sample's slice of the batch with its length; one entry stands for the whole batch."""
    for i, length in enumerate(lengths):
        yield slice(i, i + 1) if len(lengths) > 1 else slice(None), length


def _heads(attn: Attention, x: torch.Tensor) -> torch.Tensor:
    """``[B, S, H * D]`` -> ``[B, S, H, D]``."""
    return x.unflatten(2, (attn.heads, -1))


def _joint(rotary: Rotary, text: int) -> Rotary:
    """The tables of the joint sequence; text tokens are not turned."""
    cosine, sine = rotary
    return functional.pad(cosine, (0, 0, 0, text), value=1.0), functional.pad(sine, (0, 0, 0, text))


def block_hook(name: str, block: nn.Module, context: BlockContext) -> BlockHook:
    """Stands in for one of HunyuanVideo's blocks."""
    return (DualBlockHook if name.startswith("transformer_blocks") else SingleBlockHook)(name, context)
