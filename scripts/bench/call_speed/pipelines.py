"""Pipelines to time, at published and at toy size, with text encoders and autoencoders; all weights are random."""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler, MiniMaxH3Scheduler, UniPCMultistepScheduler
from torch import nn

from dit_accel.modular_call import called_as_standard
from scripts.bench.model_speed.models import MODELS, TINY, TINY_SIZES, as_loaded

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


def _parts(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Part]:
    return {name: Part(**row) for name, row in rows.items()}


_ROWS = json.loads(Path(__file__).with_name("parts.json").read_text(encoding="utf-8"))
ENCODERS = _parts(_ROWS["encoders"])  # vision towers are small, because they see no image
AUTOENCODERS = _parts(_ROWS["autoencoders"])  # a toy of LTX-2 pads with zeros: a height of 1 has no reflection


class Processor:
    """Replacement of a processor of texts without images."""

    def create_mm_token_type_ids(self, ids: list[list[int]]) -> list[list[int]]:
        return [[0] * len(item) for item in ids]


def _both(name: str) -> tuple[Callable[[], nn.Module], Callable[[], nn.Module]]:
    return MODELS[name].build, TINY[name].build


def _shifting(**config: Any) -> Callable[[], Any]:
    return lambda: FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **config)


_TINY_H3_BLOCKS = {**TINY_SIZES["minimax-h3"], "text_dim": 32, "in_channels": 24, "audio_in_channels": 32}
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
        (diffusers.FluxTransformer2DModel, lambda: diffusers.FluxTransformer2DModel(**TINY_SIZES["flux"])),
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
        (diffusers.ZImageTransformer2DModel, lambda: diffusers.ZImageTransformer2DModel(**TINY_SIZES["z-image"])),
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
        more=_parts(_ROWS["ltx2"]),
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
        more=_parts(_ROWS["minimax-h3"]),
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
