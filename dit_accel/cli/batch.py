"""``dit-accel generate --prompts FILE --output-dir FOLDER``: a picture or clip for each line, and a manifest of them.

A file gets its name when it is whole, and its line in ``manifest.jsonl`` after that. So a run that was interrupted goes
on with the first line that has no file, or one that is not the manifest's.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol

from dit_accel.cli.jobs import OWN, Job, batches
from dit_accel.cli.options import OptionError
from dit_accel.cli.parallel import leads, ranks
from dit_accel.cli.pipelines import Setup, call_arguments, open_pipeline, start_pipeline, timed_call
from dit_accel.cli.progress import Progress, progress_bar
from dit_accel.errors import DitAccelError, PresetError, UnsupportedError, shortened, shown
from dit_accel.tools.files import write_whole

if TYPE_CHECKING:
    from PIL import Image
    from rich.console import Console

    from dit_accel.presets import Preset

MANIFEST = "manifest.jsonl"
RESULTS = {"index", "file", "sha256", "batch", "seconds", "report"}  # of a line of the manifest; all else are settings


class BatchError(DitAccelError, RuntimeError):
    """Lines that could not be made."""


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


def require_one_source(prompt: str | None, prompts: Path | None, folder: Path | None, alone: dict[str, Any]) -> None:
    """Checks that there is one source of prompts, and that what serves one picture alone goes with that one."""
    if prompt is None and prompts is None:
        raise OptionError("--prompt", "needs a text; or name a file of prompts with --prompts")
    if prompt is not None and prompts is not None:
        raise OptionError("--prompts", "can't be given beside --prompt; give one of the two")
    if prompts is not None and folder is None:
        raise OptionError("--output-dir", "must name a folder for what --prompts makes")
    if prompts is None and folder is not None:
        raise OptionError("--output-dir", "is for --prompts; name the file of one --prompt with --output")
    for option in (option for option, value in alone.items() if value and prompts is not None):
        raise OptionError(option, "is for one --prompt; --prompts writes all into --output-dir")


def make_folder(folder: Path) -> None:
    """Makes the folder of --output-dir, where there is none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError("--output-dir", f"{folder} can't be made: {error.strerror}") from None


def require_batches(size: int, prompts: Path | None, image: Path | None) -> None:
    """Checks that there is something to share a call."""
    if size > 1 and prompts is None:
        raise OptionError("--batch-size", "goes with --prompts; --num-images makes several of one prompt")
    if (
        size > 1 and image is not None
    ):  # img2img of FLUX draws other noise, and FLUX.2 takes all pictures for each prompt
        raise OptionError("--batch-size", "can't be used with --image: pipelines differ in what a batch makes of it")


class Engine(Protocol):
    """What makes jobs: one :class:`Worker`, or several elsewhere.

    ``suffix`` is that of the files, and ``preset`` holds all values of the preset in use, None = plain.
    """

    suffix: str
    preset: dict[str, Any] | None

    def make_all(self, batches: Sequence[Sequence[Job]], progress: Progress) -> Iterator[tuple[Job, Made | Failure]]:
        """What became of each job, in any order. A batch that can't be made at once is made job by job."""


class Worker:
    """A pipeline that is loaded and accelerated once, for many jobs: the engine of one process.

    Raises:
        OptionError: a job asks for what this pipeline can't do.
    """

    def __init__(self, setup: Setup, picture: Image.Image | None, jobs: Sequence[Job], console: Console) -> None:
        self._pipe, self._medium, preset = open_pipeline(setup, console)
        self._setup, self._picture, self._console = setup, picture, console
        self._guider = getattr(self._pipe, "guider", None)
        self.suffix = self._medium.default_output.suffix
        self.preset = preset and preset.effective()
        for job in jobs:
            self._arguments([job])
        if preset and setup.batch_size > 1:
            preset = _decided_apart(preset, console)
        start_pipeline(self._pipe, preset, console.quiet)

    def make(self, batch: Sequence[Job]) -> list[Made]:
        """Makes jobs that share their settings by one call of the pipeline."""
        seeds = [job.settings["seed"] for job in batch]
        output = timed_call(self._pipe, self._arguments(batch), seeds if len(batch) > 1 else seeds[0])
        if len(output.results) != len(batch):
            raise UnsupportedError(f"{type(self._pipe).__name__} made {len(output.results)} of {len(batch)} prompts")
        report = self._pipe.dit_accel.report() if self.preset else None
        indices, made = [job.index for job in batch], []
        with TemporaryDirectory() as folder:
            for place, (job, result) in enumerate(zip(batch, output.results, strict=True)):
                file = Path(folder) / job.name(self.suffix)
                self._medium.write(result, file)
                own = report and report.of_prompt(place).to_json()
                made.append(Made(file.read_bytes(), output.denoising_seconds, own, indices))
        return made

    def make_all(self, batches: Sequence[Sequence[Job]], progress: Progress) -> Iterator[tuple[Job, Made]]:
        """Raises the first error of a single job, of a batch once its other jobs are made."""
        progress.watch(self._pipe)
        for batch in batches:
            more = f" and {len(batch) - 1} more" if len(batch) > 1 else ""
            progress.begin(batch[0].name(self.suffix) + more, len(batch))
            try:
                together = self.make(batch)
            except Exception as error:
                if len(batch) == 1 or ranks() > 1:  # of several processes the others may have no error, and would wait
                    raise
                self._console.out(f"note: {made_alone(batch, error)}", highlight=False)
            else:
                yield from zip(batch, together, strict=True)
                continue
            yield from self._make_alone(batch, progress)

    def _make_alone(self, batch: Sequence[Job], progress: Progress) -> Iterator[tuple[Job, Made]]:
        errors = []
        for job in batch:
            progress.begin(job.name(self.suffix), 1.0)
            try:
                (made,) = self.make([job])
            except Exception as error:
                errors.append(error)
            else:
                yield job, made
        if errors:
            raise errors[0]

    def _arguments(self, batch: Sequence[Job]) -> dict[str, Any]:
        """Of the pipeline's call, whose guider the jobs' guidance replaces for this call alone."""
        if self._guider is not None:
            self._pipe.guider = self._guider
        own = {key: value for key, value in batch[0].settings.items() if key != "seed"}
        if len(batch) > 1:
            own |= {key: [job.settings[key] for job in batch] for key in OWN if key in own}
        return call_arguments(self._pipe, self._setup.model, {**own, "image": self._picture}, self._setup.call)


