"""Protocol of an engine, which runs jobs in batches, in this process or elsewhere, and returns their files as bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from dit_accel.errors import DitAccelError, shortened
from dit_accel.serving.prompts import Job

if TYPE_CHECKING:
    from dit_accel.presets import Preset


@dataclass(frozen=True)
class Made:
    """File of a job as bytes, and the call that generated it.

    Args:
        seconds: duration of the call's denoising loop.
        report: report of the accelerated run for this job; None for a plain run.
        batch: indices of all jobs of the call, including this one.
        stages: seconds of the whole call by stage.
        shape: number of frames, height and width in pixels of a video; None for an image.
        note: sentence on a size that the pipeline rounded; None = it has the requested one.
    """

    data: bytes
    seconds: float
    report: dict[str, Any] | None
    batch: list[int]
    stages: dict[str, float] = field(default_factory=dict)
    shape: tuple[int, int, int] | None = None
    note: str | None = None

    @property
    def computed_fraction(self) -> float:
        """Share of the FLOPs that ran; 1 if nothing was accelerated."""
        return (self.report or {}).get("computed_fraction") or 1.0


@dataclass(frozen=True)
class VideoForm:
    """Form of a pipeline's videos.

    Args:
        fps: frames per second of a file, unless a job sets another.
        frames_unit: frames of one latent frame; the first latent frame is one frame.
    """

    fps: float
    frames_unit: int

    def frames(self, seconds: float, fps: float | None = None) -> int:
        """Return the number of frames that the pipeline can make, nearest to a duration."""
        return 1 + self.frames_unit * round(seconds * (fps or self.fps) / self.frames_unit)


@dataclass(frozen=True)
class Loaded:
    """A pipeline that a worker has loaded.

    Args:
        form: of its videos; None = it makes images.
        preset: in use; None = plain.
        suffix: of its files.
        settings: all values of the preset that was asked for; None = plain.
    """

    form: VideoForm | None
    preset: Preset | None
    suffix: str
    settings: dict[str, Any] | None


@dataclass(frozen=True)
class Failure:
    """Reason why a job failed."""

    reason: str


class DefectError(Exception):
    """Error of another process that is no :class:`DitAccelError`; its text has the type, and its note the traceback."""


class JobProgress(Protocol):
    """Display of an engine's progress."""

    def begin(self, what: str, share: float = 0.0) -> None:
        """Announce a run and its number of jobs."""

    def watch(self, pipe: Any) -> Any:
        """Show the steps of a pipeline's runs; return the pipeline."""


class Engine(Protocol):
    """Runner of jobs: one :class:`Worker`, or several in other processes.

    ``suffix`` is the suffix of the files; ``preset`` holds all values of the preset in use, None = plain.
    """

    suffix: str
    preset: dict[str, Any] | None

    def make_all(self, batches: Sequence[Sequence[Job]], progress: JobProgress) -> Iterator[tuple[Job, Made | Failure]]:
        """Yield the result of each job, in any order. If a batch fails, its jobs run one at a time."""


def made_alone(batch: Sequence[Job], error: BaseException) -> str:
    """Return a note that the jobs of a batch run one at a time, with the reason."""
    lines = ", ".join(str(job.index + 1) for job in batch)
    return f"lines {lines} run one at a time, because one call failed: {reason_of(error)}"


def reason_of(error: BaseException) -> str:
    """Format an error in one line, without the actor ids that Ray adds in indented lines."""
    text = str(error) if isinstance(error, DitAccelError | DefectError) else f"{type(error).__name__}: {error}"
    return shortened(" ".join(line for line in text.splitlines() if not line.startswith("\t")), 600)
