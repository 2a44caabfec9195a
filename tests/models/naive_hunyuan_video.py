"""HunyuanVideo under FlashOmni's and TaylorSeer's rules the slow, obvious way, padding and its mask included.

Attention runs over the tokens that diffusers' mask lets through; what the padding behind them gets is zero.
"""

from __future__ import annotations

import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from torch.nn import functional

from dit_accel.kernels.layout import TokenLayout
from dit_accel.presets import Preset
from tests.models.naive_flux import NaiveAttention, run_sites


class NaiveProcessor(NaiveAttention, HunyuanVideoAttnProcessor2_0):
    """For one sample; single blocks project both streams by the same weights."""

    def __call__(self, attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb):
        image, text = hidden_states, encoder_hidden_states
        vision, valid = image.shape[1], int(attention_mask.sum())
        of_image = [attn.to_q, attn.to_k, attn.to_v, attn.norm_q, attn.norm_k]
        of_text = [attn.add_q_proj, attn.add_k_proj, attn.add_v_proj, attn.norm_added_q, attn.norm_added_k]
        q, k, v = self._project(attn, image, *of_image)
        q, k = (apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in (q, k))
        text_qkv = self._project(attn, text, *(of_image if attn.add_q_proj is None else of_text))
        q, k, v = (torch.cat(pair, dim=1)[:, :valid] for pair in zip((q, k, v), text_qkv, strict=True))
        layout = TokenLayout(valid - vision, vision, self.schedule.preset.blocks.size, text_first=False)
        o = self.attend(q, k, v, layout).flatten(2)
        o = functional.pad(o, (0, 0, 0, vision + text.shape[1] - valid))
        image, text = o[:, :vision], o[:, vision:]
        return (image, text) if attn.add_q_proj is None else (attn.to_out[0](image), attn.to_add_out(text))

    def _project(self, attn, x, to_q, to_k, to_v, norm_q, norm_k):
        q, k, v = (to(x).unflatten(-1, (attn.heads, -1)) for to in (to_q, to_k, to_v))
        return norm_q(q), norm_k(k), v


def run(pipe, preset: Preset, inputs: dict):
    """The pipeline's result, and the blocks' processors."""
    return run_sites(pipe, preset, inputs, NaiveProcessor)
