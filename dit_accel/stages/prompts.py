"""Keep embeddings of prompts and input images: an encoder that gets the inputs of an earlier call returns a copy.

The entry of the encoder's calls is replaced (``_compiled_call_impl``, where ``module.compile()`` puts compiled code),
or an autoencoder's ``encode``, which returns a distribution to draw from. It lies above all hooks, so an encoder that
is offloaded stays in host memory if its output is kept. The encoder runs where its code, inputs or output may differ.
"""

from __future__ import annotations

import copy
import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from dit_accel.errors import headline
from dit_accel.kernels.kept import is_capturing
from dit_accel.loop.accounts import distinct_bytes
from dit_accel.loop.conditioning import PLAIN_TENSORS, version_of
from dit_accel.loop.timing import CallParts, Stopwatch, stopwatch_on
from dit_accel.loop.torch_modes import kernel_settings, watches_all_calls
from dit_accel.models.stand_in import StandIn
from dit_accel.stages.stamps import PLAIN, read_stamp

ENTRY = "_compiled_call_impl"  # torch leaves it out of copies and pickles of a module
ENTRIES = {"text_encoder": ENTRY, "image_encoder": ENTRY, "vae": "encode"}  # by the beginning of a component's name
OFF = "by the encoders: stages.prompts is false"
MOST_INPUT = 2**29  # bytes; reading larger inputs takes longer than some encoders
VALUES = frozenset([*PLAIN, torch.dtype, torch.device])


class _NotKept(Exception):
    """An output can't be kept; the message is the reason."""


