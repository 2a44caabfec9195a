"""Qwen-Image's blocks, all double: FLUX's attention, with other forms of modulations and RoPE tables."""

from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from dit_accel.models.fused.flux import FluxBlockHook
from dit_accel.models.fused.joint import DoubleBlockHook, Streams, Values, in_parts
from dit_accel.models.fused.parts import Rotary

_REAL = WeakIdKeyDictionary()  # the image's complex table -> the text's, and the real tables of both


class QwenImageBlockHook(FluxBlockHook, DoubleBlockHook):
    """``QwenImageTransformerBlock``."""

    processors = (QwenDoubleStreamAttnProcessor2_0,)
    reads = "hidden_states", "encoder_hidden_states", "encoder_hidden_states_mask", "temb", "image_rotary_emb"
    norms = "img_norm", "txt_norm"  # modulations are called, not replaced
    mlps = "img_mlp", "txt_mlp"
    first_norm = "img_norm1"

    def _bind(self, args: tuple, kwargs: dict[str, Any]) -> SimpleNamespace:
        inputs = super()._bind(args, kwargs)
        if self._why_other is None:  # one negative prompt may serve the whole batch
            inputs.encoder_hidden_states = inputs.encoder_hidden_states.expand(len(inputs.hidden_states), -1, -1)
        return inputs

    def why_unsupported(self, block: nn.Module, inputs: SimpleNamespace) -> str | None:
        if inputs.encoder_hidden_states_mask is not None:
            return "a mask hides padding between text and image"
        if block.attn.fused_projections:
            return "its projections were fused, which its processor ignores"
        return super().why_unsupported(block, inputs)

    def attend_by_module(
        self, attn: Attention, inputs: SimpleNamespace, x: torch.Tensor, context: torch.Tensor | None
    ) -> Any:
        mask, tables = inputs.encoder_hidden_states_mask, inputs.image_rotary_emb
        extra = dict(inputs.joint_attention_kwargs or {}, encoder_hidden_states_mask=mask, image_rotary_emb=tables)
        return attn(hidden_states=x, encoder_hidden_states=context, **extra)

    def tables(self, inputs: SimpleNamespace) -> Rotary:
        """Return the RoPE tables of the joint sequence; all blocks of a call share them."""
        of_image, of_text = inputs.image_rotary_emb
        known = _REAL.get(of_image)
        if known is None or known[0] is not of_text:
            table = torch.cat([of_text, of_image])  # of `exp(i angle)`; cosines and sines repeat for pairs of features
            real = tuple(part.repeat_interleave(2, dim=-1).float() for part in (table.real, table.imag))
            _REAL[of_image] = known = of_text, real
        return known[1]

    def modulations(self, block: nn.Module, inputs: SimpleNamespace) -> tuple[None, Values, Values]:
        """Return the modulations; with ``zero_cond_t`` tokens of images to edit have the second half of embeddings."""
        temb, index, image = inputs.temb, getattr(inputs, "modulate_index", None), block.img_mod(inputs.temb)
        if getattr(block, "zero_cond_t", False):  # diffusers 0.36 has neither
            temb = temb.chunk(2)[0]
        if index is not None:
            of_latents, of_given = image.unsqueeze(1).chunk(2)
            image = torch.where(index.unsqueeze(-1) == 0, of_latents, of_given)
        return None, in_parts(image, 6), in_parts(block.txt_mod(temb), 6)

    def _streams(self, x: torch.Tensor, context: torch.Tensor, more: list[torch.Tensor]) -> Streams:
        return super()._streams(self.bounded(x), context, more)


BLOCKS = {"transformer_blocks": QwenImageBlockHook}
