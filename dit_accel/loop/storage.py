"""Storage of recorded tensors: unchanged, as float8 with block scales, in host memory, or without some rows.

    kept = Storage(float8=True, offload=True).keep(tensor)
    kept.fetch()          # optional: starts the copy back to the device
    tensor = kept.read()  # original shape, dtype and device

Do not write to a tensor after it was kept.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F

from dit_accel.loop.forecast import History

SCALED_VALUES = 128  # consecutive values that share a float32 scale
FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0
SMALLEST_SCALE = 1e-30  # scale of a line of zeros


@dataclass(frozen=True)
class Storage:
    """Storage form of tensors."""

    float8: bool = False  # e4m3 with one float32 scale per 128 consecutive values; the relative error is 2.6% (rms)
    offload: bool = False  # pinned host memory, copied on a separate stream; tensors on a CPU stay there
    # tokens ``start, stop`` of ``[B, S, …]`` that will be read, None = all; the others are undefined after a read
    rows: tuple[int, int] | None = None
    stacked: bool = False  # tensors are stacks ``[M, …]`` of similar values; see :class:`StoredFloat8Stack`

    def keep(self, tensor: torch.Tensor) -> StoredTensor:
        return StoredRows(tensor, slice(*self.rows), self._keep_whole) if self.rows else self._keep_whole(tensor)

    def _keep_whole(self, tensor: torch.Tensor) -> StoredTensor:
        form = (StoredFloat8Stack if self.stacked else StoredFloat8) if self.float8 else StoredTensor
        kept = form(tensor)
        return StoredOnHost(kept) if self.offload else kept

    def bytes(self, elements: int, itemsize: int) -> int:
        """Return the bytes of this number of elements; the caller leaves out elements outside of ``rows``."""
        return elements + 4 * math.ceil(elements / SCALED_VALUES) if self.float8 else elements * itemsize


PLAIN = Storage()


class StoredTensor:
    """A tensor that is stored unchanged; base class of the other forms. ``parts`` are the tensors that hold it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.parts: tuple[torch.Tensor, ...] = (tensor,)

    def decode(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor from its parts on the device."""
        return parts[0]

    def fetch(self) -> None:
        """Start to copy the parts to the device, for a later :meth:`read`."""

    def read(self) -> torch.Tensor:
        return self.decode(self.parts)

    def tensors(self) -> Sequence[torch.Tensor]:
        """Return its tensors on the device."""
        return self.parts

    def host_tensors(self) -> Sequence[torch.Tensor]:
        """Return its tensors in host memory."""
        return ()


class StoredFloat8(StoredTensor):
    """e4m3 ``[n, 128]``, padded with zeros, and scales ``[n, 1]`` that map each line's largest value to 448."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._shape, self._dtype = tensor.shape, tensor.dtype
        values = tensor.flatten()
        if values.numel() % SCALED_VALUES:
            values = F.pad(values, (0, -values.numel() % SCALED_VALUES))
        lines = values.view(-1, SCALED_VALUES)
        scale = (lines.abs().amax(1, keepdim=True).float() / FLOAT8_MAX).clamp(min=SMALLEST_SCALE)
        self.parts = ((lines / scale).to(FLOAT8), scale)

    def decode(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        lines, scale = parts
        # e4m3 is exact in the tensor's own dtype; the product is rounded once and needs no float32 copy on a GPU.
        return lines.to(self._dtype).mul_(scale).flatten()[: self._shape.numel()].view(self._shape)


class StoredFloat8Stack(StoredFloat8):
    """The first value of a stack ``[M, …]``, and the differences of the others from it.

    The differences are small, and because the weights of a forecast sum to 1 the rounding error of the first value
    counts once: on a tiny FLUX the result changes by a third of the change with each value stored separately.
    """

    def __init__(self, stack: torch.Tensor) -> None:
        differences = stack - stack[:1]
        differences[0] = stack[0]
        super().__init__(differences)

    def decode(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        stack = super().decode(parts)
        stack[1:] += stack[0]
        return stack


class StoredRows(StoredTensor):
    """Some tokens of a tensor ``[B, S, …]``, which ``keep`` stores in another form."""

    def __init__(self, tensor: torch.Tensor, rows: slice, keep: Callable[[torch.Tensor], StoredTensor]) -> None:
        self._shape, self._rows = tensor.shape, rows
        self._kept = keep(tensor[:, self._rows].clone())  # a view would keep all rows

    def fetch(self) -> None:
        self._kept.fetch()

    def read(self) -> torch.Tensor:
        rows = self._kept.read()
        tensor = rows.new_empty(self._shape)
        tensor[:, self._rows] = rows
        return tensor

    def tensors(self) -> Sequence[torch.Tensor]:
        return self._kept.tensors()

    def host_tensors(self) -> Sequence[torch.Tensor]:
        return self._kept.host_tensors()


class StoredOnHost(StoredTensor):
    """The parts of another form in pinned host memory; parts on a CPU stay as they are.

    Copies overlap the computation, on one separate stream. All device memory belongs to the computation's stream, which
    waits for a copy before it uses that memory again. (``record_stream`` would free the memory only when the GPU
    reaches that point. The host runs far ahead, so it would meanwhile allocate memory for all layers.)
    """

    _arriving: tuple[torch.Tensor, ...] | None = None
    _leaving: tuple[torch.Tensor, ...] | None = None

    def __init__(self, kept: StoredTensor) -> None:
        self._kept, self._device = kept, kept.parts[0].device
        if self._device.type == "cuda":
            self._leaving, copies = kept.parts, _copies(self._device)
            kept.parts = tuple(empty_on_host(part.shape, part.dtype) for part in self._leaving)
            self._copied = copies.run(self._leaving, kept.parts)
            copies.let_go(self)

    def fetch(self) -> None:
        if self._device.type == "cuda" and self._arriving is None:
            self._arriving = tuple(torch.empty_like(part, device=self._device) for part in self._kept.parts)
            self._copied = _copies(self._device).run(self._kept.parts, self._arriving)

    def read(self) -> torch.Tensor:
        self.fetch()
        parts = self._arriving or self._kept.parts
        self.wait()
        return self._kept.decode(parts)

    def wait(self) -> None:
        """Make the computation wait for this tensor's copies, and free their device memory."""
        if self._arriving is not None or self._leaving is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._arriving = self._leaving = None

    def __del__(self) -> None:
        self.wait()  # if a run ends early, a copy may still be writing

    def tensors(self) -> Sequence[torch.Tensor]:
        return ()

    def host_tensors(self) -> Sequence[torch.Tensor]:
        return self._kept.parts


def empty_on_host(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an empty tensor in pinned memory; where none can be pinned, in pageable memory, whose copies wait."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError:  # little host memory, or a container's limit
        return torch.empty(shape, dtype=dtype)


class StoredHistory(History):
    """History whose values are kept in a storage form. Reading restores them, one history at a time."""

    def __init__(self, length: int, storage: Storage = PLAIN) -> None:
        super().__init__(length)
        self._storage = storage

    def record(self, coordinate: float, value: tuple[torch.Tensor, ...]) -> None:
        if self._length:
            super().record(coordinate, tuple([self._storage.keep(tensor) for tensor in value]))  # type: ignore[misc]

    @property
    def values(self) -> tuple[tuple[torch.Tensor, ...], ...]:
        return tuple([tuple([kept.read() for kept in value]) for value in self.records])

    def adopt(self, length: int, storage: Storage) -> None:
        """Change the length and the storage form, and convert the existing values."""
        self.shorten(length)
        if storage != self._storage:
            self.records = tuple([tuple([storage.keep(part.read()) for part in value]) for value in self.records])
        self._storage = storage

    def fetch(self) -> None:
        """Start to copy values from host memory to the device, before they are read."""
        for kept in chain.from_iterable(self.records):
            kept.fetch()

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for kept in chain.from_iterable(self.records) for tensor in kept.tensors()]

    def host_tensors(self) -> list[torch.Tensor]:
        """Return the tensors in host memory."""
        return [tensor for kept in chain.from_iterable(self.records) for tensor in kept.host_tensors()]


class _Copies:
    """Stream of one device's copies to and from host memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._latest: Callable[[], StoredOnHost | None] = lambda: None

    def run(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> torch.cuda.Event:
        """Copy after all kernels launched so far; return an event for the end of the copies."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def let_go(self, kept: StoredOnHost) -> None:
        """Register a tensor that leaves the device, and free the device memory of the previous one."""
        if (previous := self._latest()) is not None:
            previous.wait()
        self._latest = weakref.ref(kept)


_copies = functools.cache(_Copies)  # of a device
