"""Tiny pipelines of the FLUX family, and the arguments of their calls.

Two double-stream and two single-stream blocks, three heads of 32 features. A token covers 8×8 pixels, so the default
image of 96×88 pixels has 132 tokens; with 37 text tokens that is 169: ragged for blocks of 64 and of 128 tokens, and
the first block holds text and image.
"""

import re

import diffusers
import torch

from tests.tiny import encoders
from tests.tiny.inputs import call_with, left_half, random_tensor

HEIGHT, WIDTH = 96, 88  # pixels
LATENT_CHANNELS = 4
VAE_FACTOR = 4  # pixels along a side of one latent; a token packs 2×2 latents
TOKEN_CHANNELS = 4 * LATENT_CHANNELS
MASK_CHANNELS = 4 * VAE_FACTOR**2  # FLUX Fill packs the mask at pixel resolution
IMAGE_EMBEDDING = 24  # features of one IP-Adapter image embedding


def image_vae():
    """`AutoencoderKL` with `LATENT_CHANNELS` channels at a `VAE_FACTOR`-th of the image's sides."""
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=4,
        scaling_factor=0.36,
        shift_factor=0.11,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def build(
    pipeline: str = "FluxPipeline",
    *,
    in_channels: int = TOKEN_CHANNELS,
    guidance: bool = True,
    controlnet: bool = False,
):
    """A pipeline of the named class, with the guidance embedding of FLUX.1-dev, or a control net of two blocks."""
    sizes = {
        "attention_head_dim": 32,
        "num_attention_heads": 3,
        "joint_attention_dim": encoders.FEATURES,
        "pooled_projection_dim": encoders.FEATURES,
        "guidance_embeds": guidance,
        "axes_dims_rope": (8, 12, 12),
    }
    net = {}
    if controlnet:
        net["controlnet"] = diffusers.FluxControlNetModel(
            **sizes, in_channels=TOKEN_CHANNELS, num_layers=1, num_single_layers=1
        )
    return getattr(diffusers, pipeline)(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            shift=3.0 if guidance else 1.0, use_dynamic_shifting=guidance
        ),
        vae=image_vae(),
        **encoders.clip(),
        **encoders.t5("_2"),
        transformer=diffusers.FluxTransformer2DModel(
            **sizes, in_channels=in_channels, out_channels=TOKEN_CHANNELS, num_layers=2, num_single_layers=2
        ),
        **net,
    )


def build_ip_adapter():
    """`FluxPipeline` with an IP-Adapter loaded."""
    pipe = build()
    add_ip_adapter(pipe)
    return pipe


def add_ip_adapter(pipe) -> None:
    """Load an IP-Adapter of zeros; the pipeline then takes image embeddings, as it has no image encoder."""
    inner, tokens = pipe.transformer.inner_dim, 4
    projection = {
        "proj.weight": torch.zeros(tokens * encoders.FEATURES, IMAGE_EMBEDDING),
        "proj.bias": torch.zeros(tokens * encoders.FEATURES),
        "norm.weight": torch.ones(encoders.FEATURES),
        "norm.bias": torch.zeros(encoders.FEATURES),
    }
    attention = {}
    for site in range(len(pipe.transformer.transformer_blocks)):
        for name in ("to_k_ip", "to_v_ip"):
            attention[f"{site}.{name}.weight"] = torch.zeros(inner, encoders.FEATURES)
            attention[f"{site}.{name}.bias"] = torch.zeros(inner)
    pipe.load_ip_adapter(
        {"image_proj": projection, "ip_adapter": attention},
        weight_name="ip_adapter",
        image_encoder_pretrained_model_name_or_path=None,
    )


inputs = call_with(HEIGHT, WIDTH)
control_inputs = call_with(HEIGHT, WIDTH, control_image=random_tensor)
# A strength below 1 skips the first steps: 4 steps asked for are 3 steps run.
img2img_inputs = call_with(HEIGHT, WIDTH, image=random_tensor, strength=0.75)
fill_inputs = call_with(HEIGHT, WIDTH, image=random_tensor, mask_image=left_half)
kontext_inputs = call_with(
    HEIGHT,
    WIDTH,
    image=lambda generator, *_: random_tensor(generator, 48, 64),  # smaller than the result
    max_area=lambda _, height, width: height * width,
    _auto_resize=False,  # it would scale the image to about a megapixel
)


def ip_adapter_inputs(generator: torch.Generator, **size: int) -> dict:
    """Embeddings for the prompt and, as the pipeline would else run the missing image encoder, for its negative."""
    positive, negative = torch.randn(2, 1, 1, IMAGE_EMBEDDING, generator=generator)
    embeddings = {"ip_adapter_image_embeds": [positive], "negative_ip_adapter_image_embeds": [negative]}
    return {**inputs(generator, **size), **embeddings}


def tiny_flux_lora(pipe, *, rank: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random LoRA weights for `pipe.load_lora_weights`, which change the image.

    They affect every attention projection of the double blocks, and the queries, the MLP and `proj_out` of the single
    blocks: `transformer.<module>.lora_A.weight` `[rank, in]` and `….lora_B.weight` `[out, rank]`, float32.
    """
    generator = torch.Generator().manual_seed(seed)
    double = r"transformer_blocks\.\d\.attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
    single = r"single_transformer_blocks\.\d\.(attn\.to_q|proj_mlp|proj_out)"
    state = {}
    for name, linear in pipe.transformer.named_modules():
        if re.fullmatch(f"{double}|{single}", name):
            down = torch.randn(rank, linear.in_features, generator=generator) / linear.in_features**0.5
            up = torch.randn(linear.out_features, rank, generator=generator) / rank**0.5
            state[f"transformer.{name}.lora_A.weight"], state[f"transformer.{name}.lora_B.weight"] = down, 0.5 * up
    return state
