"""Keep prompt embeddings: a text encoder that gets the inputs of an earlier call returns a copy of its earlier output.

The entry of the encoder's calls is replaced (``_compiled_call_impl``, where ``module.compile()`` puts compiled code).
It lies above all hooks, so an encoder that accelerate offloads stays in host memory if its output is kept. The encoder
runs where its output could differ, under gradients, and where its code, hooks or inputs are not known.
"""

from __future__ import annotations

import copy
import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dit_accel.errors import headline
from dit_accel.loop.accounts import distinct_bytes
from dit_accel.loop.conditioning import PLAIN_TENSORS, version_of
from dit_accel.loop.timing import CallParts, Stopwatch, stopwatch_on
from dit_accel.loop.torch_modes import kernel_settings, watches_all_calls
from dit_accel.stages.stamps import PLAIN, read_stamp

ENTRY = "_compiled_call_impl"  # torch leaves it out of copies and pickles of a module
OFF = "by the text encoders: stages.prompts is false"
MOST_INPUT = 2**26  # bytes; reading larger inputs takes longer than some encoders
VALUES = frozenset([*PLAIN, torch.dtype, torch.device])


class KeptOutput:
    """Copy of a module's output.

    Args:
        tensors: all tensors in the output.
        on_host: keep the copy in host memory.
    """

    def __init__(self, output: Any, tensors: list[torch.Tensor], *, on_host: bool) -> None:
        self._devices = [tensor.device for tensor in tensors]
        host = torch.device("cpu")
        self._output, self._tensors = _copied(output, tensors, [host] * len(tensors) if on_host else self._devices)

    def copy(self) -> Any:
        """Return a new copy, on the devices of the module's output."""
        return _copied(self._output, self._tensors, self._devices)[0]


class PromptStore:
    """Kept outputs of the text encoders of a pipeline. It forgets the least recently used first.

    Args:
        most: bytes of all outputs together.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: OrderedDict[tuple, tuple[KeptOutput, int]] = OrderedDict()
        self._lock = threading.RLock()  # a collection of garbage inside may close a stage

    @property
    def size(self) -> int:
        """Bytes of all outputs."""
        return sum(size for _, size in list(self._kept.values()))

    def get(self, key: tuple) -> KeptOutput | None:
        """Return a kept output, or None."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: tuple, output: KeptOutput, size: int) -> None:
        """Keep an output of that many bytes."""
        with self._lock:
            self._kept[key] = output, size
            while self.size > self.most:
                self._kept.popitem(last=False)

    def forget(self, entry: Any = None) -> None:
        """Drop the outputs of one entry, or of all."""
        with self._lock:
            for key in [key for key in self._kept if entry is None or key[0] is entry]:
                del self._kept[key]


