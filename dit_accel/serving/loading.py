"""Load a pipeline: find it, add LoRAs, quantise it, and put it on its device."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dit_accel.errors import ArgumentError, OutOfMemoryError, shortened, shown
from dit_accel.models import denoisers, dtype_argument
from dit_accel.serving.failures import explained_loading, explained_memory
from dit_accel.serving.loras import load_loras
from dit_accel.tools.demo import demo_names, demo_path
from dit_accel.tools.extras import require_extra
from dit_accel.tools.files import INDICES, pipeline_index

if TYPE_CHECKING:
    import torch
    from rich.console import Console


@dataclass(frozen=True)
class Loading:
    device: str | None = None  # None = the GPU if there is one
    dtype: str | None = None  # None = bfloat16 on a GPU, else float32
    offload: str = "none"  # or what moves to the GPU when it runs: text, model, group, sequential
    loras: Mapping[str, float] = field(default_factory=dict)  # weight by path or id
    quantize: str | None = None  # float8 or int8
    named_loras: Mapping[str, str] = field(default_factory=dict)  # path or id by the name that jobs use
    inputs: Collection[str] = ()  # further arguments of all calls, which decide on the components of modular pipelines

    def __post_init__(self) -> None:
        if self.quantize is None:
            return
        if self.loras and self.named_loras:
            raise ArgumentError("loras", "can't be used with --lora and --quantize, where --lora stays a layer")
        require_extra("torchao", "--quantize")
        if self.offload == "sequential":
            raise ArgumentError("offload", "must be none, text, model or group with --quantize")

    @property
    def facts(self) -> dict[str, Any]:
        return {name: value for name, value in {"lora": dict(self.loras), "quantize": self.quantize}.items() if value}


def load_pipeline(
    model: str, how: Loading, console: Console, before_move: Callable[[Any], object] | None = None
) -> Any:
    """Load the pipeline onto its device, ready to call; ``before_move`` is called before all of it moves there."""
    source = resolve_model(model)
    with console.status("importing diffusers"):
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()  # it warns about image processors that no pipeline here uses
        import diffusers
    place = _resolve_device(how.device)
    if how.offload != "none" and place.type != "cuda":
        raise ArgumentError("offload", f"needs a CUDA device, got {place}")
    precision = getattr(torch, how.dtype) if how.dtype else torch.bfloat16 if place.type == "cuda" else torch.float32
    if how.quantize == "float8":
        from dit_accel.kernels.backends import FP8_CAPABILITY

        has_products = place.type == "cuda" and torch.cuda.get_device_capability(place) >= FP8_CAPABILITY
        if not has_products or precision is not torch.bfloat16:
            needs = "bfloat16 on a GPU of compute capability 8.9 or later (RTX 4090, H100)"
            raise ArgumentError("quantize", f"float8 needs {needs}, got {precision} on {place}; use int8")
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    if console.quiet:
        diffusers.utils.logging.set_verbosity_error()
    with explained_memory(), console.status(f"loading {model}"):
        with explained_loading("model", model):
            pipe = _from_pretrained(source, how.inputs, **dtype_argument(precision))
        load_loras(pipe, how.loras)
        if how.quantize is not None:
            quantize(pipe, how.quantize, place)
        if how.offload in ("none", "text") and before_move is not None:
            before_move(pipe)
        if how.offload == "none":
            pipe.to(place)
        elif how.offload == "group":
            _offload_groups(pipe, place)
        else:
            name = "enable_group_offload" if how.offload == "text" else f"enable_{how.offload}_cpu_offload"
            if (enable := getattr(pipe, name, None)) is None:
                raise ArgumentError("offload", f"must be none or group for {type(pipe).__name__}, got {how.offload}")
            if how.offload == "text":  # a stream uploads the next layers
                whole = [*denoisers(pipe), "vae"]
                whole += [name for name, part in pipe.components.items() if not moves_by_layers(part)]
                enable(place, offload_type="leaf_level", use_stream=True, exclude_modules=whole)
            else:
                enable(device=place)
    pipe.set_progress_bar_config(disable=console.quiet)
    return pipe


def _from_pretrained(source: str, inputs: Collection[str] = (), **dtype: torch.dtype) -> Any:
    """Load the standard pipeline of a folder or repository, or its modular one if there is no other."""
    import diffusers
    from huggingface_hub.errors import GatedRepoError

    is_folder = os.path.isdir(source)
    if not is_folder or os.path.isfile(os.path.join(source, INDICES[0])):
        try:
            return diffusers.DiffusionPipeline.from_pretrained(source, **dtype)
        except OSError as error:
            if is_folder or isinstance(error, GatedRepoError) or INDICES[0] not in str(error):
                raise  # otherwise the repository, or its copy on this machine, has no standard pipeline
    from dit_accel.modular_call import load_modular

    return load_modular(source, inputs, **dtype)


def quantize(pipe: Any, kind: str, place: torch.device) -> None:
    """Store the linear layers of a pipeline's transformers in int8, or in float8 with activations, by torchao."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, Int8WeightOnlyConfig, PerRow, quantize_

    from dit_accel.models.beside.quantized_linears import block_linears

    config = Int8WeightOnlyConfig()
    if kind == "float8":
        config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    for name, transformer in denoisers(pipe).items():
        if getattr(transformer, "hf_quantizer", None) is not None:
            raise ArgumentError("quantize", f"the model's {name} is already quantised; leave --quantize out")
        names = {layer for layer, _ in block_linears(transformer)}
        quantize_(transformer, config, lambda _, name, names=names: name in names, device=place)


