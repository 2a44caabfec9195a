"""Where does acceleration apply inside a model?

Read `families/family.py` first: it defines the facts that describe a model family. Then read one family, such as
`families/sd3.py`. `session.py` owns a transformer's call from beginning to end. `drive.py` chooses the driver of a
transformer. `transformer.py` is the driver for any transformer: it wraps whole calls, which is enough for level
`output`. `driver.py` extends it for known families and works inside the blocks. `wrappers.py` finds transformers inside
of wrappers. `hooks.py` adds and removes hooks on modules, `interceptor.py` catches attention calls, and `fused/` holds
blocks that run our kernels. `graphs/` captures computed steps as CUDA graphs, `parallel/` divides a call among GPUs.
`beside/` handles other changes to a transformer: ControlNets, compilation, other caches and 8-bit layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Attributes of a pipeline that hold denoising transformers of any class: Wan 2.2 has one for high noise and one for low
# noise, Ideogram 4 has one for each branch of guidance.
TRANSFORMER_NAMES = ("transformer", "transformer_2", "unconditional_transformer")


def dtype_argument(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Keyword argument that sets the dtype in ``from_pretrained``; diffusers before 0.40 calls it ``torch_dtype``."""
    import diffusers

    major, minor = diffusers.__version__.split(".")[:2]
    return {"dtype" if (int(major), int(minor)) >= (0, 40) else "torch_dtype": dtype}


def denoisers(pipe: Any) -> dict[str, torch.nn.Module]:
    """Return the pipeline's transformers, each once, by name; empty if it denoises with another module.

    A component counts if it has one of ``TRANSFORMER_NAMES``, or if it is a transformer of diffusers that denoises
    latents, under any name (MiniMax-H3 has ``transformer_ref``). If a transformer is wrapped, the result holds the
    transformer inside (:mod:`dit_accel.models.wrappers`).
    """
    from dit_accel.models.wrappers import denoises, unwrapped

    found: dict[str, torch.nn.Module] = {}
    for name in (*TRANSFORMER_NAMES, *getattr(pipe, "__dict__", ())):
        module = unwrapped(getattr(pipe, name, None))
        if module is None or (name not in TRANSFORMER_NAMES and not denoises(type(module))):
            continue
        if not any(module is item for item in found.values()):
            found[name] = module
    return found


def call_number(pipe: Any, arguments: Mapping[str, Any], name: str) -> int | None:
    """Return a whole number of a pipeline's call, or else its default; None if it has none."""
    if (value := arguments.get(name)) is not None:
        return value if isinstance(value, int) else None
    parameter = inspect.signature(pipe.__call__).parameters.get(name)
    if parameter is not None and isinstance(parameter.default, int):
        return parameter.default
    sample, scale = (getattr(pipe, key, None) for key in ("default_sample_size", "vae_scale_factor"))
    is_side = parameter is not None and name in ("height", "width")
    return sample * scale if is_side and isinstance(sample, int) and isinstance(scale, int) else None
