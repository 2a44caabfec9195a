"""LTX-2's block: a video and an audio stream of the same form, y and z, and attention between them.

    y' = y + g_1 attention(n_1(y))                       y'' = y' + g_2 attention(n_2(y'), prompt)
    y''' = y'' + g_3 attention(n_3(y''), m(z''))         y'''' = y''' + g_4 mlp(n_4(y'''))

n and m are RMSNorms without weights, each with a modulation. RoPE has tables for each head.
"""

from functools import partial
from types import SimpleNamespace

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_ltx2 import LTX2Attention
from torch import nn

from dit_accel.kernels import add_gated, add_gated_norm_modulate, norm_modulate
from dit_accel.models.beside.quantized_linears import project_together
from dit_accel.models.fused.block_hook import BlockHook
from dit_accel.models.fused.parts import feed_forward, heads_of, normalise_heads, normalise_pair, why_no_plain_norms

ATTENTIONS = {  # arguments of the block for each: RoPE tables of queries and of keys, and a mask
    "attn1": ("video_rotary_emb", "video_rotary_emb", "self_attention_mask"),
    "audio_attn1": ("audio_rotary_emb", "audio_rotary_emb", "audio_self_attention_mask"),
    "audio_to_video_attn": ("ca_video_rotary_emb", "ca_audio_rotary_emb", "a2v_cross_attention_mask"),
    "video_to_audio_attn": ("ca_audio_rotary_emb", "ca_video_rotary_emb", "v2a_cross_attention_mask"),
}
STREAMS = {"": "audio_to_video_attn", "audio_": "video_to_audio_attn"}  # attention to the other stream by prefix
PERTURBED = ("perturbation_mask", "all_perturbed")  # arguments of guidance that replaces self-attention by its values


class LTX2BlockHook(BlockHook):
    """``LTX2VideoTransformerBlock``."""

    processors = tuple(LTX2Attention._available_processors)
    attentions = tuple(ATTENTIONS)
    reads = ("temb_prompt", "temb_prompt_audio", "use_a2v_cross_attention", "use_v2a_cross_attention", *PERTURBED)
    norms = ("norm", "audio_norm", "audio_to_video_norm", "video_to_audio_norm")

    def why_own(self, block: nn.Module, inputs: SimpleNamespace) -> str | None:
        norms = [part for name, part in block.named_children() if name.startswith(self.norms)]
        are_plain = all(type(norm) is RMSNorm and norm.weight is None and norm.eps == norms[0].eps for norm in norms)
        return None if are_plain else "a norm is no RMSNorm without weights"

    def why_unsupported(self, block: nn.Module, inputs: SimpleNamespace) -> str | None:
        masks = (mask for *_, mask in ATTENTIONS.values())
        if any(getattr(inputs, name) is not None for name in (PERTURBED[0], *masks)):
            return "guidance or a mask changes attention"
        parts = [getattr(block, name) for name in ATTENTIONS]
        if any(attn.rope_type != "split" for attn in parts):
            return "RoPE turns adjacent features"
        norms = (norm for attn in parts for norm in (attn.norm_q, attn.norm_k))
        return why_no_plain_norms(norms, inputs.hidden_states.device)

    def compute(self, block: nn.Module, inputs: SimpleNamespace) -> tuple[torch.Tensor, ...]:
        attend = partial(self.attend, block, inputs, self.runs_attention(block, inputs))
        streams = [Stream(block, inputs, prefix) for prefix in STREAMS]
        for item in streams:
            item.add(attend(f"{item.prefix}attn1", item.norm(item.norms[0])))
            mask = getattr(inputs, f"{item.prefix}encoder_attention_mask")
            item.add(getattr(block, f"{item.prefix}attn2")(item.normed, item.prompt, mask))
        pairs = [(item, other) for item, other in (streams, streams[::-1]) if item.crosses]
        crossed = [attend(STREAMS[item.prefix], item.normed, other.norm(other.of_keys)) for item, other in pairs]
        for (item, _), update in zip(pairs, crossed, strict=True):
            item.add(update)
        for item in streams:
            item.add(feed_forward(getattr(block, f"{item.prefix}ff"), item.normed))
            self.remember(f"{item.prefix}{len(item.gates)} parts", tuple(item.updates))
        return tuple(item.x for item in streams)

    def forecast(self, block: nn.Module, inputs: SimpleNamespace) -> tuple[torch.Tensor, ...]:
        """Attentions and MLPs from the cache; their gates are fresh."""
        streams = [Stream(block, inputs, prefix) for prefix in STREAMS]
        for item in streams:
            for update, gate in zip(self.recall(f"{item.prefix}{len(item.gates)} parts"), item.gates, strict=True):
                item.x = add_gated(item.x, update, gate)
        return tuple(item.x for item in streams)

    def attend(
        self, block: nn.Module, inputs: SimpleNamespace, is_here: bool, name: str, x: torch.Tensor, *other: torch.Tensor
    ) -> torch.Tensor:
        """Attention ``[B, S, C]`` of a stream to itself or to the other one, with its output projection."""
        attn, (rotary, key_rotary, mask) = getattr(block, name), (getattr(inputs, item) for item in ATTENTIONS[name])
        if not is_here:
            more = {} if other or not block.perturbed_attn else {item: getattr(inputs, item) for item in PERTURBED}
            return attn(x, *(other or (None,)), mask, rotary, key_rotary, **more)
        tables, key_tables = (tuple(item.transpose(1, 2) for item in both) for both in (rotary, key_rotary))
        layers = (attn.to_q, attn.to_k, attn.to_v)
        parts = [attn.to_q(x), *project_together(layers[1:], *other)] if other else project_together(layers, x)
        q, k, v = (heads_of(attn, part) for part in parts)
        if other:
            q, k = normalise_heads(attn.norm_q, q, tables), normalise_heads(attn.norm_k, k, key_tables)
        else:
            q, k = normalise_pair((attn.norm_q, attn.norm_k), q, k, tables)
        if name == "attn1":
            o = self.attend_computed(self.site(), attn, q, k, v)
        else:
            o = dispatch_attention_fn(q, k, v, backend=attn.processor._attention_backend).to(q.dtype)
        if attn.to_gate_logits is not None:
            o = o * (2 * attn.to_gate_logits(x).sigmoid()).unsqueeze(-1)
        return attn.to_out[1](attn.to_out[0](o.flatten(2)))


