"""Write files atomically, and compare settings before interrupted work resumes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name in its folder and rename it; write devices and pipes directly."""
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    part = path.with_name(f"part-{path.name}")
    part.write_bytes(data)
    os.replace(part, path)


def difference_of(found: dict[str, Any], request: dict[str, Any]) -> str | None:
    """Return the keys whose values differ, with both values of the first key; None if all are equal."""
    differing = [key for key in {**found, **request} if found.get(key) != request.get(key)]
    if not differing:
        return None
    key = differing[0]
    return f"{', '.join(differing)} ({key}: {found.get(key)!r} there, {request.get(key)!r} now)"


def repository_and_file(source: str) -> tuple[str, str | None]:
    """Split ``OWNER/NAME/FILE`` on the Hub into repository and file; a local path has no file part."""
    if Path(source).exists():
        return source, None
    owner, name, *file = source.split("/", 2)
    return f"{owner}/{name}", file[0] if file else None
