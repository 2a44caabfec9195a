"""Frames of a video while it is made, from pipelines that decode it chunk by chunk.

with growing_mp4(Path("fox.mp4"), fps=24.0) as append, streamed(pipe, append):
    pipe("a fox")
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from dit_accel.constants import RATE_FACTOR, X264
from dit_accel.errors import ArgumentError, OutputError, UnsupportedError

BETWEEN_LOOKS = 0.1  # seconds, at a file that grows


@contextmanager
def streamed(pipe: Any, show: Callable[[np.ndarray], object]) -> Iterator[None]:
    """Within the block, pass each decoded chunk to ``show``: floats in 0..1 ``[frames, height, width, 3]``.

    The first video of a batch counts. A pipeline may cut the last chunk by up to three frames in the end.

    Raises:
        UnsupportedError: the pipeline decodes once, after its last step.
    """
    from dit_accel.models.families import pipeline_family
    from dit_accel.models.stand_in import StandIn

    if type(pipe).__name__ not in getattr(pipeline_family(pipe), "streamed", ()):
        raise UnsupportedError(f"{type(pipe).__name__} decodes once, after its last step: streaming gains nothing")

    def decode(original: Callable, _: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        output = original(*args, **kwargs)
        show(pipe.video_processor.postprocess_video(output[0], output_type="np")[0])
        return output

    stand_in = StandIn(pipe.vae, "decode", decode)
    try:
        yield
    finally:
        stand_in.leave()


@contextmanager
def growing_mp4(
    path: Path, fps: float, tell: Callable[[str], object] = lambda line: None
) -> Iterator[Callable[[np.ndarray], None]]:
    """Yield a function that appends frames of :func:`streamed` to an mp4; ``tell`` gets a line for each chunk.

    Each frame is a fragment of the file, which can be read while it grows, but for the latest ones.

    Raises:
        ArgumentError: ``path`` does not end in .mp4.
        OutputError: ffmpeg can't write the file.
    """
    if path.suffix.lower() != ".mp4":
        raise ArgumentError("stream", f"writes .mp4 files alone, got {path}")
    import imageio_ffmpeg

    fragments = ["-movflags", "empty_moov+default_base_moof+frag_every_frame", "-flush_packets", "1"]
    options = {**X264, "fps": fps, "output_params": ["-crf", RATE_FACTOR, "-tune", "zerolatency", *fragments]}
    encoders, started = list[Any](), time.perf_counter()

    def append(frames: np.ndarray) -> None:
        if not encoders:
            encoders.append(imageio_ffmpeg.write_frames(str(path), frames.shape[2:0:-1], **options))
            encoders[0].send(None)
        try:
            for frame in np.ascontiguousarray(np.round(255 * frames.clip(0, 1)), np.uint8):
                encoders[0].send(frame)
        except OSError as error:
            raise OutputError(f"{path} can't be written: {str(error).splitlines()[0]}") from None
        tell(f"{len(frames)} frames more after {time.perf_counter() - started:.1f} s: {path}")

    try:
        yield append
    finally:
        for encoder in encoders:
            encoder.close()


@contextmanager
def streamed_file(pipe: Any, fps: float, tell: Callable[..., object]) -> Iterator[Callable[..., object]]:
    """Yield a function that passes finished and all steps to ``tell``, with the next bytes of :func:`growing_mp4`."""
    with TemporaryDirectory() as folder:
        (path := Path(folder) / "growing.mp4").touch()
        with path.open("rb") as file:
            with growing_mp4(path, fps) as append, streamed(pipe, append):
                yield lambda done, steps: tell(done, steps, file.read())
            tell(1, 1, file.read())  # the frames of the last chunk


class GrowingFile:
    """Bytes of :func:`streamed_file` for any number of readers; b"" ends it, and None breaks it off."""

    def __init__(self) -> None:
        self._parts: list[bytes | None] = []

    def append(self, part: bytes | None) -> None:
        if part and part[4:8] == b"ftyp" and self._parts:  # another process runs the call again
            self._parts.append(None)
            self._parts = []
        self._parts.append(part)

    async def follow(self) -> AsyncIterator[bytes]:
        """Yield all bytes as they come; raise ``ConnectionAbortedError`` where the file breaks off."""
        parts = self._parts
        for place in count():
            while place == len(parts):
                await asyncio.sleep(BETWEEN_LOOKS)
            if (part := parts[place]) is None:
                raise ConnectionAbortedError("the video was not completed")
            if not part:
                return
            yield part
