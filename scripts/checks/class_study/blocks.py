"""Facts of the modular pipelines that `modular.py` runs: blocks, sizes and inputs, by class of the transformer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import diffusers
import torch

from scripts.checks.class_study import cases
from scripts.checks.class_study.cases import NotRun
from scripts.checks.class_study.small import TOKENS, WIDTH, text

IMAGE, LARGE = ({"height": side, "width": side} for side in (64, 128))
VIDEO, LTX = {**IMAGE, "num_frames": 5}, {**LARGE, "num_frames": 9}
SMALL_VIDEO = {"height": 32, "width": 32, "num_frames": 5}
H3 = {**SMALL_VIDEO, "num_frames": 124}
WAN_IMAGE = {"image_condition_latents": (18, 2, 8, 8)}
COSMOS = {**VIDEO, "guidance_scale": 2.0}
ANIMATE = {**IMAGE, "segment_frame_length": 9, "num_segments": 1, "effective_segment": 8}
PYRAMID = {**VIDEO, "pyramid_num_inference_steps_list": [cases.STEPS // 3] * 3}
LTX_25 = {"ff_bias": False, "use_prompt_adaln_single": False, "use_keyframes_abs_pos_embedding": True}
ONE_STAGE = {"stages": 1, "stage_range": [0, 1]}
SOUND, CHUNKS = ("latents", "audio_latents"), ("latent_chunks",)
Inputs = Callable[[Any, int], dict[str, Any]]  # of the transformer and the size of the batch


@dataclass(frozen=True)
class Blocks:
    """Blocks of a modular pipeline, and how they run; `name` is their class without `CoreDenoiseStep`.

    `folder`: in `diffusers.modular_pipelines`. `tiny`: pipeline of `tests.models.tiny` whose components they take; None
    = a small transformer of their class. `inputs` makes more arguments of the call; `sizes` changes the transformer's
    configuration; `parts` makes more components; `outputs` are compared.
    """

    name: str
    folder: str
    call: dict[str, Any]
    tiny: str | None = None
    inputs: Inputs = lambda transformer, batch: {}
    sizes: dict[str, Any] = field(default_factory=dict)
    parts: Callable[[], dict[str, Any]] = dict
    outputs: tuple[str, ...] = ("latents",)


def one_prompt(batch: int) -> None:
    if batch > 1:
        raise NotRun("it takes one prompt")


def lists(transformer: Any, batch: int) -> dict[str, Any]:
    """One embedding ``[tokens, width]`` for each prompt."""
    width = getattr(transformer.config, "text_in_dim", None) or transformer.config.cap_feat_dim
    signs = enumerate(("", "negative_"))
    return {f"{sign}prompt_embeds": list(text(batch, TOKENS, width, seed=seed)) for seed, sign in signs}


def krea2(transformer: Any, batch: int) -> dict[str, Any]:
    """Embeddings ``[batch, tokens, layers, width]``."""
    sizes = batch, TOKENS, transformer.config.num_text_layers, transformer.config.text_hidden_dim
    return {f"{sign}prompt_embeds": text(*sizes, seed=seed) for seed, sign in enumerate(("", "negative_"))}


def passing(*others: Inputs, **more: Any) -> Inputs:
    """Return inputs: those of `others`, and `more`, where a tuple of sizes stands for a random tensor `[batch,
    *sizes]`.
    """

    def inputs(transformer: Any, batch: int) -> dict[str, Any]:
        output = {
            name: text(batch, *value, seed=2) if isinstance(value, tuple) else value for name, value in more.items()
        }
        for other in others:
            output |= other(transformer, batch)
        return output

    return inputs


def ltx2(transformer: Any, batch: int) -> dict[str, Any]:
    return {"batch_size": batch, "dtype": torch.float32}


def flux2_image(transformer: Any, batch: int) -> dict[str, Any]:
    return {"image_latents": [text(1, transformer.config.in_channels, 8, 8, seed=2)]}


def ideogram4(transformer: Any, batch: int) -> dict[str, Any]:
    features = text(batch, TOKENS, transformer.config.llm_features_dim)
    return {"text_features": features, "text_lengths": [TOKENS] * batch, "guidance_schedule": (4.0,) * cases.STEPS}


def anima(transformer: Any, batch: int) -> dict[str, Any]:
    output: dict[str, Any] = {}
    for seed, sign in enumerate(("", "negative_")):
        output[f"{sign}qwen_prompt_embeds"] = text(batch, TOKENS, WIDTH, seed=seed)
        output[f"{sign}t5_input_ids"] = torch.arange(batch * TOKENS).reshape(batch, TOKENS) + seed
    return output


def anima_parts() -> dict[str, Any]:
    sizes = {"source_dim": WIDTH, "target_dim": WIDTH, "model_dim": WIDTH, "target_vocab_size": 64}
    more = {"num_layers": 1, "num_attention_heads": 2, "min_sequence_length": 8}
    return {"text_conditioner": diffusers.AnimaTextConditioner(**sizes, **more)}


def music3(transformer: Any, batch: int) -> dict[str, Any]:
    one_prompt(batch)
    return {"frame_hiddens": text(1, 8, 2 * WIDTH)}


def music3_parts() -> dict[str, Any]:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, invert_sigmas=True)
    encoder = diffusers.MiniMaxMusic3ConditionEncoder(WIDTH, 2, out_dim=16)
    return {"condition_encoder": encoder, "scheduler": scheduler}


def minimax_h3(transformer: Any, batch: int) -> dict[str, Any]:
    one_prompt(batch)
    output = {"text_token_tags": torch.ones(TOKENS, dtype=torch.long), "keyframe_anchors": ("first",)}
    output |= {"condition_latents": [text(1, transformer.config.in_channels, 1, 2, 2)], "audio_condition_latents": []}
    return output | {"normalized_references": [SimpleNamespace(kind="image")]}


def cosmos3(transformer: Any, batch: int) -> dict[str, Any]:
    one_prompt(batch)
    return {"cond_input_ids": list(range(TOKENS)), "uncond_input_ids": [1, 2]}


def animate(transformer: Any, batch: int) -> dict[str, Any]:
    one_prompt(batch)
    output = {"reference_image_latents": text(20, 1, 8, 8), "driving_video_pixels": text(1, 3, 9, 64, 64).clamp(-1, 1)}
    seen = text(1, 4, 1280, seed=1)  # of the image encoder
    return output | {"condition_clip_context": seen, "denoiser_input_fields": {"encoder_hidden_states_image": seen}}


def animate_parts() -> dict[str, Any]:
    vae = diffusers.AutoencoderKLWan(4, dim_mult=[1] * 4, num_res_blocks=1, temperal_downsample=[False, True, True])
    scheduler = diffusers.DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    return {"vae": vae, "scheduler": scheduler}


def helios(kind: str, **settings: Any) -> Callable[[], dict[str, Any]]:
    """Return a function that makes the scheduler, whose default gamma a float32 factorisation can't take."""
    return lambda: {"scheduler": getattr(diffusers, kind)(gamma=0.25, use_dynamic_shifting=True, **settings)}


