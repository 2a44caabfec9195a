"""Failures that a user can act on: memory that does not suffice, and arguments that a pipeline refuses."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

from dit_accel.errors import OptionError, OutOfMemoryError, UnsupportedError, shortened

CHECKS = {"check_inputs", "retrieve_timesteps"}  # functions of diffusers' pipelines that refuse what a user gave


@contextlib.contextmanager
def explained_failures(pipeline: type) -> Iterator[None]:
    """Within, what a call of a pipeline of this class raises comes out as something that its user can act on.

    Raises:
        UnsupportedError: the pipeline's own check of its inputs refused them, or its scheduler the timesteps or sigmas.
        OutOfMemoryError: memory does not suffice.
    """
    try:
        with explained_memory():
            yield
    except (TypeError, ValueError) as error:
        if not CHECKS & {frame.name for frame in traceback.extract_tb(error.__traceback__)}:
            raise
        raise UnsupportedError(f"{pipeline.__name__} refuses its arguments: {error}") from None


@contextlib.contextmanager
def explained_loading(option: str, what: str) -> Iterator[None]:
    """Within, whatever fails is told of what is being loaded, but for memory that does not suffice.

    diffusers checks little of what files hold, so wrong ones fail in any way.

    Raises:
        OptionError: it can't be loaded.
    """
    try:
        yield
    except Exception as error:
        if _lacks_memory(error):
            raise
        reason = shortened(f"{type(error).__name__}: {str(error).strip()}".splitlines()[0])
        raise OptionError(option, f"{shortened(what)} can't be loaded: {reason}") from error


@contextlib.contextmanager
def explained_memory() -> Iterator[None]:
    """Within, memory that does not suffice, a device's or the host's, is told with advice.

    Raises:
        OutOfMemoryError: it did not.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _lacks_memory(error):
            raise
        advice = "try --offload model, or a smaller --batch-size, --num-images, --num-frames, --height or --width"
        reason = shortened((str(error) or type(error).__name__).splitlines()[0])
        raise OutOfMemoryError(f"out of memory: {advice} ({reason})") from None


def _lacks_memory(error: Exception) -> bool:
    import torch

    told = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)  # torch has no class for it
    return told or isinstance(error, MemoryError | torch.OutOfMemoryError)
