"""Pipelines to time, at published and at toy size, with text encoders and autoencoders; all weights are random."""

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import diffusers
import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler, MiniMaxH3Scheduler, UniPCMultistepScheduler
from torch import nn

from dit_accel.modular_call import called_as_standard
from scripts.bench.model_speed.models import MODELS, TINY, TINY_FLUX, TINY_MINIMAX_H3, as_loaded

Sizes = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """Text encoder, autoencoder or another part: its class, and its configuration at published and at toy size."""

    kind: str
    config: Sizes
    tiny: Sizes


@dataclass(frozen=True)
class Call:
    """One call of a pipeline.

    `schedule`: warm-up and interval of the computed steps, and the last one; None = compute all. `branches`:
    transformer calls per step. `sparse`: model in `MODELS` whose preset leaves tiles out of computed steps, or "".
    `sla`: preset of SLA, or "".
    """

    steps: int
    schedule: tuple[int, int] | None
    branches: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sparse: str = ""
    sla: str = ""

    @property
    def cacheable(self) -> bool:
        """Return True if cache-dit can forecast steps."""
        return self.schedule is not None and self.branches < 3


@dataclass(frozen=True)
class Case:
    """Pipeline at the size of a published image or video; `model` is the last part of its id on the Hub.

    `pipeline`: its class, or its blocks'. `transformer` builds it at published and at toy size; `texts` maps a text
    encoder's number to its name in `ENCODERS` and the tokens of every prompt; `more`: components of the sound and
    others; `size`: height, width and frames (None = an image); `decodes_in`: dtype of the autoencoder on a GPU;
    `tiles`: diffusers decodes in tiles, as the model's page on the Hub advises, and ours whole.
    """

    model: str
    pipeline: str
    transformer: tuple[Callable[[], nn.Module], Callable[[], nn.Module]]
    texts: Mapping[str, tuple[str, int]]
    autoencoder: str
    scheduler: Callable[[], Any]
    calls: tuple[Call, ...]
    size: tuple[int, int, int | None] = (1024, 1024, None)
    tiny_arguments: Mapping[str, Any] = field(default_factory=dict)
    components: Mapping[str, Any] = field(default_factory=dict)
    decodes_in: torch.dtype = torch.bfloat16
    tiles: bool = False
    more: Mapping[str, Part] = field(default_factory=dict)
    tiny_frames: int = 5


_NARROW = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
_NARROW_LLAMA = {**_NARROW, "num_key_value_heads": 1, "vocab_size": 64, "head_dim": 8}
_T5 = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu"}
_TINY_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
_QWEN3 = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
_QWEN25 = {
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
}
_QWEN3_32B = {**_QWEN3, "tie_word_embeddings": False}
_QWEN3_32B |= {"hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64, "num_attention_heads": 64}
_GEMMA3 = {"hidden_size": 3840, "intermediate_size": 15_360, "num_hidden_layers": 48, "sliding_window": 1024}
_GEMMA3 |= {"num_attention_heads": 16, "num_key_value_heads": 8}
_TINY_GEMMA3 = {"text_config": _NARROW_LLAMA, "vision_config": {**_NARROW, "image_size": 64, "patch_size": 4}}
_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_320,
}