MODULAR: dict[str, list[Blocks]] = {
    "Flux3Transformer2DModel": [
        Blocks("Flux3", "flux3", LARGE),
        Blocks("Flux3Distilled", "flux3", LARGE, sizes={"flow_map": True}),
    ],
    "QwenImage21Transformer2DModel": [
        Blocks("QwenImage21", "qwenimage21", LARGE),
        Blocks("QwenImage21Turbo", "qwenimage21", LARGE),
    ],
    "Krea2Transformer2DModel": [
        Blocks("Krea2", "krea2", IMAGE, None, krea2),
        Blocks("Krea2Turbo", "krea2", IMAGE, None, krea2),
    ],
    "ErnieImageTransformer2DModel": [Blocks("ErnieImage", "ernie_image", IMAGE, None, lists)],
    "FluxTransformer2DModel": [
        Blocks("Flux", "flux", IMAGE, "flux"),
        Blocks("FluxKontext", "flux", IMAGE, "flux", passing(image_latents=(4, 8, 8), max_area=64 * 64)),
    ],
    "Flux2Transformer2DModel": [
        Blocks("Flux2", "flux2", LARGE, "flux2"),
        Blocks("Flux2Klein", "flux2", LARGE, "flux2"),
        Blocks("Flux2KleinBase", "flux2", LARGE, "flux2"),
        Blocks("Flux2ImageConditioned", "flux2", LARGE, "flux2", flux2_image),
    ],
    "QwenImageTransformer2DModel": [
        Blocks("QwenImage", "qwenimage", LARGE, "qwen-image"),
        Blocks("QwenImageEdit", "qwenimage", LARGE, "qwen-image", passing(image_latents=(16, 1, 16, 16))),
        Blocks("QwenImageEditPlus", "qwenimage", LARGE, "qwen-image", passing(image_latents=(16, 1, 16, 16))),
        Blocks("QwenImageImg2Img", "qwenimage", LARGE, "qwen-image", passing(image_latents=(16, 1, 16, 16))),
        Blocks("QwenImageLayered", "qwenimage", LARGE, "qwen-image", passing(image_latents=(1, 16, 16, 16), layers=2)),
    ],
    "LTXVideoTransformer3DModel": [
        Blocks("LTX", "ltx", LTX, "ltx"),
        Blocks("LTXImage2Video", "ltx", LTX, "ltx", passing(image_latents=(8, 1, 4, 4))),
    ],
    "LTX2VideoTransformer3DModel": [
        Blocks("LTX2", "ltx2", LTX, "ltx2", ltx2, outputs=SOUND),
        Blocks("LTX2Auto", "ltx2", SMALL_VIDEO, "ltx2", ltx2, LTX_25, outputs=SOUND),  # the blocks of LTX-2.5
        Blocks("LTX2Image2Video", "ltx2", LTX, "ltx2", passing(ltx2, image_latents=(8, 1, 4, 4)), outputs=SOUND),
        Blocks("EchoDenoiseStep", "echo", LTX, "ltx2", ltx2, outputs=SOUND),
    ],
    "WanTransformer3DModel": [
        Blocks("Wan", "wan", VIDEO, "wan"),
        Blocks("Wan22", "wan", VIDEO, "wan22"),
        Blocks(
            "WanImage2Video",
            "wan",
            VIDEO,
            "wan-i2v-clip",
            passing(image_condition_latents=(18, 2, 8, 8), image_embeds=(5, 32)),
        ),
        Blocks("Wan22Image2Video", "wan", VIDEO, "wan22-i2v", passing(image_condition_latents=(18, 2, 8, 8))),
    ],
    "WanAnimate2Transformer3DModel": [
        Blocks(name, "wan_animate_2", ANIMATE, None, animate, {}, animate_parts, ("segment_frames",))
        for name in ("WanAnimate2", "WanAnimate2Distilled")
    ],
    "ZImageTransformer2DModel": [
        Blocks("ZImage", "z_image", IMAGE, "z-image", lists),
        Blocks("ZImageImage2Image", "z_image", IMAGE, "z-image", passing(lists, image_latents=(4, 8, 8))),
    ],
    "CosmosTransformer3DModel": [
        Blocks("Anima", "anima", IMAGE, None, anima, {}, anima_parts),
        Blocks("AnimaImg2Img", "anima", IMAGE, None, passing(anima, image_latents=(4, 1, 8, 8)), {}, anima_parts),
    ],
    "MiniMaxMusic3Transformer1DModel": [
        Blocks("MiniMaxMusic3", "minimax_music3", {}, None, music3, {}, music3_parts, CHUNKS)
    ],
    "HeliosTransformer3DModel": [
        Blocks("Helios", "helios", VIDEO, parts=helios("HeliosScheduler", **ONE_STAGE), outputs=CHUNKS),
        Blocks("HeliosPyramid", "helios", PYRAMID, parts=helios("HeliosScheduler"), outputs=CHUNKS),
        Blocks("HeliosPyramidDistilled", "helios", PYRAMID, parts=helios("HeliosDMDScheduler"), outputs=CHUNKS),
    ],
    "HunyuanVideo15Transformer3DModel": [
        Blocks("HunyuanVideo15", "hunyuan_video1_5", VIDEO, "hunyuan15", sizes={"in_channels": 65, "out_channels": 32})
    ],
    "Ideogram4Transformer2DModel": [Blocks("Ideogram4", "ideogram4", IMAGE, "ideogram4", ideogram4)],
    "SD3Transformer2DModel": [
        Blocks("StableDiffusion3T2I", "stable_diffusion_3", IMAGE, "sd3"),
        Blocks("StableDiffusion3I2I", "stable_diffusion_3", IMAGE, "sd3", passing(image_latents=(4, 8, 8))),
    ],
    "MiniMaxH3Transformer3DModel": [
        Blocks(name, "minimax_h3", H3, None, minimax_h3, outputs=SOUND)
        for name in ("MiniMaxH3", "MiniMaxH3FL2VA", "MiniMaxH3Ref2VA")
    ],
    "Cosmos3OmniTransformer": [
        Blocks("Cosmos3Vision", "cosmos", COSMOS, "cosmos3", cosmos3),
        Blocks("Cosmos3VisionSound", "cosmos", COSMOS, "cosmos3", cosmos3, outputs=("latents", "sound_latents")),
    ],
}
