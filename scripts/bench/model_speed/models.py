"""Transformers to time, at published and at toy size, and the arguments that their pipelines pass."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch.utils._pytree import tree_map_only

from dit_accel import Preset, load_preset

Kept = dict[str, Any]  # arguments that all steps of a run share
# Work of a pipeline before the transformer in each step: maps latents and timestep to the call's arguments.
Conditions = Callable[[torch.Tensor, torch.Tensor], dict[str, Any]]
# Makes the constant part of a run; a control net, if any, runs in every step.
MakeConditions = Callable[[torch.nn.Module | None], Conditions]
OF_IMAGES, OF_VIDEOS = "flux-sparge-balanced", "wan21-sparge-balanced"


@dataclass(frozen=True)
class Model:
    """Transformer at the size of a published image or video, on the default device in the default dtype.

    `latents`: shape that the scheduler works on. `family`: prefix of its presets. `tiles`: preset that skips tiles.
    `branches`: calls per step. `variants`: changes to this model with the same transformer, by the addition's name.
    """

    build: Callable[[], torch.nn.Module]
    conditions: MakeConditions
    latents: tuple[int, ...]
    family: str = "any"
    tiles: str = OF_IMAGES
    branches: tuple[str, ...] = ("cond",)
    control_net: Callable[[], torch.nn.Module] | None = None
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def is_video(self) -> bool:
        """Return True if runs of 50 steps skip tiles; attention is a small part of an image's step."""
        return self.tiles != OF_IMAGES

    @property
    def sparse(self) -> Preset:
        """Preset that skips tiles and makes new masks in each computed step."""
        return load_preset(
            self.tiles,
            model="any",
            **{"skip.refresh": 1, "skip.residual": False, "skip.means": False, "blocks.token_order": "raster"},
        )


CFG = {"CFG": {"branches": ("cond", "uncond")}}


def _passing(make: Callable[[], Kept], *, in_shares: bool = False) -> MakeConditions:
    """Pass the latents, the timestep (with ``in_shares`` from 1 to 0) and what ``make`` returns."""

    def conditions(_: None) -> Conditions:
        kept = make()
        if in_shares:
            return lambda latents, time: {"hidden_states": latents, "timestep": time.to(latents.dtype) / 1000, **kept}
        return lambda latents, timestep: {"hidden_states": latents, "timestep": timestep, **kept}

    return conditions


def _flux_conditions(side: int, text: int, width: int, pooled: int, *, reference: bool = False) -> MakeConditions:
    """Image of ``side`` × ``side`` tokens; with ``reference`` followed by Kontext's image of the same size."""

    def make(control_net: torch.nn.Module | None) -> Conditions:
        row, column = torch.meshgrid(*2 * [torch.arange(side)], indexing="ij")
        ids = torch.stack([torch.zeros_like(row), row, column], dim=-1).flatten(0, 1)
        if reference:
            ids = torch.cat([ids, ids + torch.tensor([1, 0, 0])])
        kept = {
            "encoder_hidden_states": torch.randn(1, text, width),
            "pooled_projections": torch.randn(1, pooled),
            "guidance": torch.full([1], 3.5),
            "img_ids": ids.to(torch.get_default_dtype()),
            "txt_ids": torch.zeros(text, 3),
        }
        picture = torch.randn(1, side**2, 64)

        def conditions(latents: torch.Tensor, timestep: torch.Tensor) -> dict[str, Any]:
            tokens = torch.cat([latents, picture], dim=1) if reference else latents
            call = {"hidden_states": tokens, "timestep": timestep.to(latents.dtype) / 1000, **kept}
            if control_net is None:
                return call
            double, single = control_net(controlnet_cond=picture, return_dict=False, **call)
            return call | {"controlnet_block_samples": double, "controlnet_single_block_samples": single}

        return conditions

    return make


