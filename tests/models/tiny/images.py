"""Tiny pipelines that make images."""

from types import SimpleNamespace

import diffusers
import torch

from tests.models.tiny.parts import SQUARE, TOKENS, WIDTH, flow, like, prompts, small, text
from tests.tiny import encoders, flux
from tests.tiny.inputs import random_picture


def flux2():
    """Guidance is distilled; attention and MLP of a single block are one module."""
    transformer = small("Flux2Transformer2DModel")
    pipe = diffusers.Flux2Pipeline(flow(use_dynamic_shifting=True), None, None, None, transformer)
    return pipe, {"prompt_embeds": text(1, TOKENS, WIDTH), **SQUARE}


def z_image():
    """Its timestep is called ``t`` and runs from 0 to 1, and its latents are a list of samples called ``x``."""
    transformer = small("ZImageTransformer2DModel")
    prompt = {"prompt_embeds": [text(TOKENS, WIDTH)], "negative_prompt_embeds": [text(3 * TOKENS, WIDTH, seed=1)]}
    return diffusers.ZImagePipeline(flow(shift=3.0), flux.image_vae(), None, None, transformer), prompt


def qwen_image_edit():
    """The given image follows the latents; the pipeline scales it to a megapixel, here of 64 tokens."""
    transformer = small("QwenImageTransformer2DModel")
    pipe = diffusers.QwenImageEditPipeline(flow(use_dynamic_shifting=True), None, None, None, None, transformer)
    pipe.vae_scale_factor = 64
    pipe._encode_vae_image = lambda image, generator: like(transformer, text(1, 16, 1, 16, 16, seed=2))
    prompt = {"image": random_picture(torch.Generator().manual_seed(0), 64, 64), "height": 1536, "width": 1536}
    for seed, name in enumerate(("", "negative_")):
        prompt[f"{name}prompt_embeds"] = text(1, TOKENS + 8 * seed, WIDTH, seed=seed)
        prompt[f"{name}prompt_embeds_mask"] = torch.ones(1, TOKENS + 8 * seed, dtype=torch.long)
    return pipe, prompt


class NoPrompts:
    """Replaces the processor of Qwen-Image 2.1, whose pipeline needs tokens when it is built."""

    tokenizer = SimpleNamespace(encode=lambda text: [0])

    def apply_chat_template(self, messages, **settings):
        return [[]]


def qwen_image_21():
    """Keys and values of the prompt are kept from the first step, whose output alone has the prompt's tokens too."""
    transformer = small("QwenImage21Transformer2DModel")
    vae = diffusers.AutoencoderKLQwenImage21(
        base_dim=8, decoder_base_dim=8, z_dim=16, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False]
    )
    pipe = diffusers.QwenImage21Pipeline(flow(use_dynamic_shifting=True), vae, None, NoPrompts(), transformer)
    return pipe, {"prompt_embeds": text(1, TOKENS, WIDTH), **SQUARE}


def hidream():
    """Its timestep is called ``timesteps``."""
    transformer = small("HiDreamImageTransformer2DModel")
    of_t5, of_llama = (1, TOKENS, WIDTH), (2, 1, TOKENS, WIDTH)
    prompt = prompts(prompt_embeds_t5=of_t5, prompt_embeds_llama3=of_llama, pooled_prompt_embeds=(1, WIDTH))
    pipe = diffusers.HiDreamImagePipeline(flow(shift=3.0), flux.image_vae(), *[None] * 8, transformer)
    pipe.default_sample_size = 24  # its output's size in latents, for every input
    return pipe, prompt


def lumina2():
    """The joint sequence does not include a prompt's padding."""
    transformer = small("Lumina2Transformer2DModel")
    pipe = diffusers.Lumina2Pipeline(transformer, flow(shift=3.0), None, None, None)
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, TOKENS // 2 :] = 0
    masks = dict.fromkeys(("prompt_attention_mask", "negative_prompt_attention_mask"), mask)
    return pipe, {**prompts(prompt_embeds=(2, TOKENS, WIDTH)), **masks, **SQUARE}


def prx():
    """It passes timesteps from 1 to 0, and under shift 1 the first is as large as the last of the schedule."""
    transformer = small("PRXTransformer2DModel")
    pipe = diffusers.PRXPipeline(transformer, flow(shift=1.0), *encoders.t5().values(), flux.image_vae())
    counts = torch.arange(TOKENS)[None] >= 5  # some tokenizers put padding first
    masks = {"prompt_attention_mask": counts, "negative_prompt_attention_mask": ~counts}
    return pipe, {**prompts(prompt_embeds=(1, TOKENS, WIDTH)), **masks, "use_resolution_binning": False}


