"""Describe the device, versions and command of a measurement."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

CHECKOUT = Path(__file__).parents[3]


def describe_run(device: str | torch.device) -> dict[str, Any]:
    """Return device, driver, versions, commit and command of this process; missing values are None."""
    on_gpu = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or "CPU",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        **{package: version_of(package) for package in ("triton", "flash-attn-4", "diffusers", "cache-dit")},
        # DIT_ACCEL_COMMIT names the commit if the tree has no git history or another one.
        "commit": os.environ.get("DIT_ACCEL_COMMIT") or commit_of(CHECKOUT) or "unknown",
        "command": " ".join([Path(sys.executable).name, *sys.orig_argv[1:]]),
    }


def commit_of(checkout: Path) -> str | None:
    """Return the commit of a checkout; None if the folder is none, even inside another repository."""
    return _output("git", "-C", str(checkout), "rev-parse", "HEAD") if (checkout / ".git").exists() else None


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    return lines[0].strip() if lines else None