def _flux(sizes: Mapping[str, Any], net: Mapping[str, Any], side: int, *text: int) -> Model:
    """FLUX.1-dev and its variants: Kontext, a control net, true CFG."""
    return Model(
        lambda: diffusers.FluxTransformer2DModel(guidance_embeds=True, **sizes),
        _flux_conditions(side, *text),
        (1, side**2, 64),
        "flux",
        variants={
            **CFG,
            "Kontext": {"conditions": _flux_conditions(side, *text, reference=True)},
            "ControlNet": {"control_net": lambda: diffusers.FluxControlNetModel(guidance_embeds=True, **sizes | net)},
        },
    )


def _hunyuan(sizes: Mapping[str, Any], latents: tuple[int, ...], width: int, pooled: int) -> Model:
    """Prompt of 60 tokens, padded to the 256 that the pipeline passes."""

    def make() -> Kept:
        return {
            "encoder_hidden_states": torch.randn(1, 256, width),
            "encoder_attention_mask": torch.arange(256)[None] < 60,
            "pooled_projections": torch.randn(1, pooled),
            "guidance": torch.full([1], 6000.0),
        }

    build = partial(diffusers.HunyuanVideoTransformer3DModel, guidance_embeds=True, **sizes)
    return Model(build, _passing(make), latents, "hunyuan", "hunyuan-sparge-balanced")


def _wan(sizes: Mapping[str, Any], latents: tuple[int, ...], width: int, **changes: Any) -> Model:
    """Prompt of 512 tokens; image-to-video adds the image's 257 tokens, and its latents and mask to the video's."""
    image_width = sizes.get("image_dim")

    def conditions(_: None) -> Conditions:
        kept = {"encoder_hidden_states": torch.randn(1, 512, width)}
        if image_width is None:
            return _passing(lambda: kept)(None)
        kept["encoder_hidden_states_image"] = torch.randn(1, 257, image_width)
        picture = torch.randn(1, 20, *latents[2:])
        return lambda values, timestep: {
            "hidden_states": torch.cat([values, picture], dim=1),
            "timestep": timestep,
            **kept,
        }

    build = partial(diffusers.WanTransformer3DModel, **sizes)
    return Model(build, conditions, latents, "wan21", OF_VIDEOS, **changes)


def _qwen_image(sizes: Mapping[str, Any], side: int, width: int) -> Model:
    """Image of ``side`` × ``side`` tokens and a prompt of 128 tokens."""

    def make() -> Kept:
        return {"encoder_hidden_states": torch.randn(1, 128, width), "img_shapes": [[(1, side, side)]]}

    build = partial(diffusers.QwenImageTransformer2DModel, **sizes)
    return Model(build, _passing(make, in_shares=True), (1, side**2, 64), variants=CFG)


def _flux2(sizes: Mapping[str, Any], side: int, width: int) -> Model:
    """Image of ``side`` × ``side`` tokens and a prompt of 512 tokens."""

    def make() -> Kept:
        places = torch.zeros(2, dtype=torch.int64)
        picture = torch.cartesian_prod(places[:1], *2 * [torch.arange(side)], places[:1])
        text = torch.cartesian_prod(*3 * [places[:1]], torch.arange(512))
        return {
            "encoder_hidden_states": torch.randn(1, 512, width),
            "guidance": torch.full([1], 4.0),
            "img_ids": picture[None],
            "txt_ids": text[None],
        }

    build = partial(diffusers.Flux2Transformer2DModel, **sizes)
    return Model(build, _passing(make, in_shares=True), (1, side**2, 128))


def _as_loaded(kind: Callable[..., torch.nn.Module], **sizes: Any) -> torch.nn.Module:
    return as_loaded(kind(**sizes))


def as_loaded(model: torch.nn.Module) -> torch.nn.Module:
    """Return a model, with the weights in float32 that ``from_pretrained`` keeps so."""
    wide = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, weight in chain(model.named_parameters(), model.named_buffers()):
        if not wide.isdisjoint(name.split(".")):
            weight.data = weight.data.float()
    return model


