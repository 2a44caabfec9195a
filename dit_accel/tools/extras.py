"""Optional packages, and the extras that install them."""

from importlib.util import find_spec

from dit_accel.errors import UnsupportedError

EXTRAS = {"matplotlib": "plots", "imageio-ffmpeg": "video", "peft": "lora", "torchao": "quantize", "ray": "ray"}
EXTRAS |= {"gradio": "app"} | dict.fromkeys(("fastapi", "uvicorn", "prometheus_client", "python_multipart"), "serve")


def require_extra(package: str, what: str) -> None:
    """Check that a package of `EXTRAS` is installed, without importing it; errors begin with ``what``."""
    if find_spec(package.replace("-", "_")) is None:
        install = f"pip install -e '.[{EXTRAS[package]}]' in a checkout"
        raise UnsupportedError(f"{what} needs {package}, which is not installed: {install}")
