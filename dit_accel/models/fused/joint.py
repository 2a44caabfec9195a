"""Blocks with an image and a text stream, in recording, sparse and forecast calls.

*Double* blocks have projections, norms and an MLP for each stream, *single* blocks have them for the joint sequence.
FLUX and HunyuanVideo have both kinds, Qwen-Image has double blocks only. Both kinds take the streams ``[B, S, C]`` and
return them in the sequence's order; FLUX.2's single blocks take and return the joint sequence.
"""

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
from dit_accel.models.beside.quantized_linears import QuantizedLinears, in_8_bits, project
from dit_accel.models.fused.block_hook import BlockHook
from dit_accel.models.fused.parts import Rotary, feed_forward, is_tanh_gelu, join_streams, project_gelu
from dit_accel.sparse.head_site import HeadSite
from dit_accel.sparse.inputs import Inputs
from dit_accel.sparse.tile_site import TileSite

Streams = tuple[torch.Tensor, torch.Tensor]
Values = tuple[Any, ...]  # modulations: each is a tensor, or one for the first tokens and one for the others


class JointBlockHook(BlockHook):
    """Base of the hooks on double and single blocks."""

    text_first: bool  # in the joint sequence
    attends_by_sample = True
    rotary = "image_rotary_emb"  # argument that holds the RoPE tables
    first_norm: str | None = None  # name of the norm whose epsilon all norms of streams have; None = it is 1e-6

    @abstractmethod
    def project(
        self, site: TileSite | HeadSite, attn: nn.Module, x: torch.Tensor, context: torch.Tensor | None, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values ``[B, T, H, D]``, normalised and rotated.

        A double block has the image stream ``x`` and the text stream ``context``, a single block the joint ``x``.
        """

    @abstractmethod
    def attend_by_module(
        self, attn: nn.Module, inputs: SimpleNamespace, x: torch.Tensor, context: torch.Tensor | None
    ) -> Any:
        """Output of the block's own attention for the streams, image first, or for the joint sequence ``x``."""

    def query_projection(self, attn: nn.Module) -> nn.Module:
        """The linear layer that holds the query projection's weight."""
        return attn.to_q

    def bounded(self, x: torch.Tensor) -> torch.Tensor:
        """Clamp a residual stream to values that its dtype can hold."""
        return x

    def epsilon(self, block: nn.Module) -> float:
        return getattr(block, self.first_norm).eps if self.first_norm else 1e-6

    def tables(self, inputs: SimpleNamespace) -> Rotary:
        """Return the RoPE tables of the tokens that are rotated."""
        return getattr(inputs, self.rotary)

    def in_order(self, image: Any, text: Any) -> tuple[Any, Any]:
        """Put image and text into the sequence's order; the same swap turns that order back."""
        return (text, image) if self.text_first else (image, text)

    @property
    def is_ragged(self) -> bool:
        return self.driver.facts.text is not None and self.driver.facts.text.ragged

    def attend_jointly(
        self, site: TileSite | HeadSite, attn: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, text: int
    ) -> torch.Tensor:
        """Attention ``[B, T, H, D]`` over the joint sequence, which has ``text`` text tokens."""
        if self.driver.facts.exchange is not None:
            text = self.driver.facts.exchange.tokens.text
        attend = partial(self._attend_jointly, site, attn, text)
        return self.attend_whole(attend, q, k, v, arranged=self.attends or self.is_ragged)

    def _attend_jointly(
        self, site: TileSite | HeadSite, attn: nn.Module, text: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        vision = q.shape[1] - text
        kv_len = self.driver.facts.text.counts + vision if self.is_ragged else None
        if site.dispatches:
            return site.attend(site.plan, q, k, v, kv_len=kv_len)
        backend = getattr(attn.processor, "_attention_backend", None)

        def dense() -> torch.Tensor:
            if kv_len is None or (backend is None and self.driver.attends_by_kernel(q)):
                return self.attend_dense(q, k, v, backend, kv_len)
            parts = []
            for sample, length in self.driver.facts.text.samples():
                keys, values = k[sample, : vision + length], v[sample, : vision + length]
                parts.append(dispatch_attention_fn(q[sample], keys, values, backend=backend))
            return torch.cat(parts)

        layout = TokenLayout(text, vision, self.preset.blocks.size, text_first=self.text_first)
        return site.attend_computed(Inputs(q, k, v, layout, dense, kv_len))


class DoubleBlockHook(JointBlockHook):
    """A block with projections, norms and an MLP for each stream."""

    mlps = "ff", "ff_context"  # names of the image's and the text's

    def modulations(self, block: nn.Module, inputs: SimpleNamespace) -> tuple[int | None, Values, Values]:
        """Return :func:`of_frames` of the image's six values, and the text's six values."""
        return *of_frames(block.norm1, inputs, 6), in_parts(modulation(block.norm1_context, inputs.temb), 6)

    feed_forward = staticmethod(feed_forward)  # runs a stream's MLP

    def sliced(self, block: nn.Module) -> list[nn.Module]:
        return [self.query_projection(block.attn), block.attn.to_out[0]]

    def compute(self, block: nn.Module, inputs: SimpleNamespace) -> Streams:
        x, context = inputs.hidden_states, inputs.encoder_hidden_states
        first, values, c_values = self.modulations(block, inputs)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = values
        c_shift, c_scale, c_gate, c_mlp_shift, c_mlp_scale, c_mlp_gate = c_values
        ops, eps = (norm_modulate, add_gated_norm_modulate), self.epsilon(block)
        norm, add_and_norm = (partial(self.normalise, op, eps=eps) for op in ops)
        norm_x, norm_c = _by_frame(norm, (x,), first, scale, shift), norm(context, c_scale, c_shift)
        if self.runs_attention(block, inputs):
            attended = self.attend(block.attn, norm_x, norm_c, self.tables(inputs))
        else:
            attended = self.attend_by_module(block.attn, inputs, norm_x, norm_c)
        self.remember("attention", attended)
        attn_x, attn_c, *more = attended
        x, norm_x = _by_frame(add_and_norm, (x, attn_x), first, gate, mlp_scale, mlp_shift)
        context, norm_c = add_and_norm(context, attn_c, c_gate, c_mlp_scale, c_mlp_shift)
        mlp_x, mlp_c = map(self.feed_forward, (getattr(block, name) for name in self.mlps), (norm_x, norm_c))
        self.remember("mlp", (mlp_x, mlp_c))
        x, context = _by_frame(add_gated, (x, mlp_x), first, mlp_gate), add_gated(context, mlp_c, c_mlp_gate)
        return self._streams(x, context, more)

    def forecast(self, block: nn.Module, inputs: SimpleNamespace) -> Streams:
        """Compute the output from cached attention and MLP; gates are fresh."""
        x, context = inputs.hidden_states, inputs.encoder_hidden_states
        (attn_x, attn_c, *more), (mlp_x, mlp_c) = self.recall("attention"), self.recall("mlp")
        first, *both = self.modulations(block, inputs)
        (gate, mlp_gate), (c_gate, c_mlp_gate) = (values[2::3] for values in both)
        x = _by_frame(add_gated, (_by_frame(add_gated, (x, attn_x), first, gate), mlp_x), first, mlp_gate)
        context = add_gated(add_gated(context, attn_c, c_gate), mlp_c, c_mlp_gate)
        return self._streams(x, context, more)

    def attend(self, attn: nn.Module, x: torch.Tensor, context: torch.Tensor, rotary: Rotary) -> Streams:
        """Joint attention of both streams, with their output projections."""
        site, text = self.site(), context.shape[1]
        q, k, v = self.project(site, attn, x, context, rotary)
        o = self.attend_jointly(site, attn, q, k, v, text)
        start = text if self.text_first else x.shape[1]  # of the second stream
        of_image, of_text = self.in_order(slice(start), slice(start, None))
        attended, out = o.flatten(2), attn.to_out[0]
        if site.caches_bias:
            projected = site.project_out(o, out.weight, out.bias, of_image)
        else:
            projected = project(out, attended, of_image)
        return attn.to_out[1](projected), project(attn.to_add_out, attended, of_text)

    def _streams(self, x: torch.Tensor, context: torch.Tensor, more: list[torch.Tensor]) -> Streams:
        """Return both streams; ``more`` holds attention to image prompts, which is added to the image stream."""
        for image_prompt in more:
            x = x + image_prompt
        return self.in_order(x, self.bounded(context))


class SingleBlockHook(JointBlockHook):
    """A block over the joint sequence, whose last projection is ``[W_attn | W_mlp]``; the cached bias is of W_attn."""

    def modulations(self, block: nn.Module, inputs: SimpleNamespace) -> tuple[int | None, Values]:
        """Return :func:`of_frames` of three values."""
        return of_frames(block.norm, inputs, 3)

    def sliced(self, block: nn.Module) -> list[nn.Module]:
        return [self.query_projection(block.attn), block.proj_out]

    def compute(self, block: nn.Module, inputs: SimpleNamespace) -> Any:
        residual = self.joined(inputs)
        first, (shift, scale, gate) = self.modulations(block, inputs)
        norm = partial(self.normalise, norm_modulate, eps=self.epsilon(block))
        out = self.transform(block, inputs, _by_frame(norm, (residual,), first, scale, shift))
        self.remember("attention and mlp", (out,))
        return self.parted(self.bounded(_by_frame(add_gated, (residual, out), first, gate)), inputs)

    def forecast(self, block: nn.Module, inputs: SimpleNamespace) -> Any:
        """Compute the output from cached attention and MLP; the gate is fresh."""
        (out,) = self.recall("attention and mlp")
        first, (_, _, gate) = self.modulations(block, inputs)
        return self.parted(self.bounded(_by_frame(add_gated, (self.joined(inputs), out), first, gate)), inputs)

    def transform(self, block: nn.Module, inputs: SimpleNamespace, x: torch.Tensor) -> torch.Tensor:
        """Attention and MLP of the normalised sequence ``x`` ``[B, T, C]``, with the last projection."""
        late = in_8_bits(block.proj_out, x) if is_tanh_gelu(block.act_mlp) else None
        mlp = project_gelu(block.proj_mlp, block.act_mlp, x) if late is None else project(block.proj_mlp, x)
        attn, out, width = block.attn, block.proj_out, x.shape[2]
        if not self.runs_attention(block, inputs):
            return _project_both(out, self.attend_by_module(attn, inputs, x, None), mlp, late)
        site = self.site()
        q, k, v = self.project(site, attn, x, None, self.tables(inputs))
        o = self.attend_jointly(site, attn, q, k, v, inputs.encoder_hidden_states.shape[1])
        if not site.caches_bias:
            return _project_both(out, o.flatten(2), mlp, late)
        return site.project_out(o, out.weight[:, :width], out.bias) + functional.linear(mlp, out.weight[:, width:])

    def joined(self, inputs: SimpleNamespace) -> torch.Tensor:
        """Return the joint sequence from the block's arguments."""
        return join_streams(*self.in_order(inputs.hidden_states, inputs.encoder_hidden_states))

    def parted(self, joint: torch.Tensor, inputs: SimpleNamespace) -> Any:
        """Split a joint sequence into the block's return values."""
        start = self.in_order(inputs.hidden_states, inputs.encoder_hidden_states)[0].shape[1]
        return joint[:, :start], joint[:, start:]


def _project_both(
    linear: nn.Module, attended: torch.Tensor, mlp: torch.Tensor, late: QuantizedLinears | None
) -> torch.Tensor:
    """Apply ``linear`` to attention and MLP, concatenated; ``late`` also applies the MLP's activation."""
    if late is None:
        return linear(torch.cat([attended, mlp], dim=2))
    return late.project(linear, x=attended, hidden=(mlp,))


def of_frames(norm: nn.Module, inputs: SimpleNamespace, count: int) -> tuple[int | None, Values]:
    """Return None and the values ``[B, 1, C]`` of a block's norm: shift, scale, gate of its attention, then of its MLP.

    With ``token_replace`` return the number of the first frame's tokens, and a pair for each value.
    """
    values = in_parts(modulation(norm, inputs.temb), count)
    if (embedding := getattr(inputs, "token_replace_emb", None)) is None:
        return None, values
    return inputs.num_tokens, tuple(zip(in_parts(modulation(norm, embedding), count), values, strict=True))


def modulation(norm: nn.Module, temb: torch.Tensor) -> torch.Tensor:
    """All modulation values of a norm, concatenated."""
    return norm.linear(norm.silu(temb))


def in_parts(values: torch.Tensor, count: int) -> Values:
    """``[B, count * C]``, or ``[B, S, count * C]`` with values per token, -> ``count`` of ``[B, 1 or S, C]``."""
    return (values if values.ndim == 3 else values.unsqueeze(1)).chunk(count, dim=2)


def _by_frame(function: Callable[..., Any], tensors: tuple[torch.Tensor, ...], first: int | None, *values: Any) -> Any:
    """``function(*tensors, *values)``, in which the ``first`` tokens may have separate values."""
    if first is None:
        return function(*tensors, *values)
    parts = zip((slice(first), slice(first, None)), *values, strict=True)
    results = [function(*(x[:, tokens] for x in tensors), *of_part) for tokens, *of_part in parts]
    if isinstance(results[0], tuple):
        return tuple(torch.cat(part, dim=1) for part in zip(*results, strict=True))
    return torch.cat(results, dim=1)