def _krea2(sizes: Mapping[str, Any], side: int, text: int, layers: int, width: int) -> Model:
    """Image of ``side`` × ``side`` tokens; prompt of 60 tokens, padded before the 5 that end its template."""

    def make() -> Kept:
        places = torch.arange(text)
        image = torch.cartesian_prod(torch.zeros_like(places[:1]), *2 * [torch.arange(side)])
        return {
            "encoder_hidden_states": torch.randn(1, text, layers, width),
            "encoder_attention_mask": ((places < 60) | (places >= text - 5))[None],
            "position_ids": torch.cat([torch.zeros_like(image[:1]).expand(text, -1), image]),
        }

    build = partial(_as_loaded, diffusers.Krea2Transformer2DModel, **sizes)
    return Model(build, _passing(make, in_shares=True), (1, side**2, 64), variants=CFG)


def _ltx2(sizes: Mapping[str, Any], grid: tuple[int, int, int], audio: int, text: int, width: int) -> Model:
    """Frames, rows and columns of a video, ``audio`` tokens of its sound, and prompt of ``text`` tokens."""
    channels, audio_channels = (sizes.get(f"{kind}in_channels", 128) for kind in ("", "audio_"))

    def conditions(_: None) -> Conditions:
        prompt, mask = torch.randn(1, text, width), torch.ones(1, text)
        kept = {
            "audio_hidden_states": torch.randn(1, audio, audio_channels),
            **dict.fromkeys(("encoder_hidden_states", "audio_encoder_hidden_states"), prompt),
            **dict.fromkeys(("encoder_attention_mask", "audio_encoder_attention_mask"), mask),
            **dict(zip(("num_frames", "height", "width"), grid, strict=True)),
            "audio_num_frames": audio,
            "video_coords": torch.rand(1, 3, math.prod(grid), 2),  # making them ends a capture
            "audio_coords": torch.rand(1, 1, audio, 2),
        }
        return lambda latents, timestep: {"hidden_states": latents, "timestep": timestep, "sigma": timestep, **kept}

    build = partial(diffusers.LTX2VideoTransformer3DModel, rope_type="split", **sizes)  # as all released models have
    return Model(build, conditions, (1, math.prod(grid), channels), tiles=OF_VIDEOS)


def _minimax_h3(sizes: Mapping[str, Any], grid: tuple[int, int, int], audio: int, *text: int) -> Model:
    """Text, audio and the frames, rows and columns of a video in one sequence; the audio has a timestep of its own."""

    def conditions(_: None) -> Conditions:
        sequence = [text[0], audio, math.prod(grid)]
        starts = torch.arange(sum(sequence)).split(sequence)
        kinds = dict(zip(("text_indices", "audio_indices", "video_indices"), starts, strict=True))
        tags, places = torch.zeros(2, sum(sequence), dtype=torch.int64)  # a video's tag is 0
        tags[kinds["text_indices"]], tags[kinds["audio_indices"]] = 1, 2
        places[kinds["audio_indices"]] = 1
        positions = torch.arange(sum(sequence)).float()[:, None].repeat(1, 3)
        positions[kinds["video_indices"]] = torch.cartesian_prod(*map(torch.arange, grid)).float()
        kept = {
            "audio_hidden_states": torch.randn(1, audio, sizes.get("audio_in_channels", 32), dtype=torch.float32),
            "encoder_hidden_states": torch.randn(1, *text),
            "timestep_indices": places,
            "token_tags": tags,
            "position_ids": positions,
            **kinds,
        }
        return lambda latents, timestep: {
            "hidden_states": latents.float(),  # as its pipeline passes them
            "timestep": torch.cat([timestep, 0.9 * timestep]) / 1000,
            **kept,
        }

    build = partial(_as_loaded, diffusers.MiniMaxH3Transformer3DModel, **sizes)
    return Model(build, conditions, (1, math.prod(grid), 4 * sizes.get("in_channels", 24)), tiles=OF_VIDEOS)