def chroma():
    """A mask hides the padding of its prompts but for one token; a single block projects attention and MLP together."""
    transformer = small("ChromaTransformer2DModel")
    pipe = diffusers.ChromaPipeline(flow(), None, None, None, transformer)
    prompt = prompts(prompt_embeds=(2, TOKENS, WIDTH)) | SQUARE
    for seed, name in enumerate(("", "negative_")):
        prompt[f"{name}prompt_attention_mask"] = torch.arange(TOKENS) <= torch.tensor([[TOKENS], [4 + seed]])
    return pipe, prompt


def longcat_image():
    """Its pipeline takes no embeddings without a prompt, so its own encoding of prompts is replaced."""
    transformer = small("LongCatImageTransformer2DModel")
    pipe = diffusers.LongCatImagePipeline(flow(use_dynamic_shifting=True), None, None, None, None, transformer)
    pipe._encode_prompt = lambda prompt: like(transformer, text(len(prompt), TOKENS, WIDTH, seed=len(prompt[0])))
    return pipe, {"prompt": "a fox", "enable_prompt_rewrite": False, **SQUARE}


def hunyuan_image():
    """Text of two encoders is padded, and the padding of both comes last."""
    transformer = small("HunyuanImageTransformer2DModel")
    pipe = diffusers.HunyuanImagePipeline(flow(shift=5.0), None, None, None, None, None, transformer)
    prompt = {"height": 384, "width": 384}
    for seed, name in enumerate(("", "_2")):
        prompt[f"prompt_embeds{name}"] = text(2, TOKENS, WIDTH, seed=seed)
        prompt[f"prompt_embeds_mask{name}"] = (torch.arange(TOKENS) < torch.tensor([[TOKENS], [4 + seed]])).long()
    return pipe, prompt


def krea2():
    """A prompt's padding lies between its tokens; one token is not masked at the end."""
    transformer = small("Krea2Transformer2DModel")
    pipe = diffusers.Krea2Pipeline(flow(use_dynamic_shifting=True), None, None, None, transformer)
    prompt = prompts(prompt_embeds=(2, TOKENS, 2, WIDTH)) | SQUARE
    for seed, name in enumerate(("", "negative_")):
        valid = torch.arange(TOKENS) < torch.tensor([[TOKENS], [4 + seed]])
        valid[:, -1] = True
        prompt[f"{name}prompt_embeds_mask"] = valid
    return pipe, prompt


def ernie_image():
    """One call has both branches of guidance, whose prompts have different lengths."""
    transformer = small("ErnieImageTransformer2DModel")
    pipe = diffusers.ErnieImagePipeline(transformer, None, None, None, flow(shift=3.0))
    prompt = {"prompt_embeds": [text(TOKENS, WIDTH)], "negative_prompt_embeds": [text(4, WIDTH, seed=1)]}
    return pipe, {**prompt, **SQUARE}


def flux3():
    """A modular pipeline, whose blocks for text and image run before the joint ones."""
    from diffusers.modular_pipelines.flux3.modular_blocks_flux3 import Flux3CoreDenoiseStep

    transformer = small("Flux3Transformer2DModel")
    pipe = Flux3CoreDenoiseStep().init_pipeline()
    pipe.update_components(transformer=transformer, scheduler=flow())
    masks = dict.fromkeys(("prompt_embeds_mask", "negative_prompt_embeds_mask"), torch.ones(1, TOKENS).bool())
    return pipe, {**prompts(prompt_embeds=(1, TOKENS, WIDTH)), **masks, **SQUARE}


def glm_image():
    """Tokens that another model drew first, here random ones, join the latents; guidance drops them in its branch."""
    transformer = small("GlmImageTransformer2DModel")
    pipe = diffusers.GlmImagePipeline(None, None, None, None, None, transformer, flow(use_dynamic_shifting=True))
    drawn = torch.randint(16, (1, 144), generator=torch.Generator().manual_seed(0))
    return pipe, {**prompts(prompt_embeds=(1, TOKENS, WIDTH)), "prior_token_ids": drawn, **SQUARE}


def ideogram4():
    """It has a transformer for each branch of guidance."""
    pair = (small("Ideogram4Transformer2DModel") for _ in range(2))
    pipe = diffusers.Ideogram4Pipeline(flow(), flux.image_vae(), None, None, *pair)

    def encode_prompt(prompt, grid_h, grid_w, max_sequence_length, device):
        ids = pipe._prepare_ids([max_sequence_length], grid_h, grid_w, max_sequence_length, device)
        return like(pipe.transformer, text(1, max_sequence_length + grid_h * grid_w, WIDTH)), *ids

    pipe.encode_prompt = encode_prompt
    guidance = {"guidance_scale": 4.0, "guidance_schedule": None}
    return pipe, {"prompt": "a red fox", "max_sequence_length": TOKENS, **guidance}
