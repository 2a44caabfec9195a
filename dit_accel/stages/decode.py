"""Decoding latents, and encoding images, with fused kernels: another forward on the parts of an autoencoder.

Whatever calls the decoder stays as it is, so tiling, slicing and offloading work as before. The first output of each
shape is compared with the decoder's own; where it differs by more than the rounding of its dtype explains, the decoder
runs on its own from then on. The autoencoder's ``_decode`` is watched too: between its begin and end weights are
converted and modules checked once, and if a kernel fails in the middle, the decode begins anew without kernels. If by
the page's count memory is short, a corner is compared, CUDA graphs of steps are freed, or decoding is in tiles.
Ranks that make an image or video together share its decode (:mod:`dit_accel.stages.sharing`).
"""

from __future__ import annotations

import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from dit_accel.errors import headline
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.kept import is_capturing
from dit_accel.loop.timing import CallParts
from dit_accel.models.caller import direct_caller
from dit_accel.models.free_memory import GIB, read_memory
from dit_accel.models.graphs.step_graphs import StepGraphs
from dit_accel.models.hooks import is_compiled, is_known_class, runs_known_code
from dit_accel.models.stand_in import StandIn
from dit_accel.stages.sharing import Bands, FailedError, Ranks, all_decode, group_of, ranks_of
from dit_accel.stages.vae import PAGES, why_unknown
from dit_accel.stages.vae.layers import Layers

# Relative error (L2) over the decoder's own output: about twice what another order of the same sums changes.
BOUNDS = {torch.float32: 3e-3, torch.float16: 1e-2, torch.bfloat16: 8e-2}  # float32 convolves in TF32 by default
FUSED = "with fused kernels"
OWN = "by the autoencoder's own"
PART = "vae.decoder"  # of a pipeline's call
COUNTED = ("cuda",)  # types of devices whose free memory decides
OFF = f"{OWN} decoder: stages.decode is false"
_NUMBERS = itertools.count()


class _Decode:
    """One decode in progress, in which no weight and no module changes."""

    def __init__(self, backend: str, given_up: str | None = None) -> None:
        self.number = next(_NUMBERS)
        self.layers = Layers(backend)
        self.is_counted = False  # memory is counted, and tiles may follow
        self.given_up = given_up  # why all calls are the decoder's own; None = they need not be
        self.reasons: dict[tuple, str | None] = {}  # the same for single calls, by their form
        self.bands: Bands | None = None  # how ranks may share the decode
        self.form: tuple = ()  # of a decode that they may share: all but the values of tensors


class _GivenUp(Exception):
    """A kernel failed in the middle of a decode, which must begin anew."""


class _ShortError(Exception):
    """Memory does not suffice for a decode in one piece; the message has the reason."""


