"""Write files atomically, and read results of interrupted work if its settings are the same."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dit_accel.errors import ArgumentError, OutputError, shortened, shown

if TYPE_CHECKING:
    from PIL import Image

INDICES = ("model_index.json", "modular_model_index.json")  # of a standard and of a modular pipeline
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary name in a file's folder, which is renamed after the block; devices and pipes keep their name.

    Nothing is left of a file that can't be written, which is an OutputError.
    """
    target = Path(os.path.realpath(path))
    is_file = target.is_file() or not target.exists()
    part = target.with_name(f"part-{target.name[-60:]}") if is_file else target  # names have up to 255 bytes
    try:
        with explained_writing(path):
            yield part
            if is_file:
                os.replace(part, target)
    except BaseException:
        if is_file:
            part.unlink(missing_ok=True)
        raise


@contextmanager
def explained_writing(path: Path) -> Iterator[None]:
    """Within the block, turn system errors into an ``OutputError`` that names the file and the reason."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(why_not_written(error, path)) from None


def why_not_written(error: OSError, path: Path | str) -> str:
    """Return the message of a system error in writing."""
    fix = "; free some space there, or write to another disk" if error.errno in FULL else ""
    return f"{shortened(str(path))} can't be written: {error.strerror or shortened(str(error))}{fix}"


def write_whole(path: Path, content: str | bytes) -> None:
    with whole_file(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


def save_image(image: Image.Image, path: Path) -> None:
    """Write an image as :func:`whole_file`, in the format of its suffix."""
    with whole_file(path) as part:
        image.save(part, compress_level=1)  # of PNG: a third of level 6's time, during which a server's GPU waits


def pipeline_index(folder: Path) -> dict[str, Any] | None:
    """Return the index of a pipeline's folder, None without one; raise ``ArgumentError`` if it is no JSON object."""
    file = next((path for name in INDICES if (path := folder / name).is_file()), None)
    if file is None:
        return None
    try:
        index = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError("model", f"{file} can't be read: {shortened(str(error))}") from None
    if not isinstance(index, dict):
        raise ArgumentError("model", f"{file} must hold a JSON object, got {shown(index)}")
    return index


def read_results(
    file: Path, settings: dict[str, Any], *, key: str, kind: str, remove: str, error: type[Exception]
) -> dict[str, Any]:
    """Return saved results, a JSON mapping whose ``key`` holds their settings.

    Raise ``error`` if the file holds no results, or results of other settings, whose difference the message names.
    ``kind`` and ``remove`` are words of it: the kind of the results, such as "tuning", and what to remove.
    """
    fix = f"name another output, or remove {remove}"
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        difference = difference_of(document[key], settings)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise error(f"{file} holds no {kind}: {fix}") from None
    if difference is not None:
        fix = f"use the same settings to resume, {fix}"
        raise error(f"{file} holds another {kind}, which differs in {difference}: {fix}")
    return document


def difference_of(found: dict[str, Any], request: dict[str, Any]) -> str | None:
    """Return the keys whose values differ, with both values of the first key; None if all are equal."""
    differing = [key for key in {**found, **request} if found.get(key) != request.get(key)]
    if not differing:
        return None
    path, there, now = first_difference(found, request)
    return f"{', '.join(differing)} ({path}: {there} there, {now} now)"


def first_difference(found: Any, now: Any) -> tuple[str, str, str]:
    """Return the dotted key of the first values that differ in two mappings, and both values as messages show them.

    A mapping on one side alone, such as a preset, is shown by its description, which is compared last.
    """
    differing = []
    if isinstance(found, dict) and isinstance(now, dict):
        differing = [key for key in {**found, **now} if found.get(key) != now.get(key)]
    if not differing:
        there, here = (side.get("description", side) if isinstance(side, dict) else side for side in (found, now))
        return "", shown(there), shown(here)
    key = min(differing, key=lambda name: name == "description")
    inside, *both = first_difference(found.get(key), now.get(key))
    return (f"{key}.{inside}" if inside else key, *both)


def repository_and_file(source: str) -> tuple[str, str | None]:
    """Split ``OWNER/NAME/FILE`` on the Hub into repository and file; a local path has no file part."""
    if Path(source).exists():
        return source, None
    owner, name, *file = source.split("/", 2)
    return f"{owner}/{name}", file[0] if file else None
