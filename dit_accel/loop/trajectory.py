"""Detect that latents were replaced between two steps, by a callback or by a pipeline that pastes into them.

Outputs at other latents can't be forecast from earlier ones, nor be corrected for, so the loop drops its records.

A step of a scheduler combines the latest latents and outputs. Only the coefficients depend on the scheduler and on
guidance; they are fitted here. The rest of the change of the latents is an edit. Many pipelines edit at every step:
they paste, blend, clamp or add noise. A replacement is an edit that changes the outputs of some region by more than
FELT of their norm, and that exceeds the edits of the steps before by more than SUDDEN.

The fit reads a few thousand entries of each tensor on the host, which waits for the device once a step.
"""

from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np
import torch

FELT = 0.1  # replacing a tenth of the tokens: 0.6 and more; edits at every step, as far as measured: 0.05 and less
SUDDEN = 3.0
LATEST = 2  # steps whose latents and outputs are combined, and whose edits count
REGIONS = 64  # of equal numbers of entries, in the order of memory
ENTRIES = 32  # read of each region
MOST_RESPONSE = 5.0  # bound on the change of an output per shift of the latents, which is overrated near pure noise
RIDGE, TINY = 1e-9, 1e-30  # make the fit solvable if outputs are equal, or zero


class Trajectory:
    """Latents and outputs of the latest steps of a run; one :class:`LatentStream` for each output that has latents."""

    def __init__(self) -> None:
        self._step = -1
        self._streams: list[LatentStream] = []

    def is_replaced(self, step: int, latents: Sequence[torch.Tensor], response: float) -> bool:
        """Record the latents of a step's first call, and return True if they were replaced since the step before.

        Args:
            latents: latents ``[B, …]`` of a call, one tensor for each output that has some.
            response: change of the outputs per shift of the latents (:func:`~dit_accel.loop.growth.responses`).
        """
        if step == self._step:
            return False
        follows = step == self._step + 1 and [item.shape for item in self._streams] == [item.shape for item in latents]
        self._step = step
        if not follows:
            self._streams = [LatentStream(tensor) for tensor in latents]
            return False
        found = [stream.is_replaced(tensor, response) for stream, tensor in zip(self._streams, latents, strict=True)]
        return any(found)

    def leave(self, outputs: Sequence[torch.Tensor]) -> None:
        """Record the outputs ``[B, …]`` of a call of the step, with which the pipeline continues."""
        for stream, output in zip(self._streams, outputs, strict=False):
            stream.add(output)


class LatentStream:
    """Latents of one output of the transformer, and the outputs of a step's calls, as samples ``[B, entries]``."""

    def __init__(self, latents: torch.Tensor) -> None:
        self._latents = latents
        self._shared: tuple[slice, ...] = ()  # part of the latents that the outputs cover; empty = no output is known
        self._samples: list[torch.Tensor] = []  # of the step's latents, then of its outputs, on the device
        self._earlier: deque[np.ndarray] = deque(maxlen=LATEST)  # samples on the host, newest first
        self._edits: deque[float] = deque(maxlen=LATEST)

    @property
    def shape(self) -> torch.Size | None:
        """Return the shape of latents that can be compared with the step before; None = it has no output."""
        return self._latents.shape if len(self._samples) > 1 else None

    def is_replaced(self, latents: torch.Tensor, response: float) -> bool:
        """Record the latents of the next step, and return True if they were replaced."""
        now = self._sample(latents)
        host = torch.stack([now, *self._samples]).cpu().double().numpy()
        self._latents, self._samples = latents, [now]
        self._earlier.appendleft(host[1:])
        edit = min(abs(response), MOST_RESPONSE) * _edit(host[0], self._earlier)
        usual = max(self._edits, default=edit)
        self._edits.append(edit)
        return edit > max(FELT, SUDDEN * usual)

    def add(self, output: torch.Tensor) -> None:
        """Add a call's output, unless it has another form than the latents or the first output."""
        if output.ndim != self._latents.ndim:
            return
        if not self._samples:
            # Latents with reference tokens, masks or images, and outputs with variances, begin with what they share.
            self._shared = tuple(map(slice, map(min, self._latents.shape, output.shape)))
            self._samples = [self._sample(self._latents)]
        sample, known = self._sample(output), self._samples[0]
        if sample.shape[1] == known.shape[1] and not len(known) % len(sample):  # guidance may call with a part of it
            self._samples.append(sample.repeat(len(known) // len(sample), 1))

    def _sample(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return evenly spaced entries of a tensor, float32 ``[B, entries]``, as a copy."""
        flat = tensor.detach()[self._shared].flatten(1)
        stride = flat.shape[1] // (REGIONS * ENTRIES) | 1  # odd, so that it meets all channels
        entries = flat[:, ::stride]
        whole = entries.shape[1] // REGIONS * REGIONS
        return (entries[:, :whole] if whole else entries).to(torch.float32, copy=True)


def _edit(now: np.ndarray, earlier: Sequence[np.ndarray]) -> float:
    """Return the largest edit of a region of latents ``[B, entries]``, relative to the outputs.

    ``earlier`` has latents and outputs of the steps before, newest first, ``[1 + calls, B, entries]`` each.
    """
    change, worst = now - earlier[0][0], 0.0
    # Unchanged entries, such as those of reference tokens, are no edits.
    known = np.concatenate([*earlier]) * (change != 0)
    for rows in _equal_rows(now):
        target, basis = change[rows[0]], known[:, rows].reshape(-1, now.shape[1])
        gram = basis @ basis.T
        gram.flat[:: len(gram) + 1] += RIDGE * gram.trace() + TINY
        missed = (target - np.linalg.solve(gram, basis @ target) @ basis).reshape(min(REGIONS, len(target)), -1)
        output = earlier[0][1, rows[0]]
        region = np.add.reduce(missed * missed, axis=1)  # sums of the regions; the method calls more Python
        worst = max(worst, float(np.maximum.reduce(region)) * len(missed) / float(output @ output))
    return worst**0.5


def _equal_rows(latents: np.ndarray) -> list[list[int]]:
    """Return the samples of a batch in groups of equal latents: one sample in all parts of guidance."""
    groups = defaultdict(list)
    if len(latents) == 1:
        return [[0]]
    for row, values in enumerate(latents):
        groups[values.tobytes()].append(row)
    return list(groups.values())
