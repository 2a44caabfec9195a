"""Model families: which adapter drives which diffusers transformer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dit_accel.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from dit_accel.models.transformer_hook import GenericAdapter

# Names in a pipeline under which diffusers keeps transformers that denoise; Wan 2.2 has two.
TRANSFORMER_NAMES = ("transformer", "transformer_2")


def denoisers(pipe: Any) -> dict[str, torch.nn.Module]:
    """The pipeline's transformers, by name; empty where it denoises with something else."""
    found = {name: getattr(pipe, name, None) for name in TRANSFORMER_NAMES}
    return {name: module for name, module in found.items() if module is not None}


def adapter_class(transformer: torch.nn.Module) -> type[GenericAdapter]:
    """The adapter of a transformer's family, or the one that serves any.

    Raises:
        UnsupportedError: the transformer was compiled whole.
    """
    from diffusers import FluxTransformer2DModel, HunyuanVideoTransformer3DModel, WanTransformer3DModel

    from dit_accel.models.flux import FluxAdapter
    from dit_accel.models.hunyuan_video import HunyuanVideoAdapter
    from dit_accel.models.transformer_hook import COMPILED_WHOLE, GenericAdapter
    from dit_accel.models.wan import WanAdapter

    if hasattr(transformer, "_orig_mod"):  # what torch.compile(transformer) returns
        raise UnsupportedError(COMPILED_WHOLE.format(type(transformer._orig_mod).__name__))
    families = {
        FluxTransformer2DModel: FluxAdapter,
        HunyuanVideoTransformer3DModel: HunyuanVideoAdapter,
        WanTransformer3DModel: WanAdapter,
    }
    return next((cls for model, cls in families.items() if isinstance(transformer, model)), GenericAdapter)


def family_of(pipe: Any) -> str:
    """Model family of a pipeline: ``flux``, ``hunyuan_video``, ``wan`` or ``any``."""
    families = {adapter_class(transformer).family for transformer in denoisers(pipe).values()}
    return families.pop() if len(families) == 1 else "any"
