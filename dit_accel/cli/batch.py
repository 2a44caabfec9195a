"""``dit-accel generate --prompts FILE --output-dir FOLDER``: an image or video for each line, and a manifest.

A file appears only once it is complete; its line in ``manifest.jsonl`` follows. An interrupted run resumes at the first
line whose file is missing or does not match the checksum in the manifest.
"""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dit_accel.cli.progress import progress_bar
from dit_accel.errors import ArgumentError, BatchError, shortened
from dit_accel.serving.engine import Failure
from dit_accel.serving.processes import leads
from dit_accel.serving.prompts import Job, batches
from dit_accel.serving.ray_engine import RayEngine
from dit_accel.serving.worker import Worker
from dit_accel.tools.files import difference_of, explained_writing, write_whole

MANIFEST = "manifest.jsonl"
RESULTS = {"index", "file", "sha256", "batch", "seconds", "report", "contract"}  # keys that are no settings


def run_jobs(
    engine: Worker | RayEngine,
    jobs: Sequence[Job],
    folder: Path,
    facts: dict[str, Any],
    console: Console,
    *,
    batch_size: int,
    force: bool,
) -> None:
    """Generate the outputs that are missing; those of other settings are an error, unless ``force`` replaces them."""
    rows = {job.index: facts | job.settings | {"preset": engine.loaded.values_of(job)} for job in jobs}
    if leads():
        _end_last_line(folder / MANIFEST)
    there = _finished(folder, rows, force)
    left = [job for job in jobs if job.index not in there]
    console.out(f"{len(there)} of {len(jobs)} done before", highlight=False)
    failed, started = list[int](), time.monotonic()
    with progress_bar(console, "making", "lines") as progress:
        progress.expect(len(jobs), len(there))
        for done, (job, result) in enumerate(engine.make_all(batches(left, batch_size), progress), len(there) + 1):
            progress.expect(len(jobs), done)
            if not leads():
                continue
            row = {"index": job.index, **rows[job.index]}
            if isinstance(result, Failure):
                failed.append(job.index + 1)
                _append(folder / MANIFEST, row | {"error": result.reason})
                console.out(f"line {job.index + 1} failed: {result.reason}", highlight=False)
                continue
            file = folder / job.name(engine.suffix)
            write_whole(file, result.data)
            row |= {"file": file.name, "sha256": _checksum(file)}
            row |= {"batch": result.batch, "seconds": result.seconds, "report": result.report}
            row |= {"contract": result.contract} if result.contract else {}
            _append(folder / MANIFEST, row)
            console.out(f"wrote {file}", highlight=False)
            if result.note:
                console.out(f"note: line {job.index + 1}: {result.note}", highlight=False)
    console.out(f"made {len(left) - len(failed)} in {time.monotonic() - started:.0f} s", highlight=False)
    if failed:
        lines = shortened(", ".join(map(str, sorted(failed))))
        raise BatchError(f"{len(failed)} of {len(jobs)} lines failed ({lines}); {folder / MANIFEST} holds the reasons")


def _finished(folder: Path, wanted: dict[int, dict[str, Any]], force: bool) -> set[int]:
    finished = set()
    latest = {row["index"]: row for row in _rows(folder / MANIFEST) if "error" not in row}
    for index, settings in wanted.items():
        if (row := latest.get(index)) is None:
            continue
        changed = difference_of({key: value for key, value in row.items() if key not in RESULTS}, settings)
        if changed and not force:
            held = f"{shortened(str(folder))} holds line {index + 1} with other settings: {changed}"
            raise ArgumentError("output_dir", f"{held}; name another folder, or replace it with --force")
        file = folder / str(row.get("file"))
        if not changed and file.is_file() and _checksum(file) == row.get("sha256"):
            finished.add(index)
    return finished


def _rows(manifest: Path) -> list[dict[str, Any]]:
    rows = []
    for line in manifest.read_bytes().splitlines() if manifest.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows += [row] if isinstance(row, dict) and isinstance(row.get("index"), int) else []
    return rows


def _end_last_line(manifest: Path) -> None:
    """Repair the last line after a crash: a complete row gets its newline, a partial row is removed."""
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
    with explained_writing(manifest), manifest.open("ab") as file:
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
