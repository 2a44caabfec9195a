"""Blocks with an image and a text stream, as a recording, a sparse and a forecast call run them.

FLUX and HunyuanVideo have two kinds. *Double* blocks have projections, norms and an MLP for each stream, *single*
blocks have them for the joint sequence. Both take the streams ``[B, S, C]`` and return them in the sequence's order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import nn
from torch.nn import functional

from dit_accel.kernels import add_gated, add_gated_norm_modulate, norm_modulate
from dit_accel.kernels.layout import TokenLayout
from dit_accel.models.fused.block_hook import BlockHook
from dit_accel.models.fused.parts import Rotary, activating, feed_forward, join_streams, project_gelu
from dit_accel.models.quantized_linears import QuantizedLinears
from dit_accel.sparse.site import Inputs, SparseSite

Streams = tuple[torch.Tensor, torch.Tensor]


class JointBlockHook(BlockHook):
    """What both kinds share."""

    text_first: bool  # in the joint sequence
    rotary = "image_rotary_emb"  # argument that holds RoPE's tables

    @abstractmethod
    def project(
        self, site: SparseSite, attn: nn.Module, x: torch.Tensor, context: torch.Tensor | None, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values ``[B, T, H, D]`` of the joint sequence, as attention gets them.

        Args:
            x: the image stream; the joint sequence of a single block.
            context: the text stream; None in a single block.
        """

    @abstractmethod
    def attend_by_module(
        self, attn: nn.Module, given: SimpleNamespace, x: torch.Tensor, context: torch.Tensor | None
    ) -> Any:
        """What the block's own attention gives for the streams, image first, or for the joint sequence ``x``."""

    def query_projection(self, attn: nn.Module) -> nn.Module:
        """The linear layer that holds the query projection's weight."""
        return attn.to_q

    def bounded(self, x: torch.Tensor) -> torch.Tensor:
        """A residual stream with values that its dtype can hold."""
        return x

    def in_order(self, image: Any, text: Any) -> tuple[Any, Any]:
        """Both as they come in the sequence; and so the sequence's first and second as image and text."""
        return (text, image) if self.text_first else (image, text)

    def stands_in(self) -> bool:
        """Also where prompts differ in length, whose attention goes sample by sample."""
        return super().stands_in() or self.is_ragged

    @property
    def is_ragged(self) -> bool:
        return self.driver.text is not None and self.driver.text.ragged

    def attend_jointly(
        self, site: SparseSite, attn: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, text: int
    ) -> torch.Tensor:
        """Attention ``[B, T, H, D]`` of the joint sequence, in which ``text`` tokens are text."""
        if self.driver.exchange is not None:
            text = self.driver.exchange.tokens.text
        attend = partial(self._attend_jointly, site, attn, text)
        return self.attend_whole(attend, q, k, v, arranged=self.attends or self.is_ragged)

    def _attend_jointly(
        self, site: SparseSite, attn: nn.Module, text: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        vision = q.shape[1] - text
        kv_len = self.driver.text.counts + vision if self.is_ragged else None
        if site.dispatches:
            return site.attend(q, k, v, kv_len)
        backend = getattr(attn.processor, "_attention_backend", None)

        def dense() -> torch.Tensor:
            if kv_len is None or (backend is None and self.driver.attends_by_kernel(q)):
                return self.attend_densely(q, k, v, backend, kv_len)
            parts = []
            for sample, length in self.driver.text.samples():
                keys, values = k[sample, : vision + length], v[sample, : vision + length]
                parts.append(dispatch_attention_fn(q[sample], keys, values, backend=backend))
            return torch.cat(parts)

        layout = TokenLayout(text, vision, self.controller.preset.blocks.size, text_first=self.text_first)
        return site.attend_computed(Inputs(q, k, v, layout, dense, kv_len))


class DoubleBlockHook(JointBlockHook):
    """A block with projections, norms and an MLP for each stream."""

    def sliced(self, block: nn.Module) -> list[nn.Module]:
        return [self.query_projection(block.attn), block.attn.to_out[0]]

    def compute(self, block: nn.Module, given: SimpleNamespace) -> Streams:
        x, context = given.hidden_states, given.encoder_hidden_states
        first, values = _modulations(block.norm1, given, 6)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = values
        c_shift, c_scale, c_gate, c_mlp_shift, c_mlp_scale, c_mlp_gate = _values(block.norm1_context, given.temb, 6)
        norm_x, norm_c = _by_frame(norm_modulate, (x,), first, scale, shift), norm_modulate(context, c_scale, c_shift)
        if self.runs_attention(block, given):
            attended = self.attend(block.attn, norm_x, norm_c, getattr(given, self.rotary))
        else:
            attended = self.attend_by_module(block.attn, given, norm_x, norm_c)
        self.remember("attention", attended)
        attn_x, attn_c, *more = attended
        x, norm_x = _by_frame(add_gated_norm_modulate, (x, attn_x), first, gate, mlp_scale, mlp_shift)
        context, norm_c = add_gated_norm_modulate(context, attn_c, c_gate, c_mlp_scale, c_mlp_shift)
        mlp_x, mlp_c = feed_forward(block.ff, norm_x), feed_forward(block.ff_context, norm_c)
        self.remember("mlp", (mlp_x, mlp_c))
        x, context = _by_frame(add_gated, (x, mlp_x), first, mlp_gate), add_gated(context, mlp_c, c_mlp_gate)
        return self._streams(x, context, more)

    def forecast(self, block: nn.Module, given: SimpleNamespace) -> Streams:
        """Attention and MLP from the cache; gates are fresh."""
        x, context = given.hidden_states, given.encoder_hidden_states
        (attn_x, attn_c, *more), (mlp_x, mlp_c) = self.recall("attention"), self.recall("mlp")
        first, values = _modulations(block.norm1, given, 6)
        gate, mlp_gate = values[2::3]
        c_gate, c_mlp_gate = _values(block.norm1_context, given.temb, 6)[2::3]
        x = _by_frame(add_gated, (_by_frame(add_gated, (x, attn_x), first, gate), mlp_x), first, mlp_gate)
        context = add_gated(add_gated(context, attn_c, c_gate), mlp_c, c_mlp_gate)
        return self._streams(x, context, more)

    def attend(self, attn: nn.Module, x: torch.Tensor, context: torch.Tensor, rotary: Rotary) -> Streams:
        """Joint attention of both streams, through their output projections."""
        site, out, text = self.site(), attn.to_out[0], context.shape[1]
        q, k, v = self.project(site, attn, x, context, rotary)
        o = self.attend_jointly(site, attn, q, k, v, text)
        start = text if self.text_first else x.shape[1]  # of the second stream
        of_image, of_text = self.in_order(slice(start), slice(start, None))
        if site.caches_bias:
            projected = site.project_out(o, out.weight, out.bias, of_image)
        else:
            projected = out(o[:, of_image].flatten(2))
        return attn.to_out[1](projected), attn.to_add_out(o[:, of_text].flatten(2))

    def _streams(self, x: torch.Tensor, context: torch.Tensor, more: list[torch.Tensor]) -> Streams:
        """Both streams; what attention gave besides, for an image prompt, is added to the image's."""
        for image_prompt in more:
            x = x + image_prompt
        return self.in_order(x, self.bounded(context))


class SingleBlockHook(JointBlockHook):
    """A block over the joint sequence: its ``proj_out`` is ``[W_attn | W_mlp]``, and the cached bias is of W_attn."""

    def sliced(self, block: nn.Module) -> list[nn.Module]:
        return [self.query_projection(block.attn), block.proj_out]

    def compute(self, block: nn.Module, given: SimpleNamespace) -> Streams:
        residual = self._joined(given)
        first, (shift, scale, gate) = _modulations(block.norm, given, 3)
        norm_x = _by_frame(norm_modulate, (residual,), first, scale, shift)
        late = activating(block.proj_out, block.act_mlp, norm_x)
        mlp = project_gelu(block.proj_mlp, block.act_mlp, norm_x) if late is None else block.proj_mlp(norm_x)
        if self.runs_attention(block, given):
            out = self.attend(block, norm_x, mlp, given, late)
        else:
            attended = self.attend_by_module(block.attn, given, norm_x, None)
            out = _project_both(block.proj_out, attended, mlp, late)
        self.remember("attention and mlp", (out,))
        return self._parted(_by_frame(add_gated, (residual, out), first, gate), given)

    def forecast(self, block: nn.Module, given: SimpleNamespace) -> Streams:
        """Attention and MLP from the cache; the gate is fresh."""
        (out,) = self.recall("attention and mlp")
        first, (_, _, gate) = _modulations(block.norm, given, 3)
        return self._parted(_by_frame(add_gated, (self._joined(given), out), first, gate), given)

    def attend(
        self,
        block: nn.Module,
        x: torch.Tensor,
        mlp: torch.Tensor,
        given: SimpleNamespace,
        late: QuantizedLinears | None,
    ) -> torch.Tensor:
        """Attention of the joint sequence ``x``, and ``proj_out`` of it and of the MLP, which ``late`` activates."""
        site, attn, out, width = self.site(), block.attn, block.proj_out, x.shape[2]
        q, k, v = self.project(site, attn, x, None, getattr(given, self.rotary))
        o = self.attend_jointly(site, attn, q, k, v, given.encoder_hidden_states.shape[1])
        if not site.caches_bias:
            return _project_both(out, o.flatten(2), mlp, late)
        return site.project_out(o, out.weight[:, :width], out.bias) + functional.linear(mlp, out.weight[:, width:])

    def _joined(self, given: SimpleNamespace) -> torch.Tensor:
        return join_streams(*self.in_order(given.hidden_states, given.encoder_hidden_states))

    def _parted(self, joint: torch.Tensor, given: SimpleNamespace) -> Streams:
        start = self.in_order(given.hidden_states, given.encoder_hidden_states)[0].shape[1]
        joint = self.bounded(joint)
        return joint[:, :start], joint[:, start:]


def _project_both(
    linear: nn.Module, attended: torch.Tensor, mlp: torch.Tensor, late: QuantizedLinears | None
) -> torch.Tensor:
    """``linear`` of both, the MLP's behind the attention's; ``late`` activates the MLP's on the way."""
    return linear(torch.cat([attended, mlp], dim=2)) if late is None else late.project(linear, x=attended, gelu=mlp)


def _modulations(norm: nn.Module, given: SimpleNamespace, count: int) -> tuple[int | None, tuple[Any, ...]]:
    """The ``count`` values of a block's norm: shift, scale and gate of its attention, then of its MLP.

    HunyuanVideo's variant for pictures (``token_replace``) modulates the tokens of the first frame by an embedding of
    their own.

    Returns:
        The number of these tokens, and a pair ``[B, 1, C]`` for each value; None, and ``[B, 1, C]``, elsewhere.
    """
    values = _values(norm, given.temb, count)
    own = getattr(given, "token_replace_emb", None)
    if own is None:
        return None, values
    return given.num_tokens, tuple(zip(_values(norm, own, count), values, strict=True))


def _values(norm: nn.Module, temb: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    return norm.linear(norm.silu(temb)).unsqueeze(1).chunk(count, dim=2)


def _by_frame(function: Callable[..., Any], tensors: tuple[torch.Tensor, ...], first: int | None, *values: Any) -> Any:
    """``function(*tensors, *values)``, where the ``first`` tokens may have values of their own."""
    if first is None:
        return function(*tensors, *values)
    parts = zip((slice(first), slice(first, None)), *values, strict=True)
    results = [function(*(x[:, tokens] for x in tensors), *own) for tokens, *own in parts]
    if isinstance(results[0], tuple):
        return tuple(torch.cat(part, dim=1) for part in zip(*results, strict=True))
    return torch.cat(results, dim=1)
