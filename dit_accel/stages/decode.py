"""Decoding latents with fused kernels: a hook on the decoder of a pipeline's autoencoder.

Whatever calls the decoder stays as it is, so tiling, slicing and offloading work as before. The first output of each
shape is compared with the decoder's own; where it differs by more than the rounding of its dtype explains, the decoder
runs on its own from then on.
"""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Any

import torch
from torch import nn

from dit_accel.kernels.backends import resolve_backend
from dit_accel.models.hooks import HOOK_NAME, Hook, find_hook, is_compiled, register_hook, remove_hook, runs_known_code
from dit_accel.stages.vae import page_of

# Relative error (L2) over the decoder's own output. Two orders of the same sums differ by about a third of it.
BOUNDS = {torch.float32: 3e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}  # float32 convolves in TF32 by default
FUSED = "with fused kernels"
OWN = "by the autoencoder's own decoder"
OFF = f"{OWN}: stages.decode is false"


class DecoderHook(Hook):
    """Runs a decoder's forward with fused kernels.

    Args:
        page: of the autoencoder's class, see :mod:`dit_accel.stages.vae`.
        backend: of the kernels; "auto" leaves a CPU's calls to the decoder.

    Attributes:
        remark: how the latest call ran; None = there was none.
    """

    runs_eagerly = True

    def __init__(self, page: ModuleType, backend: str = "auto") -> None:
        super().__init__()
        self.remark: str | None = None
        self._page = page
        self._backend = backend
        self._known: dict[tuple, str | None] = {}  # why not, by shape, dtype and device

    @torch.compiler.disable
    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The decoder's output for the same arguments."""
        original = self.fn_ref.original_forward
        reason = self._why_not(module, args, kwargs)
        if reason is None:
            (latents,) = args
            key = latents.shape, latents.dtype, latents.device
            if key not in self._known:
                own, made = original(latents), self._page.decode(module, latents, self._backend)
                self._known[key] = why_other(made, own)
                reason = self._known[key]
                self.remark = FUSED if reason is None else f"{OWN}: {reason}"
                return own if reason else made
            if (reason := self._known[key]) is None:
                self.remark = FUSED
                return self._page.decode(module, latents, self._backend)
        self.remark = f"{OWN}: {reason}"
        return original(*args, **kwargs)

    def _why_not(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> str | None:
        """Why the decoder's own forward must run, or None."""
        if len(args) != 1 or not isinstance(args[0], torch.Tensor) or any(each is not None for each in kwargs.values()):
            return "the decoder gets more than latents"
        latents = args[0]
        if latents.dtype not in BOUNDS:
            return f"the decoder computes in {latents.dtype}"
        if self._backend == "auto" and resolve_backend("auto", latents) != "triton":
            return f"kernels need a CUDA GPU with Triton, and latents are on '{latents.device}'"
        if torch.is_grad_enabled() or module.training:
            return "gradients are on, or the decoder is in training mode"
        if torch.is_autocast_enabled(latents.device.type):
            return "autocast"
        for name, part in module.named_modules():
            if (reason := _why_not_part(part, is_root=part is module, latents=latents)) is not None:
                return f"{name or 'the decoder'} {reason}"
        return self._page.why_not(module)


def _why_not_part(part: nn.Module, *, is_root: bool, latents: torch.Tensor) -> str | None:
    """Why a module of the decoder must be called, or None."""
    if is_compiled(part):
        return "is compiled"
    hooks = vars(part).get("_diffusers_hook")
    names = [] if hooks is None else [name for name in hooks.hooks if not (is_root and name == HOOK_NAME)]
    has_torch_hooks = not is_root and (part._forward_hooks or part._forward_pre_hooks)  # ours time the decoder itself
    if names or has_torch_hooks or hasattr(part, "_hf_hook"):
        return "has hooks"
    if not is_root and not runs_known_code(part):
        return "is not the code of torch or diffusers"
    for name, weight in part._parameters.items():
        if weight is not None and (weight.dtype != latents.dtype or weight.device != latents.device):
            return f"has its {name} in {weight.dtype} on '{weight.device}'"
    return None


def why_other(made: torch.Tensor, own: torch.Tensor) -> str | None:
    """Why an output can't stand for the decoder's own, or None."""
    if made.shape != own.shape or made.dtype != own.dtype:
        return f"fused kernels gave {list(made.shape)} of {made.dtype}, the decoder {list(own.shape)} of {own.dtype}"
    error = ((made.float() - own.float()).norm() / own.float().norm().clamp(min=1e-12)).item()
    if error <= BOUNDS[own.dtype]:
        return None
    return f"fused kernels differ from the decoder by {error:.2g}, more than {BOUNDS[own.dtype]:g} in {own.dtype}"


class Decoding:
    """The stage of one pipeline: hooks the decoder of its autoencoder until it is closed.

    Args:
        pipe: with an autoencoder at ``vae``, or without.
    """

    def __init__(self, pipe: Any) -> None:
        autoencoder = getattr(pipe, "vae", None)
        page, decoder = page_of(autoencoder), getattr(autoencoder, "decoder", None)
        self._hook = self._decoder = None
        self._why_not: str | None = None
        if autoencoder is None:
            return
        if page is None or not isinstance(decoder, nn.Module):
            self._why_not = f"{OWN}: {type(autoencoder).__name__} is not known"
            return
        self._hook, self._decoder = DecoderHook(page), weakref.ref(decoder)
        remove_hook(decoder)  # that of another pipeline with the same autoencoder
        register_hook(decoder, self._hook)

    @property
    def remark(self) -> str | None:
        """How the latest decode ran; None = there was none, or the pipeline has no autoencoder."""
        return self._why_not if self._hook is None else self._hook.remark

    def close(self) -> None:
        """Takes the hook off, unless another acceleration has put its own in its place."""
        decoder = None if self._decoder is None else self._decoder()
        if decoder is not None and find_hook(decoder) is self._hook:
            remove_hook(decoder)
