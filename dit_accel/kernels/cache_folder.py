"""Folder of compiled CUDA kernels, and of sizes that ``dit-accel env --tune`` measured."""

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    if explicit := os.environ.get("DIT_ACCEL_CACHE"):
        return Path(explicit)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dit_accel"
    except RuntimeError:  # a user without a home folder, as in some containers
        return Path(tempfile.gettempdir()) / f"dit_accel-{os.getuid()}"
