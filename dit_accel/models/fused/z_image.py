"""Z-Image's block over the joint sequence: each part has an RMSNorm before it, and another one behind it.

    x' = x + tanh(g) RMSNorm(attention(RMSNorm(x) s))          x'' = x' + tanh(g_2) RMSNorm(mlp(RMSNorm(x') s_2))

Scales and gates hold the norms' weights. In the Omni model tokens of input images have their own modulations.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.transformers.transformer_z_image import FeedForward, ZSingleStreamAttnProcessor
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from dit_accel.kernels import add_gated, add_gated_norm_modulate, norm_modulate
from dit_accel.models.beside.quantized_linears import project_together
from dit_accel.models.fused import parts
from dit_accel.models.fused.block_hook import BlockHook
from dit_accel.models.fused.parts import Rotary

NORMS = ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")  # in the order of their modulations
_TABLES = WeakTensorKeyDictionary()  # RoPE tables of a call's samples, which all blocks share


class ZImageBlockHook(BlockHook):
    """``ZImageTransformerBlock``."""

    processors = (ZSingleStreamAttnProcessor,)
    attentions = ("attention",)
    norms = ("attention_norm", "ffn_norm")

    def why_own(self, block: nn.Module, inputs: SimpleNamespace) -> str | None:
        return parts.why_no_plain_norms((getattr(block, name) for name in NORMS), inputs.x.device)

    def why_unsupported(self, block: nn.Module, inputs: SimpleNamespace) -> str | None:
        is_one = len(inputs.x) == 1
        if inputs.attn_mask is not None and not is_one:  # older versions pass a mask of ones
            return "a mask hides padding behind shorter sequences"
        if block.attention.norm_q is None:
            return "queries have no norm"
        if not is_one and self.preset.forecast.level == "head":
            return "tokens of each sample have positions of their own"
        return None

    def sliced(self, block: nn.Module) -> list[nn.Module]:
        return [block.attention.to_q, block.attention.to_out[0]]

    def compute(self, block: nn.Module, inputs: SimpleNamespace) -> torch.Tensor:
        x = inputs.x
        scale, gate, mlp_scale, mlp_gate = _modulation(block, inputs, NORMS)
        norm_x = self.normalise(norm_modulate, x, scale, eps=block.attention_norm1.eps, rms=True)
        if self.runs_attention(block, inputs):
            attended = self.attend(block.attention, norm_x, _tables(inputs.freqs_cis))
        else:
            attended = block.attention(norm_x, attention_mask=inputs.attn_mask, freqs_cis=inputs.freqs_cis)
        attended = attended.to(x.dtype)  # under autocast it has another one
        eps = {"eps": block.ffn_norm1.eps, "update_eps": block.attention_norm2.eps}
        x, norm_x = self.normalise(add_gated_norm_modulate, x, attended, gate, mlp_scale, rms=True, **eps)
        mlp = parts.gated_mlp(block.feed_forward, FeedForward, ("w1", "w3", "w2"), norm_x).to(x.dtype)
        self.remember("attention and mlp", (attended, mlp))
        return add_gated(x, mlp, mlp_gate, update_eps=block.ffn_norm2.eps)

    def forecast(self, block: nn.Module, inputs: SimpleNamespace) -> torch.Tensor:
        """Attention and MLP from the cache; their norms and gates are fresh."""
        gate, mlp_gate = _modulation(block, inputs, NORMS[1::2])
        attended, mlp = self.recall("attention and mlp")
        x = add_gated(inputs.x, attended, gate, update_eps=block.attention_norm2.eps)
        return add_gated(x, mlp, mlp_gate, update_eps=block.ffn_norm2.eps)

    def attend(self, attn: nn.Module, x: torch.Tensor, rotary: list[Rotary]) -> torch.Tensor:
        """Attention ``[B, S, C]`` with its output projection."""
        site, out, norms = self.site(), attn.to_out[0], (attn.norm_q, attn.norm_k)
        if site.dispatches:
            k, v = (parts.heads_of(attn, layer(x)) for layer in (attn.to_k, attn.to_v))
            q, k = torch.empty_like(v), parts.normalise_heads(attn.norm_k, k, rotary[0])
            site.query(x, attn.to_q.weight, attn.to_q.bias, attn.norm_q, rotary[0], out=q, offset=0)
            o = site.attend(site.plan, q, k, v)
        else:
            q, k, v = (parts.heads_of(attn, part) for part in project_together((attn.to_q, attn.to_k, attn.to_v), x))
            turned = [torch.empty_like(item, memory_format=torch.contiguous_format) for item in (q, k)]
            for sample, tables in enumerate(rotary):
                of_sample = slice(sample, sample + 1)
                written = tuple(item[of_sample] for item in turned)
                parts.normalise_pair(norms, q[of_sample], k[of_sample], tables, out=written)
            o = self.attend_computed(site, attn, *turned, v)
        projected = self.project_out(site, out, o)
        return projected if len(attn.to_out) == 1 else attn.to_out[1](projected)

    def _bind(self, args: tuple, kwargs: dict[str, Any]) -> SimpleNamespace:
        inputs = super()._bind(args, kwargs)
        inputs.hidden_states = inputs.x
        return inputs


def _modulation(block: nn.Module, inputs: SimpleNamespace, names: Sequence[str]) -> list[torch.Tensor]:
    """Return scales - 1 or gates after some of the norms, times the norms' weights: float32 ``[B, 1 or S, C]``."""

    def values(embedding: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(zip(NORMS, block.adaLN_modulation(embedding).float().unsqueeze(1).chunk(4, dim=2), strict=True))

    if (noisy := getattr(inputs, "noise_mask", None)) is None:
        found = values(inputs.adaln_input)
    else:
        fresh, clean = values(inputs.adaln_noisy), values(inputs.adaln_clean)
        found = {name: torch.where(noisy.unsqueeze(-1) == 1, fresh[name], clean[name]) for name in names}
    of_norms = ((name, getattr(block, name).weight.float(), found[name]) for name in names)
    return [weight * (1 + x) - 1 if name.endswith("1") else weight * x.tanh() for name, weight, x in of_norms]


def _tables(turns: torch.Tensor) -> list[Rotary]:
    """Cosines and sines of each sample, float32 ``[S, D]``, from complex ``[B, S, D / 2]``."""
    if (found := _TABLES.get(turns)) is None:
        cos, sin = (part.float().repeat_interleave(2, dim=2) for part in (turns.real, turns.imag))
        found = _TABLES[turns] = list(zip(cos, sin, strict=True))
    return found


BLOCKS = {"layers": ZImageBlockHook}