def made_alone(batch: Sequence[Job], error: BaseException) -> str:
    """That a batch could not be made at once, and why."""
    lines = ", ".join(str(job.index + 1) for job in batch)
    return f"lines {lines} are made one at a time, for in one call: {reason_of(error)}"


def reason_of(error: BaseException) -> str:
    """An error in one line; of Ray's own without the indented lines, which have the actor's ids."""
    told = str(error) if isinstance(error, DitAccelError) else f"{type(error).__name__}: {error}"
    return shortened(" ".join(line for line in told.splitlines() if not line.startswith("\t")), 600)


def _decided_apart(preset: Preset, console: Console) -> Preset:
    """The preset with steps decided for each prompt of a batch apart, unless it says otherwise or can't do so."""
    from dit_accel.presets import load_preset

    if preset.schedule.control != "adaptive" or "per_prompt" in preset.schedule.model_fields_set:
        return preset
    try:
        return load_preset(preset, per_prompt=True)
    except PresetError as error:
        console.out(f"note: the prompt of a batch that needs most steps decides for all: {error}", highlight=False)
        return preset


def run_jobs(
    engine: Engine,
    jobs: Sequence[Job],
    folder: Path,
    facts: dict[str, Any],
    console: Console,
    *,
    batch_size: int,
    force: bool,
) -> None:
    """Makes what is not there yet.

    Args:
        facts: of all lines, for the manifest: what was made under others is not taken for these.
        batch_size: most lines of one call.
        force: make anew what was made with other settings.

    Raises:
        OptionError: the folder holds results of other settings.
        BatchError: some jobs failed.
    """
    facts = {**facts, "preset": engine.preset}
    if leads():
        _end_last_line(folder / MANIFEST)
    there = _made(folder, {job.index: facts | job.settings for job in jobs}, force)
    left = [job for job in jobs if job.index not in there]
    console.out(f"{len(there)} of {len(jobs)} made before", highlight=False)
    failed: list[int] = []
    started = time.monotonic()
    with progress_bar(console, "making", "lines") as progress:
        progress.expect(len(jobs), len(there))
        for done, (job, made) in enumerate(engine.make_all(batches(left, batch_size), progress), len(there) + 1):
            progress.expect(len(jobs), done)
            if not leads():
                continue
            row = {"index": job.index, **facts, **job.settings}
            if isinstance(made, Failure):
                failed.append(job.index + 1)
                _append(folder / MANIFEST, row | {"error": made.reason})
                console.out(f"line {job.index + 1} failed: {made.reason}", highlight=False)
                continue
            file = folder / job.name(engine.suffix)
            write_whole(file, made.data)
            row |= {"file": file.name, "sha256": _checksum(file)}
            _append(folder / MANIFEST, row | {"batch": made.batch, "seconds": made.seconds, "report": made.report})
            console.out(f"wrote {file}", highlight=False)
    console.out(f"made {len(left) - len(failed)} in {time.monotonic() - started:.0f} s", highlight=False)
    if failed:
        lines = shortened(", ".join(map(str, sorted(failed))))
        raise BatchError(f"{len(failed)} of {len(jobs)} lines failed ({lines}); {folder / MANIFEST} says why")


def _made(folder: Path, wanted: dict[int, dict[str, Any]], force: bool) -> set[int]:
    """Return the lines whose files are there, as the latest row of each says."""
    made = set()
    latest = {row["index"]: row for row in _rows(folder / MANIFEST) if "error" not in row}
    for index, settings in wanted.items():
        if index not in latest:
            continue
        row = latest[index]
        keys = [*settings, *(row.keys() - settings.keys() - RESULTS)]
        changed = [key for key in keys if row.get(key) != settings.get(key)]
        if changed and not force:
            raise OptionError(
                "--output-dir",
                f"{shortened(str(folder))} holds line {index + 1} with other settings: {changed[0]} "
                f"({shown(row.get(changed[0]))}, now {shown(settings.get(changed[0]))}): name another folder, or make "
                "it anew with --force",
            )
        file = folder / str(row.get("file"))
        if not changed and file.is_file() and _checksum(file) == row.get("sha256"):
            made.add(index)
    return made


def _rows(manifest: Path) -> list[dict[str, Any]]:
    """Return the manifest's rows, without lines that hold none."""
    rows = []
    for line in manifest.read_bytes().splitlines() if manifest.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows += [row] if isinstance(row, dict) and isinstance(row.get("index"), int) else []
    return rows


def _end_last_line(manifest: Path) -> None:
    """End the last line where a crash cut it off: a whole row gets its newline, a part of one goes."""
    data = manifest.read_bytes() if manifest.is_file() else b""
    start = data.rfind(b"\n") + 1
    if start == len(data):
        return
    try:
        json.loads(data[start:])
    except ValueError:
        os.truncate(manifest, start)
    else:
        with manifest.open("ab") as file:
            file.write(b"\n")


def _append(manifest: Path, row: dict[str, Any]) -> None:
    """Add a line, which is on disk when this returns."""
    with manifest.open("ab") as file:
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
