"""Parts of the HunyuanVideo demo: `HunyuanVideoPipeline` with Llama and CLIP text, at a size that trains in minutes."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLHunyuanVideo, HunyuanVideoPipeline, HunyuanVideoTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import HunyuanVideoCausalConv3d
from torch import nn
from transformers import CLIPTextModel, LlamaModel

from .family import LATENT_CHANNELS, Texts, VideoFamily, init_transformer, make_scheduler
from .llama import LLAMA_WIDTH, UNUSED_LAYERS, make_llama_encoder, make_llama_tokenizer
from .text_encoders import CLIP_TOKENS, TEXT_TOKENS, make_clip_encoder, make_clip_tokenizer

CLIP_WIDTH = 64
GUIDANCE_RANGE = (1.0, 10.0)  # embedded guidance scales; the model is not distilled and learns to ignore them


class HunyuanFlow(nn.Module):
    """Transformer and text encoders, called as in HunyuanVideoPipeline."""

    def __init__(self, transformer: HunyuanVideoTransformer3DModel, llama: LlamaModel, clip: CLIPTextModel) -> None:
        super().__init__()
        self.transformer, self.llama, self.clip = transformer, llama, clip

    def forward(
        self, noisy: torch.Tensor, levels: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, clip_ids: torch.Tensor
    ) -> torch.Tensor:
        """Predict the velocity of `noisy` latents at `levels` [N]."""
        states = self.llama(ids, attention_mask=mask, output_hidden_states=True).hidden_states
        return self.transformer(
            hidden_states=noisy,
            timestep=1000 * levels,
            encoder_hidden_states=states[-(UNUSED_LAYERS + 1)],
            encoder_attention_mask=mask,
            pooled_projections=self.clip(clip_ids).pooler_output,
            guidance=1000 * torch.empty_like(levels).uniform_(*GUIDANCE_RANGE),
            return_dict=False,
        )[0]


class Hunyuan(VideoFamily):
    """See `VideoFamily`."""

    name = "hunyuan"
    call: ClassVar[dict[str, Any]] = {
        "true_cfg_scale": 3.0,
        "negative_prompt": "",
        "prompt_template": {"template": "{}", "crop_start": 0},
        "max_sequence_length": TEXT_TOKENS,
    }
    guidance_argument = "true_cfg_scale"

    def make_vae(self, *, small: bool) -> AutoencoderKLHunyuanVideo:
        return AutoencoderKLHunyuanVideo(
            latent_channels=LATENT_CHANNELS,
            block_out_channels=(8, 8, 8, 8) if small else (16, 32, 32, 32),
            layers_per_block=1,
            norm_num_groups=2,  # few, as in the image demo: normalisation removes a group's mean, which is flat colour
            mid_block_add_attention=False,
        )

    def encode(self, vae: AutoencoderKLHunyuanVideo, clips: torch.Tensor) -> torch.Tensor:
        return vae.quant_conv(vae.encoder(clips))

    def decode(self, vae: AutoencoderKLHunyuanVideo, latents: torch.Tensor) -> torch.Tensor:
        return vae.decode(latents).sample  # from 17 frames on it blends overlapping pieces, so training must do so too

    @contextmanager
    def quick_training(self, vae: AutoencoderKLHunyuanVideo) -> Iterator[None]:
        patched = [module for module in vae.modules() if isinstance(module, HunyuanVideoCausalConv3d | nn.GroupNorm)]
        for module in patched:
            module.forward = partial(_group_norm if isinstance(module, nn.GroupNorm) else _causal_convolution, module)
        try:
            yield
        finally:
            for module in patched:
                del module.forward

    @torch.no_grad()
    def set_statistics(self, vae: AutoencoderKLHunyuanVideo, mean: torch.Tensor, deviation: torch.Tensor) -> None:
        """Put scale and mean into the 1x1 convolutions around the latents; the config holds only one scale."""
        inward, outward = vae.quant_conv, vae.post_quant_conv
        outward.bias += outward.weight.flatten(1) @ mean
        outward.weight *= deviation.view(1, -1, 1, 1, 1)
        inward.bias[:LATENT_CHANNELS] -= mean
        inward.bias[:LATENT_CHANNELS] /= deviation
        inward.bias[LATENT_CHANNELS:] -= 2 * deviation.log()
        inward.weight[:LATENT_CHANNELS] /= deviation.view(-1, 1, 1, 1, 1)
        vae.register_to_config(scaling_factor=1.0)

    def normalise(self, vae: AutoencoderKLHunyuanVideo, latents: torch.Tensor) -> torch.Tensor:
        return latents * vae.config.scaling_factor

    def make_tokenizers(self, words: list[str]) -> tuple:
        return make_llama_tokenizer(words, most_tokens=TEXT_TOKENS), make_clip_tokenizer(words)

    def tokenize(self, tokenizers: tuple, prompts: list[str]) -> Texts:
        llama, clip = (
            tokenizer(prompts, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
            for tokenizer, length in zip(tokenizers, (TEXT_TOKENS, CLIP_TOKENS), strict=True)
        )
        return llama.input_ids, llama.attention_mask, clip.input_ids

    def make_flow(self, tokenizers: tuple, *, small: bool) -> HunyuanFlow:
        transformer = HunyuanVideoTransformer3DModel(
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_attention_heads=1 if small else 3,
            attention_head_dim=64,
            num_layers=1,
            num_single_layers=1 if small else 4,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            text_embed_dim=LLAMA_WIDTH,
            pooled_projection_dim=CLIP_WIDTH,
            rope_axes_dim=(16, 24, 24),
        )
        modulations = ("norm1.linear", "norm1_context.linear", "norm.linear", "norm_out.linear")
        init_transformer(transformer, zero=(*modulations, "guidance_embedder.linear_2"))
        nn.init.zeros_(transformer.proj_out.weight)
        return HunyuanFlow(
            transformer,
            make_llama_encoder(tokenizers[0], seed=12),
            make_clip_encoder(tokenizers[1], seed=11, width=CLIP_WIDTH),
        )

    def flow_of(self, pipe: HunyuanVideoPipeline) -> HunyuanFlow:
        flow = HunyuanFlow(pipe.transformer, pipe.text_encoder, pipe.text_encoder_2)
        for module in (*flow.llama.layers[-UNUSED_LAYERS:], flow.llama.norm):
            module.requires_grad_(False)
        return flow

    def tokenizers_of(self, pipe: HunyuanVideoPipeline) -> tuple:
        return pipe.tokenizer, pipe.tokenizer_2

    def assemble(self, vae: AutoencoderKLHunyuanVideo, flow: HunyuanFlow, tokenizers: tuple) -> HunyuanVideoPipeline:
        return HunyuanVideoPipeline(
            text_encoder=flow.llama,
            tokenizer=tokenizers[0],
            transformer=flow.transformer,
            vae=vae,
            scheduler=make_scheduler(),
            text_encoder_2=flow.clip,
            tokenizer_2=tokenizers[1],
        )


class _PadByEdges(torch.autograd.Function):
    """Replicate the outermost values: two frames before the first, a row or column on each side.

    Like `F.pad(mode="replicate")`, but its gradient adds slices, whereas torch uses atomic additions.
    """

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        return F.pad(values, (1, 1, 1, 1, 2, 0), mode="replicate")

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        inner = gradient[:, :, 2:].clone()
        inner[:, :, 0] += gradient[:, :, 0] + gradient[:, :, 1]
        for axis in (3, 4):
            outer, size = inner, inner.shape[axis]
            inner = outer.narrow(axis, 1, size - 2).clone()
            inner.select(axis, 0).add_(outer.select(axis, 0))
            inner.select(axis, -1).add_(outer.select(axis, -1))
        return inner


def _causal_convolution(module: HunyuanVideoCausalConv3d, values: torch.Tensor) -> torch.Tensor:
    return module.conv(_PadByEdges.apply(values) if module.conv.kernel_size[0] == 3 else values)


def _group_norm(module: nn.GroupNorm, values: torch.Tensor) -> torch.Tensor:
    """`F.group_norm` on the whole GPU; torch's CUDA kernel uses one block for each of the few groups."""
    grouped = values.unflatten(1, (module.num_groups, -1)).flatten(2)  # [N, groups, P]
    mean = grouped.mean(dim=-1, dtype=torch.float32)
    squares = torch.linalg.vector_norm(grouped, dim=-1, dtype=torch.float32).square() / grouped.shape[-1]
    inverse = torch.rsqrt((squares - mean.square()).clamp_min(0) + module.eps)
    channels = module.num_channels // module.num_groups
    scale = inverse.repeat_interleave(channels, dim=1) * module.weight
    shift = module.bias - mean.repeat_interleave(channels, dim=1) * scale
    return (values * scale[..., None, None, None] + shift[..., None, None, None]).to(values.dtype)