def _qwen_vl(text: Sizes, sections: list[int]) -> Sizes:
    """Add the rotary embedding, and a small vision tower, which sees no image."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    vision = {"depth": 1, "num_heads": 2, "hidden_size": 32, "intermediate_size": 32, "fullatt_block_indexes": [0]}
    vision |= {"deepstack_visual_indexes": [0]}
    return {
        "text_config": {**text, "rope_parameters": rope},
        "vision_config": {**vision, "out_hidden_size": text["hidden_size"]},
    }


ENCODERS = {
    "clip-l": Part(
        "CLIPTextModel",
        {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12},
        {**_NARROW, "vocab_size": 64},
    ),
    "t5-xxl": Part("T5EncoderModel", {**_T5, "vocab_size": 32_128}, _TINY_T5),
    "umt5-xxl": Part("UMT5EncoderModel", {**_T5, "vocab_size": 256_384}, _TINY_T5),
    "qwen2.5-vl-7b": Part(
        "Qwen2_5_VLForConditionalGeneration",
        _qwen_vl(_QWEN25, [16, 24, 24]),
        _qwen_vl({**_NARROW_LLAMA, "hidden_size": 32, "head_dim": 16}, [2, 3, 3]),
    ),
    "qwen3-vl-32b": Part(
        "Qwen3VLForConditionalGeneration",
        _qwen_vl(_QWEN3_32B, [24, 20, 20]),
        _qwen_vl({**_NARROW_LLAMA, "hidden_size": 32, "head_dim": 16, "num_hidden_layers": 51}, [2, 3, 3]),
    ),
    "qwen3-4b": Part("Qwen3ForCausalLM", _QWEN3, _NARROW_LLAMA),
    "qwen3-4b-states": Part("Qwen3Model", _QWEN3, _NARROW_LLAMA),
    "gemma3-12b": Part("Gemma3ForConditionalGeneration", {**_TINY_GEMMA3, "text_config": _GEMMA3}, _TINY_GEMMA3),
    "llama-8b": Part("LlamaModel", _LLAMA, {**_NARROW_LLAMA, "hidden_size": 32, "num_hidden_layers": 3}),
}
_BLOCKS = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
_IMAGES = {**_BLOCKS, "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}
_IMAGES |= {"scaling_factor": 0.3611, "shift_factor": 0.1159}
_NARROW_BLOCKS = {"block_out_channels": (8, 8, 16, 16), "layers_per_block": 1, "norm_num_groups": 4}
TINY_H3 = {"block_out_channels": (8,) * 6, "layers_per_block": 1, "norm_num_groups": 4}
TINY_H3 |= {"decoder_num_layers": 2, "decoder_num_attention_heads": 2, "decoder_attention_head_dim": 16}
_UNSCALED = {"latents_mean": [0.0] * 32, "latents_std": [1.0] * 32}
_TINY_SOUND = {"encoder_dim": 2, "latent_dim": 64, "num_attention_heads": 2, "decoder_dim": 128}
_TINY_SOUND |= {"resblock_kernel_sizes": (3,), "resblock_dilation_sizes": ((1,),)}
LTX2 = {"decoder_causal": False, "spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
TINY_LTX = {"block_out_channels": (8,) * 4, "layers_per_block": (1,) * 5}
TINY_LTX |= {"decoder_block_out_channels": (16, 32, 64), "decoder_layers_per_block": (1,) * 4}
_TINY_LTX2 = {**TINY_LTX, "latent_channels": 8, "decoder_spatial_padding_mode": "zeros"}  # height 1 has no reflection
AUTOENCODERS = {
    "flux": Part(
        "AutoencoderKL",
        {**_IMAGES, "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2},
        {**_IMAGES, **_NARROW_BLOCKS},
    ),
    "flux2": Part("AutoencoderKLFlux2", {}, _NARROW_BLOCKS),
    "qwen-image": Part("AutoencoderKLQwenImage", {}, {"base_dim": 8}),
    "wan": Part("AutoencoderKLWan", {}, {"base_dim": 8}),
    "hunyuan": Part("AutoencoderKLHunyuanVideo", {}, _NARROW_BLOCKS),
    "ltx2": Part("AutoencoderKLLTX2Video", LTX2, {**LTX2, **_TINY_LTX2}),
    "minimax-h3": Part("AutoencoderKLMiniMaxH3", {}, TINY_H3),
}
_TINY_CONNECTORS = {"rope_type": "split", "caption_channels": 16, "text_proj_in_factor": 3}
_TINY_CONNECTORS |= {f"{kind}_connector_num_attention_heads": 2 for kind in ("video", "audio")}
_TINY_CONNECTORS |= {f"{kind}_connector_attention_head_dim": 8 for kind in ("video", "audio")}
_TINY_MEL = {"base_channels": 4, "ch_mult": (1, 1, 1), "num_res_blocks": 1, "latent_channels": 2, "mel_bins": 8}


class Processor:
    """Replacement of a processor of texts without images."""

    def create_mm_token_type_ids(self, ids: list[list[int]]) -> list[list[int]]:
        return [[0] * len(item) for item in ids]


def _both(name: str) -> tuple[Callable[[], nn.Module], Callable[[], nn.Module]]:
    return MODELS[name].build, TINY[name].build


def _shifting(**config: Any) -> Callable[[], Any]:
    return lambda: FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **config)


_TINY_Z_IMAGE = {"dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 16}
_TINY_Z_IMAGE |= {"axes_dims": [4, 6, 6], "axes_lens": [1024, 64, 64]}
_TINY_H3_BLOCKS = {**TINY_MINIMAX_H3, "text_dim": 32, "in_channels": 24, "audio_in_channels": 32}
_CLIP_480P = (480, 832, 81)
_FLUX_TEXTS = {"": ("clip-l", 60), "_2": ("t5-xxl", 60)}
FEW_STEPS = 8  # at most; presets compute nearly all of so few
EVERY_FIFTH = (4, 5)  # 14 of 50 steps, 10 of 28
CASES = {
    "flux": Case(
        "flux.1-dev",
        "FluxPipeline",
        _both("flux"),
        _FLUX_TEXTS,
        "flux",
        _shifting(shift=3.0),
        (Call(50, EVERY_FIFTH), Call(28, EVERY_FIFTH)),
    ),
    "flux-schnell": Case(
        "flux.1-schnell",
        "FluxPipeline",
        (diffusers.FluxTransformer2DModel, lambda: diffusers.FluxTransformer2DModel(**TINY_FLUX)),
        _FLUX_TEXTS,
        "flux",
        lambda: FlowMatchEulerDiscreteScheduler(shift=1.0),
        (Call(4, None, arguments={"guidance_scale": 0.0, "max_sequence_length": 256}),),
    ),
    "flux2-klein-4b": Case(
        "flux.2-klein-4b",
        "Flux2KleinPipeline",
        _both("flux2-klein-4b"),
        {"": ("qwen3-4b", 60)},
        "flux2",
        _shifting(shift=3.0),
        (Call(4, None, arguments={"guidance_scale": 1.0}),),
        tiny_arguments={"text_encoder_out_layers": (1, 2)},
        components={"is_distilled": True},
    ),
    "qwen-image": Case(
        "qwen-image",
        "QwenImagePipeline",
        _both("qwen-image"),
        {"": ("qwen2.5-vl-7b", 34 + 128)},  # the pipeline drops 34 tokens of its template
        "qwen-image",
        _shifting(base_shift=0.5, max_shift=0.9, shift_terminal=0.02),
        (
            Call(50, EVERY_FIFTH, 2, {"true_cfg_scale": 4.0, "negative_prompt": " "}),
            Call(4, None, arguments={"true_cfg_scale": 1.0}),  # as with a LoRA for four steps
        ),
    ),
    "z-image-turbo": Case(
        "z-image-turbo",
        "ZImagePipeline",
        (diffusers.ZImageTransformer2DModel, lambda: diffusers.ZImageTransformer2DModel(**_TINY_Z_IMAGE)),
        {"": ("qwen3-4b-states", 60)},
        "flux",
        lambda: FlowMatchEulerDiscreteScheduler(shift=3.0),
        (Call(8, (4, 3), arguments={"guidance_scale": 0.0}),),
    ),
    "wan-1.3b": Case(
        "wan2.1-t2v-1.3b-diffusers",
        "WanPipeline",
        _both("wan-1.3b"),
        {"": ("umt5-xxl", 60)},
        "wan",
        lambda: UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        (
            Call(50, EVERY_FIFTH, 2, {"guidance_scale": 5.0, "negative_prompt": "blurred"}, sparse="wan-1.3b"),
            Call(50, EVERY_FIFTH, arguments={"guidance_scale": 1.0}, sparse="wan-1.3b"),
        ),
        size=_CLIP_480P,
        decodes_in=torch.float32,  # as its page on the Hub advises
    ),
    "hunyuan": Case(
        "hunyuanvideo",
        "HunyuanVideoPipeline",
        _both("hunyuan"),
        {"": ("llama-8b", 95 + 60), "_2": ("clip-l", 60)},  # the pipeline drops 95 tokens of its template
        "hunyuan",
        lambda: FlowMatchEulerDiscreteScheduler(shift=7.0),
        (Call(50, EVERY_FIFTH, sparse="hunyuan"),),
        size=_CLIP_480P,
        decodes_in=torch.float16,  # as its page on the Hub advises
        tiles=True,
    ),
    "ltx2": Case(
        "ltx-2",
        "LTX2Pipeline",
        _both("ltx2"),
        {"": ("gemma3-12b", 60)},
        "ltx2",
        _shifting(base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, shift_terminal=0.1),
        (Call(30, EVERY_FIFTH, 3, {"negative_prompt": "blurred"}, sparse="ltx2"),),  # three by default
        size=(512, 768, 121),
        tiny_frames=9,
        more={
            "connectors": Part("pipelines.ltx2.LTX2TextConnectors", {"rope_type": "split"}, _TINY_CONNECTORS),
            "audio_vae": Part("AutoencoderKLLTX2Audio", {}, _TINY_MEL),
            "vocoder": Part("pipelines.ltx2.LTX2Vocoder", {}, {"in_channels": 16, "hidden_channels": 32}),
        },
    ),
    "minimax-h3": Case(
        "minimax-h3",
        "MiniMaxH3Blocks",
        (MODELS["minimax-h3"].build, lambda: diffusers.MiniMaxH3Transformer3DModel(**_TINY_H3_BLOCKS)),
        {"": ("qwen3-vl-32b", 60)},
        "minimax-h3",
        lambda: MiniMaxH3Scheduler(12.0),
        (Call(50, EVERY_FIFTH, sparse="minimax-h3"),),
        size=(480, 832, 124),  # 5 s
        tiny_frames=124,  # its blocks take no fewer
        components={"audio_scheduler": MiniMaxH3Scheduler(3.0), "processor": Processor()},
        more={"audio_vae": Part("AutoencoderKLMiniMaxH3Audio", _UNSCALED, {**_UNSCALED, **_TINY_SOUND})},
    ),
}
CASES["wan-14b"] = replace(CASES["wan-1.3b"], model="wan2.1-t2v-14b-diffusers", transformer=_both("wan-14b"))
_FEW = Call(4, None, arguments={"guidance_scale": 1.0}, sla="wan21-sla")
CASES["wan-1.3b-few-steps"] = replace(CASES["wan-1.3b"], calls=(_FEW,))


class Tokenizer:
    """Replacement of a tokenizer: a fixed number of random ids, which depend on the text."""

    def __init__(self, count: int, vocabulary: int, longest: int) -> None:
        self.model_max_length, self.padding_side, self.pad_token = longest, "right", "<pad>"
        self._count, self._vocabulary = count, vocabulary

    def __call__(
        self, text: str | list[str], padding: bool | str = False, max_length: int | None = None, **settings: Any
    ) -> transformers.BatchEncoding:
        """Return ``input_ids`` and ``attention_mask``, int64 ``[texts, tokens]``, padded with zeros."""
        texts = [text] if isinstance(text, str) else text
        longest = max_length or self.model_max_length
        count = min(self._count, longest)
        ids = torch.zeros(len(texts), longest if padding == "max_length" else count, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, item in enumerate(texts):
            seeded = torch.Generator().manual_seed(zlib.crc32(item.encode()))
            place = slice(count) if self.padding_side == "right" else slice(-count, None)
            ids[row, place] = torch.randint(1, self._vocabulary, (count,), generator=seeded)
            mask[row, place] = 1
        if isinstance(text, str) and "return_tensors" not in settings:
            return transformers.BatchEncoding({"input_ids": ids[0].tolist()})
        return transformers.BatchEncoding({"input_ids": ids, "attention_mask": mask})

    def tokenize(self, text: str) -> list[str]:
        """Return no tokens: diffusers looks for those of textual inversion."""
        return []

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return messages[-1]["content"]


def build(case: Case, *, tiny: bool) -> Any:
    """Build a pipeline on the GPU in bf16, or at toy size on the CPU in float32."""
    parts: dict[str, Any] = {}
    device = "cpu" if tiny else "cuda"
    with _creating(device, torch.float32 if tiny else torch.bfloat16):
        parts["transformer"] = case.transformer[tiny]()
        for number, (name, _) in case.texts.items():
            part = ENCODERS[name]
            kind = getattr(transformers, part.kind)
            parts[f"text_encoder{number}"] = kind(kind.config_class(**(part.tiny if tiny else part.config)))
        parts |= {name: _made(part, tiny=tiny) for name, part in case.more.items()}
    with _creating(device, torch.float32 if tiny else case.decodes_in):
        parts["vae"] = _made(AUTOENCODERS[case.autoencoder], tiny=tiny)
    for part in parts.values():
        part.eval().requires_grad_(False)
    for number, (name, count) in case.texts.items():
        vocabulary = parts[f"text_encoder{number}"].get_input_embeddings().num_embeddings
        parts[f"tokenizer{number}"] = Tokenizer(count, vocabulary, 77 if name == "clip-l" else 512)
    parts |= {"scheduler": case.scheduler(), **case.components}
    kind = getattr(diffusers, case.pipeline)
    if issubclass(kind, diffusers.ModularPipelineBlocks):
        pipe = kind().init_pipeline()
        pipe.update_components(**parts)
        called_as_standard(pipe)
    else:
        pipe = kind(**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _made(part: Part, *, tiny: bool) -> nn.Module:
    return as_loaded(attrgetter(part.kind)(diffusers)(**(part.tiny if tiny else part.config)))


def arguments(case: Case, call: Call, *, tiny: bool) -> dict[str, Any]:
    """Return the arguments of a pipeline's call."""
    height, width, frames = size(case, tiny=tiny)
    values = {"prompt": "a fox in the snow", "height": height, "width": width}
    values |= {"num_inference_steps": steps(call, tiny=tiny), **call.arguments}
    return values | ({} if frames is None else {"num_frames": frames}) | (dict(case.tiny_arguments) if tiny else {})


def size(case: Case, *, tiny: bool) -> tuple[int, int, int | None]:
    """Return height, width and frames; None = an image."""
    if not tiny:
        return case.size
    return 32, 64, None if case.size[2] is None else case.tiny_frames


def steps(call: Call, *, tiny: bool) -> int:
    """Return the number of denoising steps."""
    return call.steps // 4 if tiny and call.steps > FEW_STEPS else call.steps


@contextmanager
def _creating(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Create modules on a device in a dtype, with the same random weights in every process."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
