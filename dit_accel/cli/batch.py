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

from dit_accel.cli.options import OptionError, read_prompts
from dit_accel.cli.parallel import leads
from dit_accel.cli.pipelines import Setup, call_arguments, open_pipeline, start_pipeline, timed_call
from dit_accel.cli.progress import Progress, progress_bar
from dit_accel.errors import DitAccelError, shortened, shown

if TYPE_CHECKING:
    from PIL import Image
    from rich.console import Console

MANIFEST = "manifest.jsonl"
KEYS: dict[str, tuple[type, ...]] = {  # of a JSON line; all but the seed are options of the command
    "prompt": (str,),
    "negative-prompt": (str,),
    "seed": (int,),
    "steps": (int,),
    "height": (int,),
    "width": (int,),
    "num-frames": (int,),
    "guidance": (int, float),
}


class BatchError(DitAccelError, RuntimeError):
    """Lines that could not be made."""


@dataclass(frozen=True)
class Job:
    """One line: its place, and what to make, by the keys above; a seed is among them."""

    index: int
    settings: dict[str, Any]

    def name(self, suffix: str) -> str:
        return f"{self.index:04}{suffix}"


@dataclass(frozen=True)
class Made:
    """The bytes of a job's file, seconds of its denoising loop, and what was accelerated, None where nothing was."""

    data: bytes
    seconds: float
    report: dict[str, Any] | None


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


def read_jobs(path: Path, common: dict[str, Any]) -> list[Job]:
    """The lines of a file: prompts, or JSON objects where it ends in .jsonl.

    Args:
        common: settings of lines that don't have their own; None = not given.

    Raises:
        OptionError: the file can't be read, or a line is not as it should be.
    """
    lines: Sequence[Any] = read_prompts(path)
    if path.suffix == ".jsonl":
        settings = [_settings(line, number) for number, line in enumerate(lines, 1)]
    else:
        settings = [{"prompt": line} for line in lines]
    given = {key: value for key, value in common.items() if value is not None}
    return [Job(index, given | own) for index, own in enumerate(settings)]


class Engine(Protocol):
    """What makes jobs: one :class:`Worker`, or several elsewhere.

    ``suffix`` is that of the files, and ``preset`` holds all values of the preset in use, None = plain.
    """

    suffix: str
    preset: dict[str, Any] | None

    def make_all(self, jobs: Sequence[Job], progress: Progress) -> Iterator[tuple[Job, Made | Failure]]:
        """What became of each, in any order."""


class Worker:
    """A pipeline that is loaded and accelerated once, for many jobs: the engine of one process.

    Raises:
        OptionError: a job asks for what this pipeline can't do.
    """

    def __init__(self, setup: Setup, picture: Image.Image | None, jobs: Sequence[Job], console: Console) -> None:
        self._pipe, self._medium, preset = open_pipeline(setup, console)
        self._setup, self._picture = setup, picture
        self._guider = getattr(self._pipe, "guider", None)
        self.suffix = self._medium.default_output.suffix
        self.preset = preset and preset.effective()
        for job in jobs:
            self._arguments(job)
        start_pipeline(self._pipe, preset, console.quiet)

    def make(self, job: Job) -> Made:
        output = timed_call(self._pipe, self._arguments(job), job.settings["seed"])
        report = self._pipe.dit_accel.report().to_json() if self.preset else None
        with TemporaryDirectory() as folder:
            file = Path(folder) / job.name(self.suffix)
            self._medium.write(output.results[0], file)
            return Made(file.read_bytes(), output.denoising_seconds, report)

    def make_all(self, jobs: Sequence[Job], progress: Progress) -> Iterator[tuple[Job, Made]]:
        progress.watch(self._pipe)
        for job in jobs:
            progress.begin(job.name(self.suffix), 1.0)
            yield job, self.make(job)

    def _arguments(self, job: Job) -> dict[str, Any]:
        """Of the pipeline's call, whose guider a job's guidance replaces for this job alone."""
        if self._guider is not None:
            self._pipe.guider = self._guider
        own = {key: value for key, value in job.settings.items() if key != "seed"}
        return call_arguments(self._pipe, self._setup.model, {**own, "image": self._picture}, self._setup.call)


