"""Decoding latents with fused kernels: another forward on the decoder of a pipeline's autoencoder.

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
from torch.utils import _pytree as pytree

from dit_accel.kernels.backends import resolve_backend
from dit_accel.models.hooks import is_compiled, runs_known_code
from dit_accel.stages.vae import page_of

# Relative error (L2) over the decoder's own output. Two orders of the same sums differ by about a third of it.
BOUNDS = {torch.float32: 3e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}  # float32 convolves in TF32 by default
FUSED = "with fused kernels"
OWN = "by the autoencoder's own decoder"
OFF = f"{OWN}: stages.decode is false"


class FusedForward:
    """Stands in for a decoder's forward, with fused kernels. A copied or pickled decoder has its class's own.

    Args:
        decoder: of an autoencoder.
        page: of the autoencoder's class, see :mod:`dit_accel.stages.vae`.
        backend: of the kernels; "auto" leaves a CPU's calls to the decoder.

    Attributes:
        remark: how the latest call ran; None = there was none.
        holders: accelerations that want it.
    """

    def __init__(self, decoder: nn.Module, page: ModuleType, backend: str = "auto") -> None:
        self.remark: str | None = None
        self.holders = 1
        self._decoder = weakref.ref(decoder)
        self._replaced = vars(decoder).get("forward")  # that somebody else has put there
        self._page = page
        self._backend = backend
        self._known: dict[tuple, str | None] = {}  # why not, by the form of a call
        decoder.forward = self

    def __reduce__(self) -> tuple:
        decoder = self._decoder()  # which has no attributes yet when a copy of it reads this
        return (getattr, (decoder, "forward")) if self._replaced is None else (_same, (self._replaced,))

    def leave(self) -> None:
        """One acceleration less wants it; with the last it goes, and lets every call through if something wraps it."""
        self.holders -= 1
        decoder = self._decoder()
        if decoder is not None and not self.holders and vars(decoder).get("forward") is self:
            del decoder.forward
            if self._replaced is not None:
                decoder.forward = self._replaced

    def _original(self, *args: Any, **kwargs: Any) -> Any:
        """The forward that it stands in for."""
        if self._replaced is not None:
            return self._replaced(*args, **kwargs)
        decoder = self._decoder()
        return type(decoder).forward(decoder, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The decoder's output for the same arguments."""
        module, original = self._decoder(), self._original
        if torch.compiler.is_compiling() or not self.holders:  # the decoder's own code is what is to be compiled
            return original(*args, **kwargs)
        reason = self._why_not(module, args, kwargs)
        if reason is None:
            form = _form(args, kwargs)
            if form not in self._known:
                return self._tried(module, form, args, kwargs)
            if (reason := self._known[form]) is None:
                made = self._fused(module, args, kwargs)
                if isinstance(made, torch.Tensor):
                    self.remark = FUSED
                    return made
                reason = made
        self.remark = f"{OWN}: {reason}"
        return original(*args, **kwargs)

    def _tried(self, module: nn.Module, form: tuple, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        """The output of a first call of a form, which decides about the later ones."""
        copied = _copied(args, kwargs)
        own = self._original(*args, **kwargs)
        size = own.float().norm().item()
        if not 0 < size < float("inf"):  # nothing to compare with
            self.remark = f"{OWN}: its output is no image"
            return own
        made = self._fused(module, *copied)
        reason = self._known[form] = why_other(made, own) if isinstance(made, torch.Tensor) else made
        self.remark = FUSED if reason is None else f"{OWN}: {reason}"
        return own if reason else made

    def _fused(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | str:
        """The output with fused kernels, or why there is none; the arguments' lists change with an output only."""
        copied, named = _copied(args, kwargs)  # decoders of videos keep frames in lists
        try:
            made = self._page.decode(module, *copied, **named, backend=self._backend).contiguous()
        except Exception as error:  # whatever memory, a compiler or a kernel raises: the decoder itself may still run
            return f"fused kernels raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        for name, given in kwargs.items():
            if isinstance(given, list):
                given[:] = named[name]
        return made

    def _why_not(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> str | None:
        """Why the decoder's own forward must run, or None."""
        if not args or not isinstance(args[0], torch.Tensor):
            return "the decoder gets no latents"
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
        return self._page.why_not(module, args, kwargs)


def _why_not_part(part: nn.Module, *, is_root: bool, latents: torch.Tensor) -> str | None:
    """Why a module of the decoder must be called, or None."""
    if is_compiled(part):
        return "is compiled"
    has_torch_hooks = not is_root and (part._forward_hooks or part._forward_pre_hooks)  # ours time the decoder itself
    if has_torch_hooks or hasattr(part, "_hf_hook") or hasattr(part, "_diffusers_hook"):
        return "has hooks"
    if not is_root and not (
        runs_known_code(part) and type(part).__module__.partition(".")[0] in ("torch", "diffusers")
    ):
        return "is not the code of torch or diffusers"
    for name, weight in part._parameters.items():
        if weight is not None and (weight.dtype != latents.dtype or weight.device != latents.device):
            return f"has its {name} in {weight.dtype} on '{weight.device}'"
    return None


def _form(args: tuple, kwargs: dict[str, Any]) -> tuple:
    """Everything about a call's arguments but the values of tensors."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    forms = ((each.shape, each.dtype, each.device) if isinstance(each, torch.Tensor) else each for each in leaves)
    return structure, *forms


def _copied(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments with lists of their own."""
    return pytree.tree_map(lambda leaf: leaf, (args, kwargs))


def why_other(made: torch.Tensor, own: torch.Tensor) -> str | None:
    """Why an output can't stand for the decoder's own, or None."""
    if made.shape != own.shape or made.dtype != own.dtype:
        return f"fused kernels gave {list(made.shape)} of {made.dtype}, the decoder {list(own.shape)} of {own.dtype}"
    error = ((made.float() - own.float()).norm() / own.float().norm().clamp(min=1e-12)).item()
    if error <= BOUNDS[own.dtype]:
        return None
    return f"fused kernels differ from the decoder by {error:.2g}, more than {BOUNDS[own.dtype]:g} in {own.dtype}"


def fused_forward(decoder: nn.Module) -> FusedForward | None:
    """The fused forward of a decoder, whoever put it there; None = there is none."""
    forward = vars(decoder).get("forward")
    return forward if isinstance(forward, FusedForward) else None


def _same(forward: Any) -> Any:
    return forward


class Decoding:
    """The stage of one pipeline: fuses the decoder of its autoencoder until it is closed.

    Args:
        pipe: with an autoencoder at ``vae``, or without.
    """

    def __init__(self, pipe: Any) -> None:
        autoencoder = getattr(pipe, "vae", None)
        page, decoder = page_of(autoencoder), getattr(autoencoder, "decoder", None)
        self._forward: FusedForward | None = None
        self._why_not: str | None = None
        if autoencoder is None:
            return
        if page is None or not isinstance(decoder, nn.Module):
            self._why_not = f"{OWN}: {type(autoencoder).__name__} is not known"
            return
        self._forward = fused_forward(decoder)  # of another pipeline with the same autoencoder
        if self._forward is None:
            self._forward = FusedForward(decoder, page)
        else:
            self._forward.holders += 1

    @property
    def remark(self) -> str | None:
        """How the latest decode ran; None = there was none, or the pipeline has no autoencoder."""
        return self._why_not if self._forward is None else self._forward.remark

    def close(self) -> None:
        """Gives the decoder its own forward back, unless another pipeline wants the fused one; twice does nothing."""
        forward, self._forward = self._forward, None
        if forward is not None:
            forward.leave()
