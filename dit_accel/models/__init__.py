"""Where in a model does acceleration apply?

Read `families/family.py` first, which says what facts a family has, and one of the pages beside it. `drive.py` gives
each transformer its driver: `transformer.py` wraps its calls, which is all that level `output` needs, and `driver.py`
works inside of them by the family's facts. `hooks.py` puts hooks on modules and takes them off, `interceptor.py`
catches attention, and `fused/` has blocks with kernels of ours. `graphs/` captures computed steps as CUDA graphs,
`parallel/` divides calls among GPUs, and `beside/` gets along with what others do to a transformer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Names in a pipeline under which diffusers keeps transformers that denoise: Wan 2.2 has one for high noise and one for
# low, Ideogram 4 one for each branch of guidance.
TRANSFORMER_NAMES = ("transformer", "transformer_2", "unconditional_transformer")


def dtype_argument(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of weights for ``from_pretrained`` of diffusers, which called it ``torch_dtype`` before 0.40."""
    import diffusers

    major, minor = diffusers.__version__.split(".")[:2]
    return {"dtype" if (int(major), int(minor)) >= (0, 40) else "torch_dtype": dtype}


def denoisers(pipe: Any) -> dict[str, torch.nn.Module]:
    """The pipeline's transformers, each once, by name; empty where it denoises with something else.

    Of one that ``torch.compile`` has wrapped it is the transformer inside.
    """
    found: dict[str, torch.nn.Module] = {}
    for name in TRANSFORMER_NAMES:
        module = getattr(pipe, name, None)
        module = getattr(module, "_orig_mod", module)
        if module is not None and not any(module is each for each in found.values()):
            found[name] = module
    return found