class KeepingEntry:
    """Entry of a text encoder that returns kept outputs. A copied or pickled encoder has its own entry.

    Attributes:
        stages: pipelines' stages that use the entry; replaced when these change, because other threads may iterate.
    """

    def __init__(self, encoder: nn.Module, store: PromptStore) -> None:
        self.stages: weakref.WeakSet[KeptPrompts] = weakref.WeakSet()
        self.store = store
        self._encoder = weakref.ref(encoder)
        self._replaced = vars(encoder).get(ENTRY)  # of compiled code
        self._latest: tuple = ()
        vars(encoder)[ENTRY] = self

    def leave(self, stage: KeptPrompts) -> None:
        """End a stage's use of the entry; the last one removes it."""
        self.stages = weakref.WeakSet(item for item in self.stages if item is not stage)
        encoder = self._encoder()
        if self.stages:
            return
        self.store.forget(self)
        if encoder is not None and vars(encoder).get(ENTRY) is self:
            del vars(encoder)[ENTRY]
            if self._replaced is not None:
                vars(encoder)[ENTRY] = self._replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the encoder's output."""
        encoder = self._encoder()
        run = encoder._call_impl if self._replaced is None else self._replaced
        stages = tuple(self.stages)
        if torch.compiler.is_compiling() or not stages:
            return run(*args, **kwargs)
        for stage in stages:
            stage.parts.notice()
        elapsed = {stage: stopwatch_on(stage.parts.device) for stage in stages}
        inputs = _Inputs(args, kwargs)
        found = self._find(encoder, inputs)
        if not isinstance(found, str) and (kept := found[1]) is not None:
            _offload_previous(encoder)
            for stage, stopwatch in elapsed.items():
                stage.note(self, elapsed=stopwatch)
            return kept
        output = run(*args, **kwargs)
        reason = found if isinstance(found, str) else self._keep(found[0], output, found[2])
        if reason is None and not inputs.is_same(_Inputs(args, kwargs)):
            self.store.forget(self)
            reason = "it writes to its inputs"
        for stage in elapsed:
            stage.note(self, reason)
        return output

    def _find(self, encoder: nn.Module, inputs: _Inputs) -> tuple[tuple, Any, bool] | str:
        """Return a call's key, the output kept for it or None, and if it belongs on the host; or why none is kept."""
        if (reason := _why_not_now() or inputs.reason) is not None:
            return reason
        try:
            stamp = read_stamp(encoder)
            if isinstance(stamp, str):
                return stamp
            latest = self._latest
            if stamp.key != latest:
                self.store.forget(self)
                self._latest = latest = stamp.key
            key = (self, latest, inputs.form, inputs.digest(), _modes(inputs.tensors))
            kept = self.store.get(key)
            return key, None if kept is None else kept.copy(), stamp.is_offloaded
        except Exception as error:  # of weights or inputs of an unknown kind, or of memory: the encoder may still run
            return f"reading it raised {headline(error)}"

    def _keep(self, key: tuple, output: Any, on_host: bool) -> str | None:
        """Keep an output; return why not, or None."""
        try:
            tensors = _tensors_in(output)
            if isinstance(tensors, str):
                return tensors
            size = distinct_bytes(tensors)
            if size > self.store.most:
                most = self.store.most / 2**20
                return f"its output has {size / 2**20:.3g} MiB, more than stages.prompts_mib allows ({most:.3g})"
            self.store.put(key, KeptOutput(output, tensors, on_host=on_host), size)
        except Exception as error:  # of memory or an unknown output
            return f"copying its output raised {type(error).__name__}"
        return None


class KeptPrompts:
    """Stage of one pipeline: keeps the outputs of its text encoders until it is closed.

    Args:
        pipe: pipeline with components ``text_encoder``, ``text_encoder_2``, …, or without.
        most: bytes of all kept outputs.
    """

    def __init__(self, pipe: Any, parts: CallParts, most: int) -> None:
        self._pipe, self.parts = weakref.ref(pipe), parts
        self._store = PromptStore(most)
        self._entries: dict[str, KeepingEntry] = {}
        self._begun = 0
        self._calls: list[tuple[str, str | None, bool]] = []  # name of the encoder, why not kept, is kept
        for name, encoder in text_encoders(pipe):
            entry = vars(encoder).get(ENTRY)  # of another pipeline with the same encoder
            self._entries[name] = entry if isinstance(entry, KeepingEntry) else KeepingEntry(encoder, self._store)
            self._entries[name].stages = weakref.WeakSet([*self._entries[name].stages, self])

    def note(self, entry: KeepingEntry, reason: str | None = None, *, elapsed: Stopwatch | None = None) -> None:
        """Record a call of an encoder.

        Args:
            reason: why its output is not kept, or None.
            elapsed: of a call that returned a kept output.
        """
        name = next((name for name, item in self._entries.items() if item is entry), "")
        if self._begun != self.parts.begun:
            self._begun, self._calls = self.parts.begun, []
        self._calls.append((name, reason, elapsed is not None))
        if elapsed is not None:  # otherwise the encoder's own hooks measure
            self.parts.enter(name, elapsed)
            self.parts.leave()

    @property
    def remark(self) -> str | None:
        """Say how many calls of text encoders the latest run saved; None = there was none."""
        pipe = self._pipe()
        for name, encoder in text_encoders(pipe) if pipe is not None else ():
            if name in self._entries and vars(encoder).get(ENTRY) is not self._entries[name]:
                return (
                    f"by the text encoders: pipe.{name} was replaced or compiled; call accelerate_pipeline(pipe) again"
                )
        calls = self._calls if self._begun == self.parts.begun else []
        if not calls:
            return None
        reasons = dict.fromkeys(f"{name}: {reason}" for name, reason, _ in calls if reason is not None)
        return "; ".join([f"{sum(kept for *_, kept in calls)} of {len(calls)} kept from earlier calls", *reasons])

    @property
    def size(self) -> int:
        """Bytes of the kept outputs."""
        return self._store.size

    def forget(self) -> None:
        """Drop all kept outputs."""
        for entry in self._entries.values():
            entry.store.forget(entry)

    def close(self) -> None:
        """Give the encoders their own entries back, unless another pipeline uses ours; twice does nothing."""
        entries, self._entries = self._entries, {}
        for entry in entries.values():
            entry.leave(self)