def _offload_groups(pipe: Any, place: torch.device) -> None:
    """Move blocks of transformers, and layers of other models, to the device when they run; streams upload ahead."""
    import torch
    from diffusers.hooks import apply_group_offloading

    transformers = denoisers(pipe)
    for name, transformer in transformers.items():
        if not getattr(transformer, "_supports_group_offloading", False):
            raise ArgumentError("offload", f"group can't move the {name}, {type(transformer).__name__}; use model")
        transformer.enable_group_offload(place, num_blocks_per_group=1, use_stream=True)
    for part in pipe.components.values():
        if not isinstance(part, torch.nn.Module) or part in transformers.values():
            continue
        if moves_by_layers(part):
            # Streams follow calls: an autoencoder's decode and encode are none.
            apply_group_offloading(part, place, offload_type="leaf_level", use_stream=not hasattr(part, "decode"))
        else:
            part.to(place)


def moves_by_layers(part: Any) -> bool:
    """Return True if diffusers can move the layers of a component, each when it is called."""
    from torch.nn import MultiheadAttention  # reads the weight of a layer that it does not call, as in SigLIP

    reads = any(isinstance(module, MultiheadAttention) for module in getattr(part, "modules", tuple)())
    return getattr(part, "_supports_group_offloading", True) and not reads


def resolve_model(model: str) -> str:
    folder = str(demo_path(model) or os.path.expanduser(model))
    if os.path.isdir(folder):
        if pipeline_index(Path(folder)) is None:
            raise ArgumentError("model", f"{folder} is not a diffusers pipeline: {' or '.join(INDICES)} is missing")
        return folder
    if os.path.exists(folder) or model.startswith((".", "/", "~")) or model.count("/") != 1:
        names = ", ".join(demo_names()) or "none in this installation"
        kinds = f"a pipeline's folder, a Hub id (OWNER/NAME) or a demo model ({names})"
        raise ArgumentError("model", f"{shortened(model)} is not {kinds}")
    return model


def _resolve_device(device: str | None) -> torch.device:
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        with explained_memory():
            torch.zeros(1, device=place).item()
    except OutOfMemoryError:
        raise
    except Exception as error:  # each type of device raises its own errors
        reason = shortened(str(error).splitlines()[0])
        raise ArgumentError("device", f"{shown(device)} can't run here ({reason}); use --device cpu") from None
    if place.type == "cuda" and place.index is not None:
        torch.cuda.set_device(place)  # where Triton launches kernels
    return place
