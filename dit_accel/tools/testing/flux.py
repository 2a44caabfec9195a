"""Tiny pipelines of the FLUX family, and what to call them with.

Two double-stream and two single-stream blocks, three heads of 32 features. A token covers 8×8 pixels, so the default
picture of 96×88 pixels has 132 tokens; with 37 text tokens that is 169: ragged for blocks of 64 and of 128 tokens,
and the first block holds text and picture.
"""

import torch

from dit_accel.tools.testing import text

HEIGHT, WIDTH = 96, 88  # pixels
TEXT_TOKENS = 37
LATENT_CHANNELS = 4
VAE_FACTOR = 4  # pixels along a side of one latent; a token packs 2×2 latents
TOKEN_CHANNELS = 4 * LATENT_CHANNELS
MASK_CHANNELS = 4 * VAE_FACTOR**2  # FLUX Fill packs the mask at pixel resolution
IMAGE_EMBEDDING = 24  # features of one IP-Adapter picture embedding


def image_vae():
    """`AutoencoderKL` with `LATENT_CHANNELS` channels at a `VAE_FACTOR`-th of the picture's sides."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
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


def _attention_sizes(guidance: bool) -> dict:
    """What the transformer and a control net have in common."""
    return {
        "attention_head_dim": 32,
        "num_attention_heads": 3,
        "joint_attention_dim": text.FEATURES,
        "pooled_projection_dim": text.FEATURES,
        "guidance_embeds": guidance,
        "axes_dims_rope": (8, 12, 12),
    }


def _components(*, in_channels: int = TOKEN_CHANNELS, guidance: bool = True) -> dict:
    """The modules that every FLUX pipeline has; `guidance` is the distilled guidance embedding of FLUX.1-dev."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0 if guidance else 1.0, use_dynamic_shifting=guidance),
        "vae": image_vae(),
        "text_encoder": text.clip_text_encoder(),
        "tokenizer": text.clip_tokenizer(),
        "text_encoder_2": text.t5_text_encoder(),
        "tokenizer_2": text.t5_tokenizer(),
        "transformer": FluxTransformer2DModel(
            in_channels=in_channels,
            out_channels=TOKEN_CHANNELS,
            num_layers=2,
            num_single_layers=2,
            **_attention_sizes(guidance),
        ),
    }


def build(pipeline_class: str = "FluxPipeline", **options):
    """A pipeline of the named diffusers class with the shared modules; `options` go to them."""
    import diffusers

    return getattr(diffusers, pipeline_class)(**_components(**options))


def build_controlnet():
    """`FluxControlNetPipeline` with a control net of one block of each kind."""
    from diffusers import FluxControlNetModel, FluxControlNetPipeline

    controlnet = FluxControlNetModel(
        in_channels=TOKEN_CHANNELS, num_layers=1, num_single_layers=1, **_attention_sizes(True)
    )
    return FluxControlNetPipeline(**_components(), controlnet=controlnet)


def build_ip_adapter():
    """`FluxPipeline` with an IP-Adapter loaded; it takes picture embeddings, as it has no image encoder."""
    from diffusers import FluxPipeline

    pipe = FluxPipeline(**_components())
    inner, tokens = pipe.transformer.inner_dim, 4
    projection = {
        "proj.weight": torch.zeros(tokens * text.FEATURES, IMAGE_EMBEDDING),
        "proj.bias": torch.zeros(tokens * text.FEATURES),
        "norm.weight": torch.ones(text.FEATURES),
        "norm.bias": torch.zeros(text.FEATURES),
    }
    attention = {}
    for site in range(len(pipe.transformer.transformer_blocks)):
        for name in ("to_k_ip", "to_v_ip"):
            attention[f"{site}.{name}.weight"] = torch.zeros(inner, text.FEATURES)
            attention[f"{site}.{name}.bias"] = torch.zeros(inner)
    pipe.load_ip_adapter(
        {"image_proj": projection, "ip_adapter": attention},
        weight_name="ip_adapter",
        image_encoder_pretrained_model_name_or_path=None,
    )
    return pipe


def inputs(generator: torch.Generator, *, height: int = HEIGHT, width: int = WIDTH) -> dict:
    """What every FLUX pipeline is called with: the size in pixels and the number of text tokens."""
    return {"height": height, "width": width, "max_sequence_length": TEXT_TOKENS}


def _with_picture(argument: str, **extra):
    """Inputs that add a random picture `[1, 3, height, width]` in [0, 1] under the name `argument`."""

    def picture_inputs(generator: torch.Generator, *, height: int = HEIGHT, width: int = WIDTH) -> dict:
        picture = torch.rand(1, 3, height, width, generator=generator)
        return {**inputs(generator, height=height, width=width), argument: picture, **extra}

    return picture_inputs


control_inputs = _with_picture("control_image")
# A strength below 1 skips the first steps: 4 steps asked for are 3 steps run.
img2img_inputs = _with_picture("image", strength=0.75)


def kontext_inputs(generator: torch.Generator, *, height: int = HEIGHT, width: int = WIDTH) -> dict:
    """A reference picture smaller than the result; `_auto_resize` would blow it up to about a megapixel."""
    reference = torch.rand(1, 3, 48, 64, generator=generator)
    shared = inputs(generator, height=height, width=width)
    return {**shared, "image": reference, "max_area": height * width, "_auto_resize": False}


def fill_inputs(generator: torch.Generator, *, height: int = HEIGHT, width: int = WIDTH) -> dict:
    """A picture and a mask `[1, 1, height, width]` of ones where its left half is to be painted anew."""
    mask = torch.zeros(1, 1, height, width)
    mask[..., : width // 2] = 1.0
    shared = _with_picture("image")(generator, height=height, width=width)
    return {**shared, "mask_image": mask}


def ip_adapter_inputs(generator: torch.Generator, *, height: int = HEIGHT, width: int = WIDTH) -> dict:
    """Embeddings for the prompt and, as the pipeline would else run the missing image encoder, for its negative."""
    positive, negative = torch.randn(2, 1, 1, IMAGE_EMBEDDING, generator=generator)
    return {
        **inputs(generator, height=height, width=width),
        "ip_adapter_image_embeds": [positive],
        "negative_ip_adapter_image_embeds": [negative],
    }


def tiny_flux_lora(pipe, *, rank: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random LoRA weights for a FLUX pipeline, to pass to `pipe.load_lora_weights` (which needs `peft`).

    They touch every attention projection of the double blocks, and the queries, the MLP and `proj_out` of the single
    blocks, strongly enough to change the picture.

    Returns:
        state dict of `transformer.<module>.lora_A.weight` `[rank, in]` and `….lora_B.weight` `[out, rank]`, float32.
    """
    generator = torch.Generator().manual_seed(seed)
    double = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    targets = {
        "transformer_blocks": [f"attn.{name}" for name in double],
        "single_transformer_blocks": ["attn.to_q", "proj_mlp", "proj_out"],
    }
    state = {}
    for blocks, names in targets.items():
        for index, block in enumerate(pipe.transformer.get_submodule(blocks)):
            for name in names:
                linear = block.get_submodule(name)
                down = torch.randn(rank, linear.in_features, generator=generator) / linear.in_features**0.5
                up = torch.randn(linear.out_features, rank, generator=generator) / rank**0.5
                state[f"transformer.{blocks}.{index}.{name}.lora_A.weight"] = down
                state[f"transformer.{blocks}.{index}.{name}.lora_B.weight"] = 0.5 * up
    return state
