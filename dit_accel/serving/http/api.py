"""Limits of requests, and errors in the form of OpenAI's interface."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from dit_accel.errors import ArgumentError, DitAccelError, PresetError, UnsupportedError, shortened, shown
from dit_accel.presets import Preset
from dit_accel.presets.complaints import did_you_mean
from dit_accel.serving.dispatcher import Busy, Cancelled
from dit_accel.serving.engine import VideoForm


@dataclass(frozen=True)
class Limits:
    """Largest values of a request.

    Args:
        side: pixels of a side.
        images: images per request.
        body: bytes of a JSON body.
        upload: bytes of a body with an image.
        seconds: from the request to its answer, including the time in the queue; of a video, seconds of its run.
        frames: frames of a video.
        videos: number of finished videos that are kept for each API key, and of failed ones.
        video_bytes: bytes of the finished videos that are kept for each API key; the latest stays, whatever its size.
        kept: seconds that a finished video is kept.
    """

    side: int = 2048
    steps: int = 100
    images: int = 4
    body: int = 65_536
    seconds: float = 600.0
    upload: int = 20 * 2**20
    frames: int = 300
    videos: int = 64
    video_bytes: int = 4 * 2**30
    kept: float = 3600.0


@dataclass(frozen=True)
class Served:
    """The model of a server.

    Args:
        model: name that clients use.
        preset: of requests that name none; None = plain.
        form: of its videos; None = it makes images.
    """

    model: str
    preset: Preset | None
    limits: Limits
    form: VideoForm | None = None


class RequestError(Exception):
    """Error of a request, with OpenAI's fields and an HTTP status."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status
        self.headers = headers

    def to_json(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def answered(error: BaseException, limits: Limits) -> RequestError:
    """Return the answer to an error of a request's run."""
    match error:
        case RequestError():
            return error
        case Busy():
            return RequestError(str(error), code="busy", status=503, headers=_retry_after(error.wait))
        case Cancelled() | CancelledError():
            return RequestError("the server is shutting down", code="busy", status=503, headers=_retry_after(10))
        case TimeoutError():
            return RequestError(f"not finished after {limits.seconds:g} seconds", code="timeout", status=504)
        case ArgumentError():
            return RequestError(str(error), error.field, "unsupported")
        case PresetError() | UnsupportedError():
            return RequestError(str(error), "preset" if isinstance(error, PresetError) else None, "unsupported")
        case DitAccelError():
            return RequestError(str(error), code="failed", status=500)
    return RequestError("the request failed; the server's log has the reason", code="failed", status=500)


def _retry_after(seconds: int) -> dict[str, str]:
    return {"Retry-After": str(seconds)}


def explained(error: Any, kind: type[BaseModel]) -> RequestError:
    """Return the answer to a failed validation."""
    param = shortened(str(error["loc"][0])) if error["loc"] else None
    match error["type"]:
        case "extra_forbidden":
            meant = did_you_mean(param or "", kind.model_fields)
            names = ", ".join(kind.model_fields)
            return RequestError(f"unknown field {param!r}{meant}; fields are {names}", param, "unknown_parameter")
        case "missing":
            return RequestError(f"{param} is required", param, "missing_required_parameter")
        case "json_invalid" | "model_type":
            return RequestError(f"the body must be a JSON object: {error['msg']}", code="invalid_json")
    return RequestError(f"{param}: {error['msg']}, got {shown(error['input'])}", param, "invalid_value")