CLIP_480P = (1, 16, 21, 60, 104)  # 81 frames
FLUX2_KLEIN = {"num_attention_heads": 24, "joint_attention_dim": 7680, "guidance_embeds": False}
IMAGE_TO_VIDEO = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
MODELS = {
    "flux": _flux({}, {"num_layers": 5, "num_single_layers": 10}, 64, 512, 4096, 768),
    **{f"flux-{16 * side}": replace(_flux({}, {}, side, 512, 4096, 768), variants={}) for side in (32, 128)},
    "flux2": _flux2({}, 64, 15360),
    "flux2-klein-4b": _flux2({"num_layers": 5, "num_single_layers": 20, **FLUX2_KLEIN}, 64, 7680),
    "qwen-image": _qwen_image({}, 64, 3584),
    "krea2": _krea2({}, 64, 512, 12, 2560),
    "hunyuan": _hunyuan({}, CLIP_480P, 4096, 768),
    "ltx2": _ltx2({}, (16, 16, 24), 126, 1024, 3840),  # 121 frames of 512 x 768, the pipeline's default
    "minimax-h3": _minimax_h3({}, (12, 15, 26), 130, 256, 5120),  # 39 frames of 480 x 832, with their sound
    "wan-1.3b": _wan({"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}, CLIP_480P, 4096, variants=CFG),
    "wan-14b": _wan({}, (1, 16, 21, 90, 160), 4096, **CFG["CFG"]),
    "wan-i2v-14b": _wan(IMAGE_TO_VIDEO, CLIP_480P, 4096, variants=CFG),
}

TINY_SIZES = json.loads(Path(__file__).with_name("tiny.json").read_text(encoding="utf-8"))
_TINY_FLUX, _TINY_FLUX2, _TINY_WAN = map(TINY_SIZES.get, ("flux", "flux2", "wan"))
_TINY_WAN_I2V = {**_TINY_WAN, "in_channels": 36, "image_dim": 16, "added_kv_proj_dim": 32}
_TINY_CLIP = (1, 16, 3, 16, 18)
TINY = {
    "flux": _flux(_TINY_FLUX, {"num_layers": 1, "num_single_layers": 1}, *(12, 37, 32, 16)),
    **{f"flux-{side}": replace(_flux(_TINY_FLUX, {}, *(16, 37, 32, 16)), variants={}) for side in (512, 2048)},
    "flux2": _flux2(_TINY_FLUX2, 12, 32),
    "flux2-klein-4b": _flux2({**_TINY_FLUX2, "guidance_embeds": False}, 12, 32),
    "qwen-image": _qwen_image(TINY_SIZES["qwen-image"], 12, 32),
    "krea2": _krea2(TINY_SIZES["krea2"], 12, 80, 2, 32),
    "hunyuan": _hunyuan(TINY_SIZES["hunyuan"], _TINY_CLIP, 32, 16),
    "ltx2": _ltx2(TINY_SIZES["ltx2"], (3, 6, 8), 10, 12, 16),
    "minimax-h3": _minimax_h3(TINY_SIZES["minimax-h3"], (3, 6, 8), 10, 12, 16),
    "wan-1.3b": _wan(_TINY_WAN, _TINY_CLIP, 32, variants=CFG),
    "wan-14b": _wan(_TINY_WAN, _TINY_CLIP, 32, **CFG["CFG"]),
    "wan-i2v-14b": _wan(_TINY_WAN_I2V, _TINY_CLIP, 32, variants=CFG),
}


def variant(model: Model, name: str) -> Model:
    """Return the model with one of its variants' changes."""
    return replace(model, **model.variants[name])


def batch(model: Model, size: int) -> Model:
    """Return the model with ``size`` equal prompts a call."""

    def conditions(control_net: torch.nn.Module | None) -> Conditions:
        of_one = model.conditions(control_net)

        def of_all(latents: torch.Tensor, timestep: torch.Tensor) -> dict[str, Any]:
            def expand(value: torch.Tensor) -> torch.Tensor:
                return value.expand(size, *value.shape[1:]) if value.ndim and len(value) == 1 else value

            return tree_map_only(torch.Tensor, expand, of_one(latents, timestep))

        return of_all

    return replace(model, conditions=conditions, latents=(size, *model.latents[1:]))