class PromptStore:
    """Kept outputs of the encoders of a pipeline, ``most`` bytes together. The least recently used goes first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: OrderedDict[tuple, tuple[Any, int]] = OrderedDict()
        self._lock = threading.RLock()  # a collection of garbage inside may close a stage

    @property
    def size(self) -> int:
        return sum(size for _, size in list(self._kept.values()))

    def get(self, key: tuple) -> Any:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key, (None,))[0]

    def put(self, key: tuple, output: Any, size: int) -> None:
        with self._lock:
            self._kept[key] = output, size
            while self.size > self.most:
                self._kept.popitem(last=False)

    def forget(self, entry: Any) -> None:
        with self._lock:
            self._kept = OrderedDict(item for item in self._kept.items() if item[0][0] is not entry)


class KeepingEntry:
    """Entry of an encoder's calls, which returns kept outputs while ``stages`` of pipelines use it."""

    def __init__(self, encoder: nn.Module, entry: str, store: PromptStore) -> None:
        self.stages: tuple[KeptPrompts, ...] = ()
        self.store = store
        self._latest: tuple = ()
        self._is_own = entry == ENTRY or entry not in vars(encoder)
        self._stand_in = StandIn(encoder, entry, self._call)

    def leave(self, stage: KeptPrompts) -> None:
        self.stages = tuple(item for item in self.stages if item is not stage)
        if not self.stages:
            self.store.forget(self)
            self._stand_in.leave()

    def _call(self, run: Callable[..., Any], encoder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        stages, key, reason = self.stages, None, None
        if not stages:
            return run(*args, **kwargs)
        for stage in stages:
            stage.parts.notice()
        elapsed = [stopwatch_on(stage.parts.device) for stage in stages]
        inputs, kept = _Inputs(args, kwargs), None
        try:
            key, is_offloaded = self._key(encoder, inputs)
            kept = (stored := self.store.get(key)) and _copied(*stored)
        except _NotKept as error:
            reason = str(error)
        except Exception as error:  # of weights or inputs of an unknown kind, or of memory: the encoder may still run
            reason = f"reading it raised {headline(error)}"
        if kept is not None:
            _offload_previous(encoder)
            for stage, stopwatch in zip(stages, elapsed, strict=True):
                stage.note(self, elapsed=stopwatch)
            return kept[0]
        drawn, output = None if reason else _random_states(), run(*args, **kwargs)
        if reason is None:
            is_drawn = drawn != _random_states()
            reason = "it draws random numbers" if is_drawn else self._keep(key, output, on_host=is_offloaded)
        if reason is None and not inputs.is_same(_Inputs(args, kwargs)):
            self.store.forget(self)
            reason = "it writes to its inputs"
        for stage in stages:
            stage.note(self, reason)
        return output

    def _key(self, encoder: nn.Module, inputs: _Inputs) -> tuple[tuple, bool]:
        """Return a key that is equal for calls with equal outputs, and True if these belong into host memory."""
        if (reason := _why_not_now() or inputs.reason) is not None:
            raise _NotKept(reason)
        if not self._is_own or not isinstance(vars(encoder).get("_encode"), StandIn | None):
            raise _NotKept("its encode is not its class's own")
        stamp = read_stamp(encoder)
        if isinstance(stamp, str):
            raise _NotKept(stamp)
        if stamp.key != self._latest:
            self.store.forget(self)
            self._latest = stamp.key
        return (self, stamp.key, inputs.form, inputs.digest(), _modes(inputs.tensors)), stamp.is_offloaded

    def _keep(self, key: tuple, output: Any, *, on_host: bool) -> str | None:
        try:
            tensors = _tensors_in(output)
            size = distinct_bytes(tensors)
            if size > self.store.most:
                return f"its output has {size / 2**20:.3g} MiB, more than stages.prompts_mib allows"
            devices = [tensor.device for tensor in tensors]
            copied = _copied(output, tensors, [torch.device("cpu")] * len(tensors) if on_host else devices)
            self.store.put(key, (*copied, devices), size)
        except _NotKept as error:
            return str(error)
        except Exception as error:  # of memory or an unknown output
            return f"copying its output raised {type(error).__name__}"
        return None


class KeptPrompts:
    """Stage of one pipeline: keeps up to ``most`` bytes of outputs of its encoders until it is closed."""

    def __init__(self, pipe: Any, parts: CallParts, most: int) -> None:
        self._pipe, self.parts = weakref.ref(pipe), parts
        self._store = PromptStore(most)
        self._entries: dict[str, KeepingEntry] = {}
        self._begun = 0
        self._calls: list[tuple[str, str | None, bool]] = []  # name of the encoder, why not kept, is kept
        for name, encoder, method, other in encoders(pipe):
            entry = other or KeepingEntry(encoder, method, self._store)  # the other is another pipeline's
            entry.stages = (*entry.stages, self)
            self._entries[name] = entry

    def note(self, entry: KeepingEntry, reason: str | None = None, *, elapsed: Stopwatch | None = None) -> None:
        """Record a call of an encoder: why its output is not kept, or the time of a call that returned a kept one."""
        name = next((name for name, item in self._entries.items() if item is entry), "")
        if self._begun != self.parts.begun:
            self._begun, self._calls = self.parts.begun, []
        self._calls.append((name, reason, elapsed is not None))
        if elapsed is not None:  # otherwise the encoder's own hooks measure
            self.parts.enter("vae.encoder" if name == "vae" else name, elapsed)
            self.parts.leave()

    @property
    def remark(self) -> str | None:
        """Say how many calls of encoders the latest run saved; None = there was none."""
        pipe = self._pipe()
        for name, *_, entry in encoders(pipe) if pipe is not None else ():
            if name in self._entries and entry is not self._entries[name]:
                return f"by the encoders: pipe.{name} was replaced or compiled; call accelerate_pipeline(pipe) again"
        if not (calls := self._calls if self._begun == self.parts.begun else []):
            return None
        reasons = dict.fromkeys(f"{name}: {reason}" for name, reason, _ in calls if reason is not None)
        return "; ".join([f"{sum(kept for *_, kept in calls)} of {len(calls)} kept from earlier calls", *reasons])

    def forget(self) -> None:
        for entry in self._entries.values():
            entry.store.forget(entry)

    def close(self) -> None:
        """Give the encoders their own entries back, unless another pipeline uses ours; twice does nothing."""
        entries, self._entries = self._entries, {}
        for entry in entries.values():
            entry.leave(self)


def encoders(pipe: Any) -> Iterator[tuple[str, nn.Module, str, KeepingEntry | None]]:
    """Yield the encoders of a pipeline, each once, with their names, and the method and entry of their calls."""
    seen: set[int] = set()
    for name, component in vars(pipe).items():
        method = next((method for start, method in ENTRIES.items() if name.startswith(start)), "")
        if isinstance(component, nn.Module) and hasattr(type(component), method) and id(component) not in seen:
            seen.add(id(component))
            yield name, component, method, getattr(vars(component).get(method), "owner", None)


class _Inputs:
    """Arguments of a call: all tensors, the ``form`` of the rest, and the reason if they can't be compared."""

    def __init__(self, args: tuple, kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.reason: str | None = None
        self.form = (self._form(args), self._form(kwargs))
        self._versions = [version_of(tensor) for tensor in self.tensors]
        if sum(tensor.nbytes for tensor in self.tensors) > MOST_INPUT:
            self.reason = f"its inputs have more than {MOST_INPUT / 2**20:.0f} MiB"

    def _form(self, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN_TENSORS and value.layout is torch.strided and not value.is_nested:
            self.tensors.append(value)
            return value.shape, value.stride(), value.dtype, value.device
        if kind in (list, tuple):
            return kind, *map(self._form, value)
        if kind is dict:
            return kind, *value, *map(self._form, value.values())
        if kind in VALUES:
            return kind, repr(value)
        self.reason = f"an input is a {kind.__name__}"
        return kind

    def digest(self) -> bytes:
        """Return a digest of all values; waits for the GPU."""
        digest = hashlib.blake2b(digest_size=32)
        for tensor in self.tensors:
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.digest()

    def is_same(self, other: _Inputs) -> bool:
        """Return True if another reading of the same arguments shows no write to them."""
        return self.form == other.form and self._versions == other._versions


def _why_not_now() -> str | None:
    if torch.is_grad_enabled():
        return "gradients are on"
    if watches_all_calls():
        return "torch watches all modules or operations"
    return "it is captured as a CUDA graph" if is_capturing() else None


def _modes(tensors: list[torch.Tensor]) -> tuple:
    """Return the settings of torch that change outputs, and the streams: a copy waits for no other stream."""
    kinds = sorted({"cpu", "cuda", *(tensor.device.type for tensor in tensors)})
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    devices = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    streams = (torch.cuda.current_stream(device).cuda_stream for device in range(devices))
    return *autocast, *kernel_settings(), *streams


def _random_states() -> list[bytes]:
    """Return the states of the generators from which a module draws if it gets none."""
    return [item.get_state().numpy().tobytes() for item in (torch.default_generator, *torch.cuda.default_generators)]


def _tensors_in(output: Any) -> list[torch.Tensor]:
    """Return all tensors of an output, each once."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    pending = [output]
    while pending:
        value = pending.pop()
        if type(value) in VALUES or isinstance(value, type) or id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) in PLAIN_TENSORS:
            if value.requires_grad:
                raise _NotKept("its output has gradients")
            found[id(value)] = value
        elif isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, (list, tuple)):
            pending += value
        elif type(value).__module__.startswith(("transformers.", "diffusers.")) and not isinstance(value, nn.Module):
            pending += vars(value).values()  # caches of keys and values, and distributions
        else:
            raise _NotKept(f"its output holds a {type(value).__name__}")
    return list(found.values())


@torch.no_grad()
def _copied(output: Any, tensors: list[torch.Tensor], devices: list[torch.device]) -> tuple[Any, list[torch.Tensor]]:
    """Return copies of an output and of its tensors on other devices, with their strides and shared storages."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies = []
    for tensor, device in zip(tensors, devices, strict=True):
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = torch.UntypedStorage(storage.nbytes(), device=device).copy_(storage)
        form = tensor.storage_offset(), tensor.shape, tensor.stride()
        copies.append(torch.empty(0, dtype=tensor.dtype, device=device).set_(storages[storage._cdata], *form))
    return copy.deepcopy(output, {id(tensor): copied for tensor, copied in zip(tensors, copies, strict=True)}), copies


def _offload_previous(encoder: nn.Module) -> None:
    """Offload the model that ran before the encoder, which accelerate does when the encoder itself runs."""
    hook = vars(encoder).get("_hf_hook")
    for item in getattr(hook, "hooks", (hook,)):
        if (previous := getattr(item, "prev_module_hook", None)) is not None:
            previous.offload()
