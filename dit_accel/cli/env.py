"""``dit-accel env``: versions, devices and kernel backends, for bug reports."""

from __future__ import annotations

import typer

from dit_accel.tools.extras import EXTRAS

PACKAGES = ("torch", "diffusers", "transformers", "triton", *EXTRAS)


def command() -> None:
    """Print versions, devices, and which kernel backends work here."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch

    import dit_accel
    from dit_accel.kernels.backends import backend_status

    rows = {
        "dit-accel": dit_accel.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
    }
    for package in PACKAGES:
        try:
            rows[package] = version(package)
        except PackageNotFoundError:
            rows[package] = "not installed"
    rows["CUDA"] = torch.version.cuda or "not in this build of torch"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        rows[f"cuda:{index}"] = f"{properties.name}, sm_{properties.major}{properties.minor}, {memory:.0f} GiB"
    rows |= {f"kernels: {backend}": status for backend, status in backend_status().items()}
    width = max(map(len, rows))
    for name, value in rows.items():
        typer.echo(f"{name:<{width}}  {value}")