class Stream:
    """Tokens ``x`` of video or audio, to which a block's parts are added, and ``normed`` for the next part.

    ``norms`` are scale and shift before each part, ``of_keys`` of keys for the other stream, ``gates`` (None = 1) the
    factor ``[B, 1 or S, C]`` of each part, and ``updates`` the outputs of the parts so far.
    """

    def __init__(self, block: nn.Module, inputs: SimpleNamespace, prefix: str) -> None:
        suffix, direction = ("_audio", "v2a") if prefix else ("", "a2v")
        x, prompt = (getattr(inputs, f"{prefix}{name}") for name in ("hidden_states", "encoder_hidden_states"))
        values, table = partial(block.get_mod_params, batch_size=len(x)), getattr(block, f"{prefix}scale_shift_table")
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate, *of_prompt = values(table, getattr(inputs, f"temb{suffix}"))
        prompt_shift, prompt_scale, prompt_gate = of_prompt or (None, x.new_zeros(1, 1, x.shape[2]), None)
        if block.cross_attn_adaln:
            table, temb = getattr(block, f"{prefix}prompt_scale_shift_table"), getattr(inputs, f"temb_prompt{suffix}")
            added, factor = values(table, x.new_zeros(len(x), 1, table.numel()) if temb is None else temb)
            prompt = prompt * (1 + factor) + added
        table = getattr(block, f"{prefix or 'video_'}a2v_cross_attn_scale_shift_table")
        both = values(table[:4], getattr(inputs, f"temb_ca{suffix}_scale_shift"))  # to the video, and to the audio
        of_query, self.of_keys = (both[2:], both[:2]) if prefix else (both[:2], both[2:])
        self.crosses = getattr(inputs, f"use_{direction}_cross_attention")
        crossing = [(of_query, *values(table[4:], getattr(inputs, f"temb_ca{suffix}_gate")))] if self.crosses else []
        parts = [((scale, shift), gate), ((prompt_scale, prompt_shift), prompt_gate), *crossing]
        self.norms, self.gates = zip(*parts, ((mlp_scale, mlp_shift), mlp_gate), strict=True)
        self.prefix, self.x, self.prompt, self.eps = prefix, x, prompt, block.norm1.eps
        self.updates: list[torch.Tensor] = []

    def norm(self, modulation: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
        """Return the tokens, normalised and modulated."""
        return norm_modulate(self.x, *modulation, eps=self.eps, rms=True)

    def add(self, update: torch.Tensor) -> None:
        """Add the output of the next part, and normalise the sum for the part after it."""
        update, gate = update.to(self.x.dtype), self.gates[len(self.updates)]
        self.updates.append(update)
        if len(self.updates) == len(self.norms):
            self.x = add_gated(self.x, update, gate)
            return
        norm = self.norms[len(self.updates)]
        self.x, self.normed = add_gated_norm_modulate(self.x, update, gate, *norm, eps=self.eps, rms=True)


BLOCKS = {"transformer_blocks": LTX2BlockHook}
