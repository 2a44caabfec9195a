"""Parts of the FLUX demo: `FluxPipeline` with CLIP and T5 text, at a size that trains in minutes."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline

from .autoencoder import make_autoencoder
from .family import Family
from .flow import SHIFT, SHIFT_TOKENS, PromptedFlow, make_transformer
from .text_encoders import (
    make_clip_encoder,
    make_clip_tokenizer,
    make_t5_encoder,
    make_t5_tokenizer,
    tokenize_prompts,
)


class Flux(Family):
    """See `Family`; `make_flow`'s model also takes the positions of the image's tokens.

    Args:
        blocks: double blocks, single blocks and heads of 64 of the transformer.
        shift: the schedule's shift at the two numbers SHIFT_TOKENS of image tokens.
        guidance: whether the transformer embeds a guidance scale.
        channels: channels of the autoencoder at factors 1, 2, 4 and 8.
    """

    name = "flux"

    def __init__(
        self,
        blocks: tuple[int, int, int] = (2, 5, 4),
        shift: tuple[float, float] = SHIFT,
        *,
        guidance: bool = False,
        channels: tuple[int, ...] = (32, 48, 64, 80),
    ) -> None:
        self.blocks, self.shift, self.guidance, self.channels = blocks, shift, guidance, channels

    def make_vae(self, *, small: bool) -> AutoencoderKL:
        return make_autoencoder((8, 8, 8, 8) if small else self.channels, groups=2)

    def make_tokenizers(self, words: list[str]) -> tuple:
        return make_clip_tokenizer(words), make_t5_tokenizer(words)

    def tokenize(self, tokenizers: tuple, prompts: list[str]) -> tuple[torch.Tensor, ...]:
        return tokenize_prompts(prompts, tokenizers)

    def make_flow(self, tokenizers: tuple, *, small: bool) -> PromptedFlow:
        return PromptedFlow(
            make_transformer(*((1, 1, 1) if small else self.blocks), guidance=self.guidance),
            make_clip_encoder(tokenizers[0], seed=11),
            make_t5_encoder(tokenizers[1], seed=12),
            self.shift,
        )

    def flow_of(self, pipe: FluxPipeline) -> PromptedFlow:
        return PromptedFlow(pipe.transformer, pipe.text_encoder, pipe.text_encoder_2, self.shift)

    def tokenizers_of(self, pipe: FluxPipeline) -> tuple:
        return pipe.tokenizer, pipe.tokenizer_2

    def assemble(self, vae: AutoencoderKL, flow: PromptedFlow, tokenizers: tuple) -> FluxPipeline:
        """Build the pipeline with FLUX.1-dev's kind of schedule: shifted by the number of image tokens."""
        scheduler = FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=self.shift[0],
            max_shift=self.shift[1],
            base_image_seq_len=SHIFT_TOKENS[0],
            max_image_seq_len=SHIFT_TOKENS[1],
        )
        return FluxPipeline(
            scheduler=scheduler,
            vae=vae,
            text_encoder=flow.clip,
            tokenizer=tokenizers[0],
            text_encoder_2=flow.t5,
            tokenizer_2=tokenizers[1],
            transformer=flow.transformer,
        )
