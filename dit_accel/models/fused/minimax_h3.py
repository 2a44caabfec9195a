"""MiniMax-H3's block over the joint sequence, whose tokens take their modulations by timestep and modality.

    x' = x + g attention(RMSNorm(x) (1 + s) + t)          x'' = x' + g_2 mlp(RMSNorm(x') (1 + s_2) + t_2)

RoPE turns the first features of each head, in two halves. The weights of the norms are multiplied into the scales.
"""

from types import SimpleNamespace

import torch
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3AttnProcessor
from torch import nn

from dit_accel.kernels import add_gated, add_gated_norm_modulate, norm_modulate
from dit_accel.models.fused.block_hook import BlockHook
from dit_accel.models.fused.parts import Rotary, feed_forward, normalise_pair, query_key_value, why_no_plain_norms


class MiniMaxH3BlockHook(BlockHook):
    """``MiniMaxH3TransformerBlock``."""

    processors = (MiniMaxH3AttnProcessor,)

    def why_own(self, block: nn.Module, inputs: SimpleNamespace) -> str | None:
        return why_no_plain_norms((block.norm1, block.norm2), inputs.hidden_states.device)

    def why_unsupported(self, block: nn.Module, inputs: SimpleNamespace) -> str | None:
        if inputs.attention_mask is not None:
            return "a mask changes attention"
        return why_no_plain_norms((block.attn.norm_q, block.attn.norm_k), inputs.hidden_states.device)

    def compute(self, block: nn.Module, inputs: SimpleNamespace) -> torch.Tensor:
        x, rows = inputs.hidden_states, inputs.adaln_indices
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = _modulation(block, inputs.temb)
        settings, scale = {"rms": True, "rows": rows}, _scaled(block.norm1, scale)
        norm_x = self.normalise(norm_modulate, x, scale, shift, eps=block.norm1.eps, **settings)
        if self.runs_attention(block, inputs):
            attended = self.attend(block.attn, norm_x, inputs.rotary_emb)
        else:
            attended = block.attn(norm_x, inputs.rotary_emb, inputs.attention_mask)
        attended, scale = attended.to(x.dtype), _scaled(block.norm2, mlp_scale)  # under autocast it has another dtype
        values, eps = (attended, gate, scale, mlp_shift), block.norm2.eps
        x, norm_x = self.normalise(add_gated_norm_modulate, x, *values, eps=eps, **settings)
        mlp = feed_forward(block.ff, norm_x).to(x.dtype)
        self.remember("attention and mlp", (attended, mlp))
        return add_gated(x, mlp, mlp_gate, rows=rows)

    def forecast(self, block: nn.Module, inputs: SimpleNamespace) -> torch.Tensor:
        attended, mlp = self.recall("attention and mlp")
        _, _, gate, _, _, mlp_gate = _modulation(block, inputs.temb)
        x = add_gated(inputs.hidden_states, attended, gate, rows=inputs.adaln_indices)
        return add_gated(x, mlp, mlp_gate, rows=inputs.adaln_indices)

    def attend(self, attn: nn.Module, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Attention ``[B, S, C]`` with its output projection."""
        q, k, v = query_key_value(attn, x)
        half = rotary[0].shape[-1] // 2  # both halves of a table are equal
        tables = tuple(table[None, :, None, :half] for table in rotary)
        q, k = normalise_pair((attn.norm_q, attn.norm_k), q, k, tables)
        return attn.to_out[1](attn.to_out[0](self.attend_computed(self.site(), attn, q, k, v).flatten(2)))


def _modulation(block: nn.Module, temb: torch.Tensor) -> list[torch.Tensor]:
    """Tables of shift, scale and gate of attention, then of the MLP: float32 ``[1, R, C]``."""
    return [table.float()[None] for table in block.adaln_proj(temb)]


def _scaled(norm: nn.RMSNorm, scale: torch.Tensor) -> torch.Tensor:
    """Scales ``[1, R, C]`` with which an RMSNorm without a weight gives what the norm and its scales give."""
    return norm.weight.float() * (1 + scale) - 1


BLOCKS = {"transformer_blocks": MiniMaxH3BlockHook}
