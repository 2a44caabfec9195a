"""What an engine is: it makes jobs by batches, in this process or elsewhere, and gives the bytes of their files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dit_accel.errors import DitAccelError, shortened
from dit_accel.serving.prompts import Job


@dataclass(frozen=True)
class Made:
    """The bytes of a job's file, and the call that made it.

    Args:
        seconds: of the call's denoising loop.
        report: what was accelerated for this job; None where nothing was.
        batch: indices of the call's jobs, this one among them.
    """

    data: bytes
    seconds: float
    report: dict[str, Any] | None
    batch: list[int]


@dataclass(frozen=True)
class Failure:
    """Why a job was given up."""

    reason: str


class Progress(Protocol):
    """Shows how far an engine is."""

    def begin(self, what: str, share: float = 0.0) -> None:
        """Says which run begins, and how many jobs it makes."""

    def watch(self, pipe: Any) -> Any:
        """Shows the steps of a pipeline's runs."""


class Engine(Protocol):
    """What makes jobs: one :class:`Worker`, or several elsewhere.

    ``suffix`` is that of the files, and ``preset`` holds all values of the preset in use, None = plain.
    """

    suffix: str
    preset: dict[str, Any] | None

    def make_all(self, batches: Sequence[Sequence[Job]], progress: Progress) -> Iterator[tuple[Job, Made | Failure]]:
        """What became of each job, in any order. A batch that can't be made at once is made job by job."""


def made_alone(batch: Sequence[Job], error: BaseException) -> str:
    """That a batch could not be made at once, and why."""
    lines = ", ".join(str(job.index + 1) for job in batch)
    return f"lines {lines} are made one at a time, for in one call: {reason_of(error)}"


def reason_of(error: BaseException) -> str:
    """An error in one line; of Ray's own without the indented lines, which have the actor's ids."""
    told = str(error) if isinstance(error, DitAccelError) else f"{type(error).__name__}: {error}"
    return shortened(" ".join(line for line in told.splitlines() if not line.startswith("\t")), 600)
