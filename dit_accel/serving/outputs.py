"""Check output files before any computation, so that no run is lost to a wrong name."""

import os
from collections.abc import Iterable
from pathlib import Path

from dit_accel.errors import ArgumentError, shortened

PLOT_SUFFIXES = (".png", ".jpg", ".webp", ".pdf", ".svg")


def require_writable(path: Path, field: str, *, force: bool) -> None:
    """Check that the file ``path`` can be written, and does not exist yet unless ``force``."""
    try:
        problem = _problem(path, force)
    except (OSError, ValueError) as error:
        problem = f"can't be written: {getattr(error, 'strerror', None) or error}"
    if problem is not None:
        raise ArgumentError(field, f"{shortened(str(path))} {problem}")


def require_plot(path: Path, field: str, *, force: bool) -> None:
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise ArgumentError(field, f"{shortened(str(path))} must end in one of {', '.join(PLOT_SUFFIXES)}")
    require_writable(path, field, force=force)


def require_distinct(outputs: Iterable[tuple[str, Path]]) -> None:
    fields: dict[str, str] = {}
    for field, path in outputs:
        other = fields.setdefault(os.path.realpath(path), field)
        if other != field:
            raise ArgumentError(field, f"{path} is also the file of {other}; name another file")


def make_folder(folder: Path, field: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(field, f"{shortened(str(folder))} can't be created: {reason}") from None


def _problem(path: Path, force: bool) -> str | None:
    target = Path(os.path.realpath(path))
    if target.is_dir():
        return "is a folder; give the name of a file"
    if not target.parent.is_dir():
        return f"can't be written: folder {target.parent} does not exist; create it first"
    existed = target.exists()
    if existed and not target.is_file():
        return None  # a device or a pipe
    if existed and not force:
        return "exists; name another file, or replace it with --force"
    target.open("ab").close()
    if not existed:
        try:
            target.write_bytes(bytes(2**16))  # fails on a full disk
        finally:
            target.unlink()
    return None
