"""FLUX.2's blocks: FLUX's attention, gated MLPs, and modulations shared by all blocks of a kind.

A single block has one projection for queries, keys, values and MLP, and one for the outputs of attention and MLP.
"""

from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.transformers import transformer_flux2 as flux2
from torch import nn
from torch.nn import functional

from dit_accel.kernels import swiglu
from dit_accel.models.beside.quantized_linears import in_8_bits, project
from dit_accel.models.fused.flux import FluxBlockHook
from dit_accel.models.fused.joint import DoubleBlockHook, SingleBlockHook, Values, in_parts
from dit_accel.models.fused.parts import heads_of, is_hooked, normalise_heads, normalise_pair, project_gated


class Flux2DoubleBlockHook(FluxBlockHook, DoubleBlockHook):
    """``Flux2TransformerBlock``."""

    processors = (flux2.Flux2AttnProcessor,)
    reads = "temb_mod_img", "temb_mod_txt"
    first_norm = "norm1"

    def modulations(self, block: nn.Module, inputs: SimpleNamespace) -> tuple[None, Values, Values]:
        return None, in_parts(inputs.temb_mod_img, 6), in_parts(inputs.temb_mod_txt, 6)

    def feed_forward(self, mlp: flux2.Flux2FeedForward, x: torch.Tensor) -> torch.Tensor:
        is_plain = type(mlp) is flux2.Flux2FeedForward and not is_hooked(mlp)
        if not is_plain or not _is_plain_gate(mlp.act_fn):
            return mlp(x)
        return project_gated(mlp.linear_out, *project(mlp.linear_in, x).chunk(2, dim=-1))


class Flux2SingleBlockHook(FluxBlockHook, SingleBlockHook):
    """Hook on ``Flux2SingleTransformerBlock``, which takes the joint sequence and returns it."""

    processors = (flux2.Flux2ParallelSelfAttnProcessor,)
    reads = ("temb_mod",)
    first_norm = "norm"

    def why_own(self, block: nn.Module, inputs: SimpleNamespace) -> str | None:
        apart = inputs.encoder_hidden_states is not None or inputs.split_hidden_states
        return "its streams are apart, while diffusers' transformer joins them" if apart else None

    def sliced(self, block: nn.Module) -> list[nn.Module]:
        return [block.attn.to_qkv_mlp_proj, block.attn.to_out]

    def modulations(self, block: nn.Module, inputs: SimpleNamespace) -> tuple[None, Values]:
        return None, in_parts(inputs.temb_mod, 3)

    def attend_by_module(
        self, attn: flux2.Flux2ParallelSelfAttention, inputs: SimpleNamespace, x: torch.Tensor, context: None
    ) -> Any:
        """Run the block's attention module, which includes the MLP."""
        return attn(hidden_states=x, image_rotary_emb=self.tables(inputs), **(inputs.joint_attention_kwargs or {}))

    def transform(self, block: nn.Module, inputs: SimpleNamespace, x: torch.Tensor) -> torch.Tensor:
        if not self.runs_attention(block, inputs):
            return self.attend_by_module(block.attn, inputs, x, None)
        site, attn, out, rotary = self.site(), block.attn, block.attn.to_out, self.tables(inputs)
        first, width = attn.to_qkv_mlp_proj, attn.inner_dim
        if site.dispatches:
            output = functional.linear(x, first.weight[width:], None if first.bias is None else first.bias[width:])
        else:
            output = project(first, x)
        *qk, v, hidden = output.split([width] * (2 if site.dispatches else 3) + [2 * attn.mlp_hidden_dim], dim=2)
        *qk, v = (heads_of(attn, part) for part in (*qk, v))
        if site.dispatches:
            q, k = torch.empty_like(v, memory_format=torch.contiguous_format), normalise_heads(attn.norm_k, *qk, rotary)
            bias = None if first.bias is None else first.bias[:width]
            site.query(x, first.weight[:width], bias, attn.norm_q, rotary, out=q, offset=0)
        else:
            q, k = normalise_pair((attn.norm_q, attn.norm_k), *qk, rotary)
        joint, is_plain = self.driver.facts.joint, _is_plain_gate(attn.mlp_act_fn)
        o = self.attend_jointly(site, attn, q, k, v, 0 if joint is None else joint.text)
        linears = in_8_bits(out, x) if is_plain and not site.caches_bias else None
        if linears is not None:
            return linears.project(out, x=o.flatten(2), hidden=hidden.chunk(2, dim=-1))
        features = x.new_empty(*x.shape[:2], width + attn.mlp_hidden_dim)
        inner = features[..., width:]
        mlp = swiglu(hidden, out=inner) if is_plain else inner.copy_(attn.mlp_act_fn(hidden))
        if site.caches_bias:
            return site.project_out(o, out.weight[:, :width], out.bias) + functional.linear(mlp, out.weight[:, width:])
        features[..., :width] = o.flatten(2)
        return out(features)

    def joined(self, inputs: SimpleNamespace) -> torch.Tensor:
        return inputs.hidden_states

    def parted(self, joint: torch.Tensor, inputs: SimpleNamespace) -> torch.Tensor:
        return joint


def _is_plain_gate(activation: nn.Module) -> bool:
    """Return True if an activation is diffusers' own SwiGLU without hooks."""
    return type(activation) is flux2.Flux2SwiGLU and not is_hooked(activation) and not is_hooked(activation.gate_fn)


BLOCKS = {"transformer_blocks": Flux2DoubleBlockHook, "single_transformer_blocks": Flux2SingleBlockHook}
