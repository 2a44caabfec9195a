"""Parts of the Wan demo: `WanPipeline` with UMT5 text, at a size that trains in minutes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample
from torch import nn
from transformers import UMT5EncoderModel

from .family import LATENT_CHANNELS, Shape, Texts, VideoFamily, init_transformer, make_scheduler
from .text_encoders import TEXT_TOKENS, make_t5_encoder, make_t5_tokenizer

TEXT_WIDTH = 128
LONG_TEXT = 512  # WanPipeline's default padded length


class WanFlow(nn.Module):
    """Transformer and text encoder, called as in WanPipeline."""

    def __init__(self, transformer: WanTransformer3DModel, text: UMT5EncoderModel) -> None:
        super().__init__()
        self.transformer, self.text = transformer, text

    def forward(self, noisy: torch.Tensor, levels: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Predict the velocity of `noisy` latents at `levels` [N]; the transformer reads padding as zero."""
        states = self.text(ids, mask).last_hidden_state * mask[..., None]
        return self.transformer(noisy, 1000 * levels, states, return_dict=False)[0]


class Wan(VideoFamily):
    """See `VideoFamily`."""

    name = "wan"
    call: ClassVar[dict[str, Any]] = {"guidance_scale": 2.0, "max_sequence_length": TEXT_TOKENS}
    guidance_argument = "guidance_scale"
    long_text_every = 15
    longer: ClassVar[dict[Shape, int]] = {Shape(49, 512): 12}

    def make_vae(self, *, small: bool) -> AutoencoderKLWan:
        return AutoencoderKLWan(
            base_dim=8 if small else 16,
            z_dim=LATENT_CHANNELS,
            dim_mult=[1, 1, 1, 1] if small else [1, 2, 3, 2],
            num_res_blocks=1,
        )

    def encode(self, vae: AutoencoderKLWan, clips: torch.Tensor) -> torch.Tensor:
        encoder = vae.encoder
        values = encoder.conv_in(clips)
        for layer in encoder.down_blocks:
            values = _downsample(layer, values) if isinstance(layer, WanResample) else layer(values)
        return vae.quant_conv(encoder.conv_out(encoder.nonlinearity(encoder.norm_out(encoder.mid_block(values)))))

    def decode(self, vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
        decoder = vae.decoder
        values = decoder.mid_block(decoder.conv_in(vae.post_quant_conv(latents)))
        for block in decoder.up_blocks:
            for resnet in block.resnets:
                values = resnet(values)
            if block.upsamplers is not None:
                values = _upsample(block.upsamplers[0], values)
        return decoder.conv_out(decoder.nonlinearity(decoder.norm_out(values)))

    @contextmanager
    def quick_training(self, vae: AutoencoderKLWan) -> Iterator[None]:
        """Switch to channels last, permanently."""
        for weight in vae.parameters():
            if weight.ndim >= 4 and weight.shape[1] > 1:
                layout = torch.channels_last if weight.ndim == 4 else torch.channels_last_3d
                weight.data = weight.data.contiguous(memory_format=layout)
        yield

    def set_statistics(self, vae: AutoencoderKLWan, mean: torch.Tensor, deviation: torch.Tensor) -> None:
        vae.register_to_config(latents_mean=mean.tolist(), latents_std=deviation.tolist())

    def normalise(self, vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
        mean, deviation = (
            torch.tensor(values, device=latents.device).view(-1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        return (latents - mean) / deviation

    def make_tokenizers(self, words: list[str]) -> tuple:
        return (make_t5_tokenizer(words),)

    def tokenize(self, tokenizers: tuple, prompts: list[str]) -> Texts:
        encoded = tokenizers[0](
            prompts, padding="max_length", max_length=TEXT_TOKENS, truncation=True, return_tensors="pt"
        )
        return encoded.input_ids, encoded.attention_mask

    def lengthen(self, text: Texts) -> Texts:
        return tuple(F.pad(values, (0, LONG_TEXT - TEXT_TOKENS)) for values in text)

    def make_flow(self, tokenizers: tuple, *, small: bool) -> WanFlow:
        transformer = WanTransformer3DModel(
            num_attention_heads=1 if small else 3,
            attention_head_dim=64,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_layers=2 if small else 6,
            ffn_dim=64 if small else 576,
            text_dim=TEXT_WIDTH,
            rope_max_seq_len=128,
        )
        init_transformer(transformer, zero=("condition_embedder.time_proj", "attn2.to_out.0", "proj_out"))
        for name, table in transformer.named_parameters():
            if name.endswith("scale_shift_table"):
                nn.init.zeros_(table)  # with the zeros above, every block starts as the identity
        return WanFlow(transformer, make_t5_encoder(tokenizers[0], seed=12, width=TEXT_WIDTH, multilingual=True))

    def flow_of(self, pipe: WanPipeline) -> WanFlow:
        return WanFlow(pipe.transformer, pipe.text_encoder)

    def tokenizers_of(self, pipe: WanPipeline) -> tuple:
        return (pipe.tokenizer,)

    def assemble(self, vae: AutoencoderKLWan, flow: WanFlow, tokenizers: tuple) -> WanPipeline:
        return WanPipeline(
            tokenizer=tokenizers[0],
            text_encoder=flow.text,
            vae=vae,
            scheduler=make_scheduler(),
            transformer=flow.transformer,
        )


def _downsample(layer: WanResample, values: torch.Tensor) -> torch.Tensor:
    """Halve the sides, and all frames but the first if the layer halves time: [N, C, 2 n + 1, ...] -> n + 1 frames."""
    values = layer(values)
    if layer.mode != "downsample3d":
        return values
    return torch.cat((values[:, :, :1], layer.time_conv(values)), dim=2)


def _upsample(layer: WanResample, values: torch.Tensor) -> torch.Tensor:
    """Double the sides, and all frames but the first; the other frames do not see the first here."""
    if layer.mode == "upsample3d":
        later = layer.time_conv(values[:, :, 1:])  # [N, 2 C, n, H, W], a frame's two successors side by side
        later = later.unflatten(1, (2, -1)).permute(0, 2, 3, 1, 4, 5).flatten(2, 3)
        values = torch.cat((values[:, :, :1], later), dim=2)
    return layer(values)