class FusedDecode:
    """Decodes with fused kernels, in place of the decoder of an autoencoder that has a page.

    The backend "auto" leaves a CPU's calls to the decoder. The ranks of a group share every decode; without a group,
    the ranks of a pipeline share decodes that the pipeline calls.
    """

    part = "decoder"
    method = "decode"  # of the page; the autoencoder's begins with "_"

    def __init__(self, autoencoder: nn.Module, backend: str = "auto", group: dist.ProcessGroup | None = None) -> None:
        self.remark: str | None = None  # how the latest call ran
        self.holders = 1  # number of accelerations that want it
        self.sharing: list[Decoding] = []  # stages of pipelines whose ranks share decodes
        self._group = group
        self._has_failed = False  # a rank in a shared decode
        self._shapes: dict[tuple, set[tuple]] = {}  # of calls' latents, by forms of decodes that kernels can run
        self._page = PAGES.get(type(autoencoder).__name__)
        self.can_share = hasattr(self._page, "SHARED_FROM")
        self._backend = backend
        self._known: dict[tuple, str | None] = {}  # why not, by the form of a compared call
        self._too_large: dict[tuple, int] = {}  # number of the first decode whose comparison had no memory, by form
        self._current = threading.local()
        self._tiling = threading.Lock()  # of threads that turn the autoencoder's tiling on and off again
        self._stand_ins = [StandIn(autoencoder, f"_{self.method}", self._whole)]
        self._stand_ins.append(StandIn(getattr(autoencoder, self.part), "forward", self._forward))
        if hasattr(self._page, "decode_clip"):
            self._stand_ins.append(StandIn(autoencoder, "_decode_clip", self._clip))

    @classmethod
    def on(cls, autoencoder: Any) -> FusedDecode | None:
        """Return the one that is on an autoencoder, whoever put it there, or None."""
        method = getattr(autoencoder, "__dict__", {}).get(f"_{cls.method}")
        return method.owner if isinstance(method, StandIn) and method.owner.holders else None

    def leave(self) -> None:
        """Restore the method once no acceleration wants it; if something wraps it, every call passes through."""
        self.holders -= 1
        if not self.holders:
            for stand_in in self._stand_ins:
                stand_in.leave()

    def _whole(self, original: Callable, module: nn.Module, args: tuple, kwargs: dict, *, tiled: bool = False) -> Any:
        """Run a decode of the autoencoder, which may call its decoder several times: in tiles if memory is short."""
        if not self.holders or self._is_inside():
            return original(*args, **kwargs)
        ranks, decode, is_short = None if tiled else self._ranks(module, args), _Decode(self._backend), False
        if ranks is not None:
            items = vars(module).items()
            settings = [item for item in items if type(item[1]) in (bool, int, float) and item[0][0] != "_"]  # of tiles
            decode.form = (tuple(args[0].shape), str(args[0].dtype)), tuple(settings), _form(args, kwargs)
            decode.bands = Bands(ranks, self._page.decode, self._page.SHARED_FROM)
        decode.is_counted = not tiled and ranks is None and hasattr(self._page, "PEAKS") and self.method == "decode"
        try:
            return self._attempt(original, decode, args, kwargs)
        except (_GivenUp, _ShortError) as error:
            given_up: str | None = str(error)
            is_short = isinstance(error, _ShortError)
        except torch.OutOfMemoryError:
            if decode.bands is not None and decode.bands.is_agreed is not False:  # other ranks wait for this one
                raise
            given_up = "memory did not suffice at first"
        except FailedError as error:
            self._has_failed = True
            given_up = None if error.__cause__ is None else f"fused kernels raised {headline(error.__cause__)}"
        del decode  # with converted weights
        if not is_short:
            StepGraphs.lend_all()
            return self._attempt(original, _Decode(self._backend, given_up), args, kwargs)
        with self._tiling:
            before, module.use_tiling = module.use_tiling, True
            try:
                output = self._whole(original, module, args, kwargs, tiled=True)
            finally:
                module.use_tiling = before
            self.remark = f"{self.remark}, in tiles: {given_up}"
        return output

    def _attempt(self, original: Callable[..., Any], decode: _Decode, args: tuple, kwargs: dict[str, Any]) -> Any:
        self._current.decode = decode
        try:
            output = original(*args, **kwargs)
        finally:
            self._current.decode = None
        if decode.bands is None:
            return output
        if decode.bands.is_agreed:
            decode.bands.end()
        elif all(self._known.get(form, OWN) is None and reason is None for form, reason in decode.reasons.items()):
            self._shapes[decode.form] = decode.bands.shapes  # ranks may share it the next time
        return output

    def _clip(self, original: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        has_failed = self._is_inside() and self._current.decode.given_up is not None  # memory may be short
        is_fused = self.holders and not has_failed and self._has_kernels(args[0])
        return self._page.decode_clip(module, *args) if is_fused else original(*args, **kwargs)

    def _ranks(self, module: nn.Module, args: tuple) -> Ranks | None:
        """Return the ranks that may share a decode: all of them call the same pipeline, which decodes."""
        if self._has_failed or not self.can_share or not (args and self._has_kernels(args[0])):
            return None
        group, pipe = self._group, direct_caller(module) if self.sharing else None
        stage = next((stage for stage in self.sharing if pipe is not None and stage.pipe() is pipe), None)
        if stage is not None and stage.all_decode:
            group, stage.all_decode = group_of(pipe), False  # a later decode may be of one rank alone
        return ranks_of(group, args[0].device)

    def _forward(
        self, original: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> torch.Tensor | tuple:
        """Return the decoder's output: images, or a tuple of images and frames for the next call."""
        if not self.holders:
            return original(*args, **kwargs)
        alone = f"the {self.part} is called by itself" if _lists(kwargs) else None
        decode = self._current.decode if self._is_inside() else _Decode(self._backend, alone)
        form = _form(args, kwargs)
        if form not in decode.reasons:  # it is checked once in a decode
            decode.reasons[form] = self._why_not(module, args, kwargs)
            if decode.is_counted and decode.reasons[form] is None and not self._fits_twice(form, args[0], kwargs):
                corner = args[0][..., : args[0].shape[-2] // 2, : args[0].shape[-1] // 2].contiguous()
                self._tried(original, module, (corner, *args[1:]), kwargs, decode, form)
        reason = decode.given_up or decode.reasons[form]
        if decode.bands is not None:
            if decode.bands.is_agreed is None:  # its first call decides
                decode.bands.agree(self._shapes.get(decode.form, set()) if reason is None else set(), decode.form[:2])
            if decode.bands.is_agreed:
                self.remark = f"{FUSED}, shared by {decode.bands.ranks.count} ranks"
                return _contiguous(decode.bands.output(module, args, kwargs, decode.layers))
            decode.bands.shapes.add(tuple(args[0].shape))
        if reason is None and form not in self._known:
            return self._tried(original, module, args, kwargs, decode, form)
        reason = reason or self._known[form]
        if reason is None:
            try:
                output, self.remark = self._run(module, args, kwargs, decode.layers), FUSED
                return output
            except Exception as error:  # whatever memory, a compiler or a kernel raises: the decoder may still run
                reason = f"fused kernels raised {headline(error)}"
            if self._is_inside():
                raise _GivenUp(reason)  # frames that a decoder keeps have changed
        self.remark = f"{OWN} {self.part}: {reason}"
        return original(*args, **kwargs)

    def _fits_twice(self, form: tuple, x: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Return True unless memory suffices for comparing a corner only; raise a _ShortError if tiles are needed."""
        lists, is_compared = _lists(kwargs), form not in self._known
        follows = any(isinstance(item, torch.Tensor) for kept in lists.values() for item in kept)
        whole, fused = (peak * x[:, 0].numel() * x.element_size() for peak in self._page.PEAKS[-follows])
        needed = whole if self._known.get(form) or (is_compared and lists) else fused
        if x.device.type not in COUNTED or read_memory(x.device, empties=False).free >= whole:
            return True
        if (free := read_memory(x.device).free) < needed:
            StepGraphs.lend_all()
            if (free := read_memory(x.device).free) < needed:
                raise _ShortError(f"decoding takes {needed / GIB:.1f} GiB, and {free / GIB:.1f} are free")
        return free >= whole or not is_compared

    def _tried(
        self, original: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict, decode: _Decode, form: tuple
    ) -> torch.Tensor | tuple:
        """Return the output of the first call of a form, which decides about the later ones."""
        copied, named = pytree.tree_map(lambda leaf: leaf, (args, kwargs))  # decoders of videos keep frames in lists
        expected = original(*args, **kwargs)
        if not 0 < _images(expected).float().norm().item() < float("inf"):  # nothing to compare with
            self.remark = f"{OWN} {self.part}: its output is no image"
            return expected
        is_final = True
        try:
            output = self._run(module, copied, named, decode.layers)
            reason = _why_others((output, _lists(named)), (expected, _lists(kwargs)))
        except Exception as error:
            reason = f"fused kernels raised {headline(error)}"
            if isinstance(error, torch.OutOfMemoryError):  # it may fit in the next decode
                is_final = self._too_large.setdefault(form, decode.number) != decode.number
        if is_final:
            self._known[form] = reason
        self.remark = FUSED if reason is None else f"{OWN} {self.part}: {reason}"
        if reason is not None:
            return expected
        for name, kept in _lists(kwargs).items():
            kept[:] = named[name]
        return output

    def _run(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], layers: Layers) -> torch.Tensor | tuple:
        return _contiguous(getattr(self._page, self.method)(module, *args, **kwargs, layers=layers))

    def _has_kernels(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and (self._backend != "auto" or resolve_backend("auto", x) == "triton")

    def _is_inside(self) -> bool:
        return getattr(self._current, "decode", None) is not None

    def _why_not(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> str | None:
        """Return why the decoder's own forward must run, or None."""
        if not args or not isinstance(args[0], torch.Tensor):
            return f"the {self.part} gets no tensor"
        latents = args[0]
        if latents.dtype not in BOUNDS:
            return f"the {self.part} computes in {latents.dtype}"
        if not self._has_kernels(latents):
            return f"kernels need a CUDA GPU with Triton, and tensors are on '{latents.device}'"
        if torch.is_grad_enabled() or module.training:
            return f"gradients are on, or the {self.part} is in training mode"
        if torch.is_autocast_enabled(latents.device.type):
            return "autocast"
        if is_capturing() or torch.jit.is_tracing():  # a first call is compared, which waits for the GPU
            return "a graph is being captured or traced"
        try:
            inspect.signature(getattr(self._page, self.method)).bind(module, *args, **kwargs, layers=None)
        except TypeError as error:
            return f"the {self.part} gets other arguments: {error}"
        for name, part in module.named_modules():
            is_wide = type(part).__name__ in getattr(self._page, "FLOAT32", ())
            dtypes = (latents.dtype, torch.float32) if is_wide else (latents.dtype,)
            reason = _why_not_part(part, part is module, dtypes, latents.device) or why_unknown(self._page, part)
            if reason is not None:
                return f"{name or f'the {self.part}'} {reason}"
        return None


class FusedEncode(FusedDecode):
    """Encodes with fused kernels, in place of an autoencoder's encoder."""

    part = "encoder"
    method = "encode"


def _why_not_part(part: nn.Module, is_root: bool, dtypes: Collection[torch.dtype], device: torch.device) -> str | None:
    """Return why a module of the decoder, whose weights may have these dtypes, must be called, or None."""
    if is_compiled(part):
        return "is compiled"
    has_torch_hooks = not is_root and (part._forward_hooks or part._forward_pre_hooks)  # ours time the decoder itself
    if has_torch_hooks or hasattr(part, "_hf_hook") or hasattr(part, "_diffusers_hook"):
        return "has hooks"
    if not is_known_class(type(part), ("torch", "diffusers")) or not (is_root or runs_known_code(part)):
        return "is not the code of torch or diffusers"
    for name, weight in part._parameters.items():
        if weight is not None and (weight.dtype not in dtypes or weight.device != device):
            return f"has its {name} in {weight.dtype} on '{weight.device}'"
    return None


def _form(args: tuple, kwargs: dict[str, Any]) -> tuple:
    """Return everything about a call's arguments but the values of tensors."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    forms = ((item.shape, item.dtype, item.device) if isinstance(item, torch.Tensor) else item for item in leaves)
    return structure, *forms


def _images(output: torch.Tensor | tuple) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def _contiguous(output: torch.Tensor | tuple) -> torch.Tensor | tuple:
    return (output[0].contiguous(), *output[1:]) if isinstance(output, tuple) else output.contiguous()


def _why_other(output: torch.Tensor, expected: torch.Tensor) -> str | None:
    if output.shape != expected.shape or output.dtype != expected.dtype:
        ours, other = (f"{list(images.shape)} of {images.dtype}" for images in (output, expected))
        return f"fused kernels gave {ours}, the decoder {other}"
    error = ((output.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-12)).item()
    if error <= (bound := BOUNDS[expected.dtype]):
        return None
    return f"fused kernels differ from the decoder by {error:.2g}, more than {bound:g} in {expected.dtype}"


def _why_others(output: tuple, expected: tuple) -> str | None:
    """Return why an output and the lists of a call can't stand for the decoder's own, or None."""
    if (reason := _why_other(_images(output[0]), _images(expected[0]))) is not None:
        return reason
    # Compare what both keep for the next call in the same form; a page may keep fewer frames, or more.
    kept, known = dict(pytree.tree_leaves_with_path(output)), pytree.tree_leaves_with_path(expected)
    pairs = [(kept.get(place), leaf) for place, leaf in known if isinstance(leaf, torch.Tensor)]
    alike = (pair for pair in pairs if pair[0] is not None and pair[0].shape == pair[1].shape)
    reasons = (_why_other(ours.to(other.dtype), other) for ours, other in alike)
    return next((f"for the next call {reason}" for reason in reasons if reason is not None), None)


def _lists(kwargs: dict[str, Any]) -> dict[str, list]:
    """Return the arguments that a decoder changes."""
    return {name: item for name, item in kwargs.items() if isinstance(item, list)}


class Decoding:
    """Stage of one pipeline: fuses the decoder and the encoder of its autoencoder ``vae`` until it is closed.

    Unless it is ``wanted``, it only keeps how the decoder ran, for another pipeline may fuse it. If ``shared``, ranks
    that call the pipeline together share its decodes; ``all_decode`` = several ranks are calling, and all decode.
    """

    def __init__(self, pipe: Any, parts: CallParts, *, wanted: bool = True, shared: bool = True) -> None:
        self.parts = parts
        self.pipe = weakref.ref(pipe)
        self.all_decode = False
        self._watched = [weakref.ref(module) for module in _modules(pipe)]
        self._fused: list[FusedDecode] = []
        self._otherwise = OFF
        parts.remark_of[PART] = self._latest
        if shared:
            parts.at_beginning.append(self._begin)
        if not wanted or not self._watched:
            return
        autoencoder = _modules(pipe)[0]
        name = type(autoencoder).__name__
        if name not in PAGES:
            self._otherwise = f"{OWN} decoder: {name} is not known"
            return
        for kind in (FusedDecode, FusedEncode):
            if hasattr(PAGES[name], kind.method) and isinstance(getattr(autoencoder, kind.part, None), nn.Module):
                if (fused := kind.on(autoencoder)) is None:  # of another pipeline with the same autoencoder
                    fused = kind(autoencoder)
                else:
                    fused.holders += 1
                self._fused.append(fused)
                if shared and kind is FusedDecode:
                    fused.sharing.append(self)

    @property
    def remark(self) -> str | None:
        """Say how the pipeline's latest call decoded; None = it did not, or the pipeline has no autoencoder."""
        remark, modules = self.parts.remarks.get(PART), _modules(self.pipe())
        if remark is not None or not modules:
            return remark
        if [weakref.ref(module) for module in modules] != self._watched:
            return f"{OWN} decoder: it was replaced; call accelerate_pipeline(pipe) again"
        is_bypassed = "decode" in vars(modules[0]) or is_compiled(modules[1])
        return f"{OWN} decoder: its decode is replaced or compiled" if is_bypassed else None

    def _begin(self) -> None:
        can_share = any(item.can_share for item in self._fused)
        self.all_decode = all_decode(self.pipe(), self.parts.device, can_share=can_share)

    def _latest(self) -> str:
        fused = next(iter(self._fused), None) or FusedDecode.on(self._watched[0]())
        return self._otherwise if fused is None or fused.remark is None else fused.remark

    def close(self) -> None:
        """Give the autoencoder its own methods back, unless another pipeline wants the fused ones."""
        self.parts.remark_of.pop(PART, None)
        self.parts.at_beginning.clear()
        fused, self._fused = self._fused, []
        for coder in fused:
            coder.sharing = [other for other in coder.sharing if other is not self]
            coder.leave()


def _modules(pipe: Any) -> list[nn.Module]:
    """Return a pipeline's autoencoder, beneath torch.compile (its ``decode`` runs as it is), and its decoder."""
    autoencoder = getattr(pipe, "vae", None)
    autoencoder = getattr(autoencoder, "_orig_mod", autoencoder)
    decoder = getattr(autoencoder, "decoder", None)
    return [autoencoder, decoder] if isinstance(decoder, nn.Module) else []