def text_encoders(pipe: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the text encoders of a pipeline, each once, with their names."""
    seen: set[int] = set()
    for name, component in vars(pipe).items():
        if name.startswith("text_encoder") and isinstance(component, nn.Module) and id(component) not in seen:
            seen.add(id(component))
            yield name, component


class _Inputs:
    """The arguments of a call.

    Attributes:
        form: all but the values of tensors.
        tensors: all tensors.
        reason: why the arguments can't be compared with later ones, or None.
    """

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
        found = hashlib.blake2b(digest_size=32)
        for tensor in self.tensors:
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return found.digest()

    def is_same(self, other: _Inputs) -> bool:
        """Return True if another reading of the same arguments shows no write to them."""
        return self.form == other.form and self._versions == other._versions


def _why_not_now() -> str | None:
    """Return why encoders must run in this state of torch, or None."""
    if torch.is_grad_enabled():
        return "gradients are on"
    if watches_all_calls():
        return "torch watches all modules or operations"
    is_capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return "it is captured as a CUDA graph" if is_capturing else None


def _modes(tensors: list[torch.Tensor]) -> tuple:
    """Return the settings of torch that change outputs, and the streams: a copy waits for no other stream."""
    kinds = sorted({"cpu", "cuda", *(tensor.device.type for tensor in tensors)})
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    streams = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return (
        *autocast,
        *kernel_settings(),
        *(torch.cuda.current_stream(device).cuda_stream for device in range(streams)),
    )


def _tensors_in(output: Any) -> list[torch.Tensor] | str:
    """Return all tensors of an output, each once, or why it can't be copied."""
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
                return "its output has gradients"
            found[id(value)] = value
        elif isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, (list, tuple)):
            pending += value
        elif type(value).__module__.startswith("transformers.") and not isinstance(value, nn.Module):
            pending += vars(value).values()  # caches of keys and values
        else:
            return f"its output holds a {type(value).__name__}"
    return list(found.values())


@torch.no_grad()
def _copied(output: Any, tensors: list[torch.Tensor], devices: list[torch.device]) -> tuple[Any, list[torch.Tensor]]:
    """Return a copy of an output and the tensors in it; views of one storage stay views of one storage.

    Args:
        tensors: all tensors in the output.
        devices: of the copies, one for each tensor.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    copies = []
    for tensor, device in zip(tensors, devices, strict=True):
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = torch.UntypedStorage(storage.nbytes(), device=device).copy_(storage)
        result = torch.empty(0, dtype=tensor.dtype, device=device)
        copies.append(result.set_(storages[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride()))
    memo = {id(tensor): result for tensor, result in zip(tensors, copies, strict=True)}
    return copy.deepcopy(output, memo), copies


def _offload_previous(encoder: nn.Module) -> None:
    """Offload the model that ran before the encoder, which accelerate does when the encoder itself runs."""
    hook = vars(encoder).get("_hf_hook")
    for item in getattr(hook, "hooks", (hook,)):
        if (previous := getattr(item, "prev_module_hook", None)) is not None:
            previous.offload()