def run_jobs(
    engine: Engine, jobs: Sequence[Job], folder: Path, facts: dict[str, Any], console: Console, *, force: bool
) -> None:
    """Makes what is not there yet.

    Args:
        facts: of all lines, for the manifest: what was made under others is not taken for these.
        force: make anew what was made with other settings.

    Raises:
        OptionError: the folder holds results of other settings.
        BatchError: some jobs failed.
    """
    facts = {**facts, "preset": engine.preset}
    there = _made(folder, {job.index: facts | job.settings for job in jobs}, force)
    left = [job for job in jobs if job.index not in there]
    console.out(f"{len(there)} of {len(jobs)} made before", highlight=False)
    failed: list[int] = []
    started = time.monotonic()
    with progress_bar(console, "making", "lines") as progress:
        progress.expect(len(jobs), len(there))
        for done, (job, made) in enumerate(engine.make_all(left, progress), len(there) + 1):
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
            _write_whole(file, made.data)
            row |= {"file": file.name, "sha256": _checksum(file)}
            _append(folder / MANIFEST, row | {"seconds": made.seconds, "report": made.report})
            console.out(f"wrote {file}", highlight=False)
    console.out(f"made {len(left) - len(failed)} in {time.monotonic() - started:.0f} s", highlight=False)
    if failed:
        lines = shortened(", ".join(map(str, sorted(failed))))
        raise BatchError(f"{len(failed)} of {len(jobs)} lines failed ({lines}); {folder / MANIFEST} says why")


def _settings(line: str, number: int) -> dict[str, Any]:
    """What a JSON line says."""
    try:
        values = json.loads(line)
    except ValueError as error:
        raise OptionError("--prompts", f"line {number} is not JSON: {error}") from None
    if not isinstance(values, dict) or "prompt" not in values:
        raise OptionError("--prompts", f"line {number} must be an object with a prompt, got {shown(line)}")
    for key, value in values.items():
        kinds = KEYS.get(key)
        if kinds is None:
            raise OptionError("--prompts", f"line {number}: unknown key {shown(key)}; keys are {', '.join(KEYS)}")
        if not isinstance(value, kinds) or isinstance(value, bool):
            kind = " or ".join(kind.__name__ for kind in kinds)
            raise OptionError("--prompts", f"line {number}: {key} must be {kind}, got {shown(value)}")
    return values


def _made(folder: Path, wanted: dict[int, dict[str, Any]], force: bool) -> set[int]:
    """Lines whose files are there, as the manifest says."""
    made = set()
    for row in _rows(folder / MANIFEST):
        index = row.get("index")
        if index not in wanted or "error" in row:
            continue
        changed = [key for key, value in wanted[index].items() if row.get(key) != value]
        if changed and not force:
            raise OptionError(
                "--output-dir",
                f"{shortened(str(folder))} holds line {index + 1} with other settings: {changed[0]} "
                f"({shown(row.get(changed[0]))}, now {shown(wanted[index][changed[0]])}): name another folder, or make "
                "it anew with --force",
            )
        file = folder / str(row.get("file"))
        is_whole = not changed and file.is_file() and _checksum(file) == row.get("sha256")
        made = made | {index} if is_whole else made - {index}
    return made


def _rows(manifest: Path) -> list[dict[str, Any]]:
    """The manifest's lines; one that was cut off in the writing is none."""
    rows = []
    for line in manifest.read_text(encoding="utf-8").splitlines() if manifest.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows += [row] if isinstance(row, dict) else []
    return rows


def _write_whole(file: Path, data: bytes) -> None:
    """Writes a file under another name, and renames it when it is whole."""
    part = file.with_name(f"part-{file.name}")
    part.write_bytes(data)
    os.replace(part, file)


def _append(manifest: Path, row: dict[str, Any]) -> None:
    """Adds a line, on its own also where the last one was cut off."""
    with manifest.open("a+b") as file:
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.write(b"\n")
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
