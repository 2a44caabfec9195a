"""Turn failures that a user can fix into clear errors: out of memory, and arguments that a pipeline rejects."""

import contextlib
import inspect
import traceback
from collections.abc import Iterator

from dit_accel.errors import ArgumentError, OutOfMemoryError, UnsupportedError, headline, shortened

# Functions of diffusers that check a user's arguments.
CHECKS = {"check_inputs", "retrieve_timesteps", "preprocess", "cropped_pos_embed", "get_block_state"}


@contextlib.contextmanager
def explained_failures(pipeline: type) -> Iterator[None]:
    """Within the block, turn errors of a pipeline that its user can act on into errors of :mod:`dit_accel.errors`."""
    try:
        with explained_memory():
            yield
    except (TypeError, ValueError) as error:
        frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        call = getattr(inspect.unwrap(pipeline.__call__), "__code__", None)
        is_block = frames[-1].co_name == "__call__" and "modular_pipelines" in frames[-1].co_filename
        is_own_check = isinstance(error, ValueError) and (frames[-1] is call or is_block)
        if not is_own_check and not CHECKS & {frame.co_name for frame in frames}:
            raise
        raise UnsupportedError(f"{pipeline.__name__} rejects its arguments: {error}") from None


@contextlib.contextmanager
def explained_loading(field: str, what: str) -> Iterator[None]:
    """Within the block, turn any error but out-of-memory into an ``ArgumentError`` that names the file being loaded."""
    try:
        yield
    except Exception as error:
        if _lacks_memory(error):
            raise
        reason = _of_the_hub(error, what) or shortened(headline(error), 400)
        raise ArgumentError(field, f"{shortened(what)} can't be loaded: {reason}") from error


def _of_the_hub(error: BaseException, what: str) -> str | None:
    """Return the reason if the Hub refuses a download or can't be reached, or None; diffusers only refers to it."""
    from huggingface_hub import constants, errors

    chain: list[BaseException] = []
    while error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__ or error
    page = f"{constants.ENDPOINT}/{'/'.join(what.split('/')[:2])}"
    login = f"check the name and the licence on {page}, and log in with `hf auth login` or HF_TOKEN"
    for cause in chain:
        if isinstance(cause, errors.HfHubHTTPError):
            message = " ".join(str(cause.server_message or cause).split())
            is_closed = isinstance(cause, errors.RepositoryNotFoundError)  # gated, private or missing
            return f"the Hub answers: {shortened(message, 400)}{f'; {login}' if is_closed else ''}"
    kinds = {"httpx", "requests", "huggingface_hub"}
    lost = [e for e in chain if isinstance(e, ConnectionError) or type(e).__module__.partition(".")[0] in kinds]
    if not lost:
        return None
    return f"the Hub can't be reached ({shortened(headline(lost[-1]), 300)}), and there is no full copy on this machine"


@contextlib.contextmanager
def explained_memory() -> Iterator[None]:
    """Within the block, turn out-of-memory errors of a device or the host into ``OutOfMemoryError`` with advice."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _lacks_memory(error):
            raise
        advice = "try --offload model, or a smaller batch size, number of images or frames, height or width"
        reason = shortened((str(error) or type(error).__name__).splitlines()[0])
        raise OutOfMemoryError(f"out of memory: {advice} ({reason})") from None


def _lacks_memory(error: Exception) -> bool:
    import torch

    texts = ("DefaultCPUAllocator", "CUDA error: out of memory")  # of the host, and of a GPU without room for a context
    has_text = isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    return has_text or isinstance(error, MemoryError | torch.OutOfMemoryError)
