"""Krea 2's block over the joint sequence: RMSNorms, heads that share keys and values, and a gate on attention's output.

    x' = x + g attention(RMSNorm(x) (1 + s) + t)          x'' = x' + g_2 mlp(RMSNorm(x') (1 + s_2) + t_2)

A norm multiplies by 1 + weight, which is multiplied into the scale.
"""

from types import SimpleNamespace

import torch
from diffusers.models.transformers.transformer_krea2 import Krea2AttnProcessor, Krea2RMSNorm, Krea2SwiGLU
from torch import nn

from dit_accel.kernels import add_gated, add_gated_norm_modulate, norm_modulate, norm_rope
from dit_accel.models.beside.quantized_linears import project_together
from dit_accel.models.fused.block_hook import BlockHook
from dit_accel.models.fused.parts import Rotary, gated_mlp, why_not_plain


class Krea2BlockHook(BlockHook):
    """``Krea2TransformerBlock``."""

    processors = (Krea2AttnProcessor,)

    def why_own(self, block: nn.Module, inputs: SimpleNamespace) -> str | None:
        return _why_not_plain((block.norm1, block.norm2), inputs.hidden_states)

    def why_unsupported(self, block: nn.Module, inputs: SimpleNamespace) -> str | None:
        if inputs.attention_mask is not None:
            return "a mask hides padding behind shorter prompts"
        return _why_not_plain((block.attn.norm_q, block.attn.norm_k), inputs.hidden_states)

    def sliced(self, block: nn.Module) -> list[nn.Module]:
        return [block.attn.to_q, block.attn.to_out[0]]

    def compute(self, block: nn.Module, inputs: SimpleNamespace) -> torch.Tensor:
        x, rotary = inputs.hidden_states, inputs.image_rotary_emb
        scale, shift, gate, mlp_scale, mlp_shift, mlp_gate = _modulation(block, inputs.temb)
        scale, mlp_scale = _scaled(block.norm1, scale), _scaled(block.norm2, mlp_scale)
        norm_x = self.normalise(norm_modulate, x, scale, shift, eps=block.norm1.eps, rms=True)
        if self.runs_attention(block, inputs):
            attended = self.attend(block.attn, norm_x, rotary)
        else:
            attended = block.attn(norm_x, attention_mask=inputs.attention_mask, image_rotary_emb=rotary)
        attended = attended.to(x.dtype)  # under autocast it has another one
        values, eps = (attended, gate, mlp_scale, mlp_shift), block.norm2.eps
        x, norm_x = self.normalise(add_gated_norm_modulate, x, *values, eps=eps, rms=True)
        mlp = gated_mlp(block.ff, Krea2SwiGLU, ("gate", "up", "down"), norm_x).to(x.dtype)
        self.remember("attention and mlp", (attended, mlp))
        return add_gated(x, mlp, mlp_gate)

    def forecast(self, block: nn.Module, inputs: SimpleNamespace) -> torch.Tensor:
        attended, mlp = self.recall("attention and mlp")
        _, _, gate, _, _, mlp_gate = _modulation(block, inputs.temb)
        return add_gated(add_gated(inputs.hidden_states, attended, gate), mlp, mlp_gate)

    def attend(self, attn: nn.Module, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Attention ``[B, S, C]`` with its gate and output projection; the cached bias is of the gated attention."""
        site, out, norm_q, norm_k = self.site(), attn.to_out[0], attn.norm_q, attn.norm_k
        k, v = (_heads(attn.num_kv_heads, output) for output in project_together((attn.to_k, attn.to_v), x))
        k = norm_rope(k, 1 + norm_k.weight, rotary, eps=norm_k.eps)
        k, v = (item.repeat_interleave(attn.num_heads // attn.num_kv_heads, dim=2) for item in (k, v))
        if site.dispatches:
            q, gate = torch.empty_like(v), _heads(attn.num_heads, attn.to_gate(x)).sigmoid()
            norm = SimpleNamespace(weight=(1 + norm_q.weight).to(x.dtype), eps=norm_q.eps)
            site.query(x, attn.to_q.weight, attn.to_q.bias, norm, rotary, out=q, offset=0)
            o = site.attend(site.plan, q, k, v)
        else:
            q, gate = (_heads(attn.num_heads, output) for output in project_together((attn.to_q, attn.to_gate), x))
            q, gate = norm_rope(q, 1 + norm_q.weight, rotary, eps=norm_q.eps), gate.sigmoid()
            o = self.attend_computed(site, attn, q, k, v, gate=gate)
        return self.project_out(site, out, o * gate)


def _modulation(block: nn.Module, temb: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Scale, shift and gate of attention, then of the MLP, float32 ``[B, 1, C]``, from ``[B, 1, 6 * C]``."""
    return (temb.float().unflatten(2, (6, -1)) + block.scale_shift_table).unbind(2)


def _scaled(norm: Krea2RMSNorm, scale: torch.Tensor) -> torch.Tensor:
    """Scale ``[B, 1, C]`` with which an RMSNorm without a weight gives what the norm and its scale give."""
    return (1 + norm.weight.float()) * (1 + scale) - 1


def _heads(count: int, x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(2, (count, -1))


def _why_not_plain(norms: tuple[nn.Module, nn.Module], x: torch.Tensor) -> str | None:
    """Return why kernels can't stand in for one of these norms, or None."""
    are_plain = all(type(norm) is Krea2RMSNorm and why_not_plain(norm, x.device) is None for norm in norms)
    return None if are_plain else "a norm is no plain Krea2RMSNorm"


BLOCKS = {"transformer_blocks": Krea2BlockHook}
