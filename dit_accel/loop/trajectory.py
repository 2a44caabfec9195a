"""Detect that latents were replaced between two steps, by a callback or by a pipeline that pastes into them.

Outputs at other latents can't be forecast from earlier ones, and a correction would take the replacement for a forecast
error, so the loop drops its records.

A step of a scheduler combines the latest latents and outputs. Only the coefficients depend on the scheduler and on
guidance; they are fitted here. The rest of the change of the latents is an edit. Many pipelines edit at every step:
they paste, blend, clamp or add noise. A replacement is an edit that changes the outputs of some region by more than
FELT of their norm, and that exceeds the edits of the steps before by more than SUDDEN.

The fit reads a few thousand entries of each tensor on the host, which waits for the device once a step.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

FELT = 0.1  # replacing a tenth of the tokens: 0.6 and more; edits at every step, as far as measured: 0.05 and less
SUDDEN = 3.0
LATEST = 2  # steps whose latents and outputs are combined, and whose edits count
REGIONS = 64  # of equal numbers of entries, in the order of memory
ENTRIES = 32  # read of each region
MOST_RESPONSE = 5.0  # bound on the change of an output per shift of the latents, which is overrated near pure noise
RIDGE, TINY = 1e-9, 1e-30  # make the fit solvable if outputs are equal, or zero


@dataclass
class _Stream:
    """Latents of one output of the transformer, and the outputs of a step's calls, as samples ``[B, entries]``.

    Args:
        latents: the latents.
        shared: part of the latents that the outputs cover; empty = no output is known yet.
        tensors: samples of the latents and the outputs, on the device.
    """

    latents: torch.Tensor
    shared: tuple[slice, ...] = ()
    tensors: list[torch.Tensor] = field(default_factory=list)

    def add(self, output: torch.Tensor) -> None:
        """Add a call's output, unless it has another form than the latents or the first output."""
        if output.ndim != self.latents.ndim:
            return
        if not self.shared:
            # Latents with reference tokens, masks or images, and outputs with variances, begin with what they share.
            self.shared = tuple(map(slice, map(min, self.latents.shape, output.shape)))
            self.tensors = [self.sample(self.latents)]
        if (sample := self.sample(output)).shape == self.tensors[0].shape:
            self.tensors.append(sample)

    def sample(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return evenly spaced entries of a tensor, float32 ``[B, entries]``, as a copy."""
        flat = tensor.detach()[self.shared].flatten(1)
        stride = flat.shape[1] // (REGIONS * ENTRIES) | 1  # odd, so that it meets all channels
        entries = flat[:, ::stride]
        whole = entries.shape[1] // REGIONS * REGIONS
        return (entries[:, :whole] if whole else entries).to(torch.float32, copy=True)


class Trajectory:
    """Latents and outputs of the latest steps of a run."""

    def __init__(self) -> None:
        self._step = -1
        self._latest: list[_Stream] = []
        self._earlier: deque[list[np.ndarray]] = deque(maxlen=LATEST)  # newest first; [1 + calls, B, entries] a stream
        self._edits: deque[float] = deque(maxlen=LATEST)

    def is_replaced(self, step: int, latents: Sequence[torch.Tensor], response: float) -> bool:
        """Record the latents of a step, and return True if they were replaced since the step before.

        Args:
            latents: latents ``[B, …]`` of the step's first call, one tensor for each output that has some.
            response: change of the outputs per shift of the latents (:func:`~dit_accel.loop.growth.responses`).
        """
        known, self._latest = self._latest, [_Stream(each) for each in latents]
        shapes = [each.latents.shape for each in known if len(each.tensors) > 1]
        follows = step == self._step + 1 and len(latents) > 0 and shapes == [each.shape for each in latents]
        self._step = step
        if not follows:
            self._earlier.clear()
            self._edits.clear()
            return False
        for before, now in zip(known, self._latest, strict=True):
            now.shared = before.shared
            now.tensors = [now.sample(now.latents)]
        host = _on_host([[*now.tensors, *before.tensors] for before, now in zip(known, self._latest, strict=True)])
        self._earlier.appendleft([stream[1:] for stream in host])
        edit = max(_edit(now, [each[place] for each in self._earlier]) for place, (now, *_) in enumerate(host))
        edit *= min(abs(response), MOST_RESPONSE)
        usual = max(self._edits, default=edit)
        self._edits.append(edit)
        return edit > max(FELT, SUDDEN * usual)

    def leave(self, outputs: Sequence[torch.Tensor]) -> None:
        """Record the outputs ``[B, …]`` of a call of the step, with which the pipeline continues."""
        for stream, output in zip(self._latest, outputs, strict=False):
            stream.add(output)


def _on_host(streams: Sequence[Sequence[torch.Tensor]]) -> list[np.ndarray]:
    """Return the samples of each stream, float64 ``[tensors, B, entries]``; all are copied at once."""
    sizes = [len(stream) * stream[0].numel() for stream in streams]
    flat = torch.cat([each.view(-1) for stream in streams for each in stream]).cpu().double().split(sizes)
    return [part.view(len(stream), *stream[0].shape).numpy() for part, stream in zip(flat, streams, strict=True)]


def _edit(now: np.ndarray, earlier: Sequence[np.ndarray]) -> float:
    """Return the largest edit of a region, relative to the outputs.

    Args:
        now: latents ``[B, entries]``.
        earlier: latents and outputs of the steps before, newest first, ``[1 + calls, B, entries]`` each.
    """
    change, worst = now - earlier[0][0], 0.0
    # Unchanged entries, such as those of reference tokens, are no edits.
    combined = np.concatenate(earlier) * (change != 0)
    for rows in _equal_rows(now):
        own, basis = change[rows[0]], combined[:, rows].reshape(-1, now.shape[1])
        gram = basis @ basis.T
        gram.flat[:: len(gram) + 1] += RIDGE * gram.trace() + TINY
        missed = own - np.linalg.solve(gram, basis @ own) @ basis
        regions = (missed * missed).reshape(min(REGIONS, len(missed)), -1)
        output = earlier[0][1, rows[0]]
        worst = max(worst, float(regions.mean(axis=1).max() / (output @ output / len(output))))
    return worst**0.5


def _equal_rows(latents: np.ndarray) -> list[list[int]]:
    """Return the samples of a batch in groups of equal latents: one sample in all parts of guidance."""
    groups = defaultdict(list)
    if len(latents) == 1:
        return [[0]]
    for row, values in enumerate(latents):
        groups[values.tobytes()].append(row)
    return list(groups.values())
