"""Parts of the FLUX demo: `FluxPipeline` with CLIP and T5 text, at a size that trains in minutes."""

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from torch import nn
from transformers import CLIPTextModel, T5EncoderModel

from .family import LATENT_CHANNELS, Family, Texts, init_transformer
from .text_encoders import (
    CLIP_TOKENS,
    CLIP_WIDTH,
    T5_WIDTH,
    TEXT_TOKENS,
    make_clip_encoder,
    make_clip_tokenizer,
    make_t5_encoder,
    make_t5_tokenizer,
)

LONG_TEXT = 512  # FluxPipeline's default padded length

# The schedule's shift at these numbers of image tokens, as in FLUX.1-dev but larger: noise levels above 0.85 decide the
# place and shape of a sticker of some thousand latent values, so half of all steps must be there.
SHIFT_TOKENS, SHIFT = (256, 4096), (1.2, 2.7)


class PromptedFlow(nn.Module):
    """Transformer and both text encoders, called as in FluxPipeline."""

    def __init__(self, transformer: FluxTransformer2DModel, clip: CLIPTextModel, t5: T5EncoderModel) -> None:
        super().__init__()
        self.transformer, self.clip, self.t5 = transformer, clip, t5

    def forward(
        self, noisy: torch.Tensor, levels: torch.Tensor, clip_ids: torch.Tensor, t5_ids: torch.Tensor
    ) -> torch.Tensor:
        """Predict the velocity of `noisy`, packed latents of square images, bf16 [B, tokens, 64], at `levels` [B]."""
        return self.transformer(
            hidden_states=noisy,
            encoder_hidden_states=self.t5(t5_ids)[0],
            pooled_projections=self.clip(clip_ids).pooler_output,
            timestep=levels.bfloat16(),
            img_ids=_positions(round(noisy.shape[1] ** 0.5), noisy.device),
            txt_ids=torch.zeros(t5_ids.shape[1], 3, device=noisy.device),
            return_dict=False,
        )[0]


def _positions(side: int, device: torch.device) -> torch.Tensor:
    """FLUX's position ids of the tokens of `side` rows and columns, float32 [tokens, 3]: zero, row, column."""
    places = torch.arange(side, device=device, dtype=torch.float32)
    rows, columns = torch.meshgrid(places, places, indexing="ij")
    return torch.stack((torch.zeros_like(rows), rows, columns), dim=-1).flatten(0, 1)


class Flux(Family):
    """See `Family`. `blocks`: double blocks, single blocks and heads of 64; `shift`: the schedule's at SHIFT_TOKENS;
    `channels`: the autoencoder's at factors 1, 2, 4 and 8.
    """

    name = "flux"

    def __init__(
        self,
        blocks: tuple[int, int, int] = (2, 5, 4),
        shift: tuple[float, float] = SHIFT,
        channels: tuple[int, ...] = (32, 48, 64, 80),
    ) -> None:
        self.blocks, self.shift, self.channels = blocks, shift, channels

    def make_vae(self, *, small: bool) -> AutoencoderKL:
        """Build an autoencoder with FLUX's latent layout, which has no quantisation convolutions."""
        channels = (8, 8, 8, 8) if small else self.channels
        return AutoencoderKL(
            in_channels=3,
            out_channels=3,
            down_block_types=("DownEncoderBlock2D",) * len(channels),
            up_block_types=("UpDecoderBlock2D",) * len(channels),
            block_out_channels=channels,
            layers_per_block=1,
            latent_channels=LATENT_CHANNELS,
            norm_num_groups=2,  # few: normalisation removes a group's mean, which is flat colour, and that matters most
            sample_size=512,
            use_quant_conv=False,
            use_post_quant_conv=False,
            mid_block_add_attention=False,
            force_upcast=False,
        )

    def make_tokenizers(self, words: list[str]) -> tuple:
        return make_clip_tokenizer(words), make_t5_tokenizer(words)

    def tokenizers_of(self, pipe: FluxPipeline) -> tuple:
        return pipe.tokenizer, pipe.tokenizer_2

    def tokenize(self, tokenizers: tuple, prompts: list[str]) -> Texts:
        return tuple(
            tokenizer(prompts, padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
            for tokenizer, length in zip(tokenizers, (CLIP_TOKENS, TEXT_TOKENS), strict=True)
        )

    def lengthen(self, text: Texts) -> Texts:
        clip_ids, t5_ids = text
        return clip_ids, F.pad(t5_ids, (0, LONG_TEXT - t5_ids.shape[1]))  # with T5's padding token, 0

    def make_flow(self, tokenizers: tuple, *, small: bool) -> PromptedFlow:
        double_blocks, single_blocks, heads = (1, 1, 1) if small else self.blocks
        transformer = FluxTransformer2DModel(
            in_channels=64,
            num_layers=double_blocks,
            num_single_layers=single_blocks,
            attention_head_dim=64,
            num_attention_heads=heads,
            joint_attention_dim=T5_WIDTH,
            pooled_projection_dim=CLIP_WIDTH,
            guidance_embeds=False,
            axes_dims_rope=(8, 28, 28),
        )
        modulations = ("norm1.linear", "norm1_context.linear", "norm.linear", "norm_out.linear")
        init_transformer(transformer, zero=modulations)  # every block starts as the identity
        nn.init.zeros_(transformer.proj_out.weight)
        clip, t5 = make_clip_encoder(tokenizers[0], seed=11), make_t5_encoder(tokenizers[1], seed=12)
        return PromptedFlow(transformer, clip, t5)

    def flow_of(self, pipe: FluxPipeline) -> PromptedFlow:
        return PromptedFlow(pipe.transformer, pipe.text_encoder, pipe.text_encoder_2)

    def mean_level(self, latents: torch.Tensor) -> float:
        slope = (self.shift[1] - self.shift[0]) / (SHIFT_TOKENS[1] - SHIFT_TOKENS[0])
        return self.shift[0] + slope * (latents.shape[1] - SHIFT_TOKENS[0])

    def compile_blocks(self, flow: PromptedFlow) -> None:
        flow.transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)

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
