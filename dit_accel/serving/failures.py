"""Turn failures that a user can fix into clear errors: out of memory, and arguments that a pipeline rejects."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Iterator

from dit_accel.errors import OptionError, OutOfMemoryError, UnsupportedError, shortened

# Functions of diffusers that check a user's arguments.
CHECKS = {"check_inputs", "retrieve_timesteps", "preprocess", "cropped_pos_embed"}


@contextlib.contextmanager
def explained_failures(pipeline: type) -> Iterator[None]:
    """Within the block, turn errors of a pipeline's call into errors that its user can act on.

    Raises:
        UnsupportedError: the pipeline rejected its inputs, its scheduler the timesteps or sigmas, or its transformer
            the size.
        OutOfMemoryError: memory ran out.
    """
    try:
        with explained_memory():
            yield
    except (TypeError, ValueError) as error:
        frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        call = getattr(inspect.unwrap(pipeline.__call__), "__code__", None)
        is_own_check = isinstance(error, ValueError) and frames[-1] is call
        if not is_own_check and not CHECKS & {frame.co_name for frame in frames}:
            raise
        raise UnsupportedError(f"{pipeline.__name__} rejects its arguments: {error}") from None


@contextlib.contextmanager
def explained_loading(option: str, what: str) -> Iterator[None]:
    """Within the block, turn any error but out-of-memory into an ``OptionError`` that names the file being loaded.

    diffusers checks little of a file's contents, so wrong files raise errors of any type.

    Raises:
        OptionError: the file can't be loaded.
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
    """Within the block, add advice to out-of-memory errors of a device or the host.

    Raises:
        OutOfMemoryError: memory ran out.
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

    on_host = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)  # torch has no class for it
    return on_host or isinstance(error, MemoryError | torch.OutOfMemoryError)
