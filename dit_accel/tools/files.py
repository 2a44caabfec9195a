"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file under another name in its folder, and rename it when it is whole; devices and pipes as they are."""
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    part = path.with_name(f"part-{path.name}")
    part.write_bytes(data)
    os.replace(part, path)
