"""Requests and errors of OpenAI's interface for images, as the server reads and writes them."""

from __future__ import annotations

import re
import secrets
from asyncio import CancelledError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any, ClassVar, Literal, TypeVar

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError

from dit_accel.errors import DitAccelError, OptionError, PresetError, UnsupportedError, shortened, shown
from dit_accel.presets import Preset, default_preset, preset_names
from dit_accel.presets.complaints import did_you_mean
from dit_accel.serving.dispatcher import Busy, Cancelled
from dit_accel.serving.prompts import Job

LONGEST_PROMPT = 4000  # characters
SIDE_UNIT = 16  # pixels of one token in most models
SUFFIXES = {"png": ".png", "jpeg": ".jpg", "webp": ".webp"}


@dataclass(frozen=True)
class Limits:
    """Largest values of a request.

    Args:
        side: pixels of a side.
        images: images per request.
        body: bytes of a JSON body.
        upload: bytes of a body with an image.
        seconds: from the request to its answer, including the time in the queue.
    """

    side: int = 2048
    steps: int = 100
    images: int = 4
    body: int = 65_536
    seconds: float = 600.0
    upload: int = 20 * 2**20


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


class ImageRequest(BaseModel):
    """Body of ``POST /v1/images/generations``: OpenAI's fields, and seed, steps, guidance, preset, target_error and
    negative_prompt.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    event: ClassVar[str] = "image_generation"  # beginning of the names of its server-sent events
    prompt: str = Field(min_length=1, max_length=LONGEST_PROMPT)
    model: str | None = None
    n: int = Field(1, ge=1)
    size: str = Field("auto", pattern=r"^(auto|[0-9]{1,5}x[0-9]{1,5})$")
    response_format: Literal["b64_json"] = "b64_json"
    output_format: Literal["png", "jpeg", "webp"] = "png"
    stream: bool = False
    user: str | None = None
    negative_prompt: str | None = Field(None, max_length=LONGEST_PROMPT)
    seed: int | None = Field(None, ge=0, lt=2**63)
    steps: int | None = Field(None, ge=1)
    guidance: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    preset: str | None = None
    target_error: float | None = Field(None, gt=0, allow_inf_nan=False)

    @property
    def suffix(self) -> str:
        return SUFFIXES[self.output_format]

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """Width and height in pixels; None = the model's."""
        if self.size == "auto":
            return None, None
        width, height = map(int, self.size.split("x"))
        return width, height

    def jobs(self) -> list[Job]:
        """Return a job for each image, with seeds that follow each other."""
        width, height = self.sides
        first = secrets.randbelow(2**32) if self.seed is None else self.seed
        settings = {
            "prompt": self.prompt,
            "negative-prompt": self.negative_prompt,
            "steps": self.steps,
            "height": height,
            "width": width,
            "guidance": self.guidance,
        }
        given = {key: value for key, value in settings.items() if value is not None}
        return [Job(index, {**given, "seed": first + index}) for index in range(self.n)]


AnyRequest = TypeVar("AnyRequest", bound=ImageRequest)


class EditRequest(ImageRequest):
    """Form of ``POST /v1/images/edits``: the fields of :class:`ImageRequest`, ``strength``, and the input image."""

    event: ClassVar[str] = "image_edit"
    image: InstanceOf[Image.Image]
    strength: float | None = Field(None, gt=0, le=1)

    def jobs(self) -> list[Job]:
        own = {"image": self.image} | ({} if self.strength is None else {"strength": self.strength})
        return [replace(job, settings=job.settings | own) for job in super().jobs()]


def read_request(body: bytes, limits: Limits, model: str) -> ImageRequest:
    """Parse and check a JSON body.

    Args:
        model: name of the only model.

    Raises:
        RequestError: a field is missing, unknown, of another type, or beyond the limits.
    """
    try:
        request = ImageRequest.model_validate_json(body)
    except ValidationError as failure:
        raise _explained(failure.errors()[0], ImageRequest) from None
    return _within(request, limits, model)


def read_edit(fields: Sequence[tuple[str, str | bytes]], limits: Limits, model: str) -> EditRequest:
    """Check the fields of a form, and decode its image.

    Args:
        fields: names and values; those of files are bytes.
        model: name of the only model.

    Raises:
        RequestError: as in :func:`read_request`; or the image can't be read or is too large.
    """
    values: dict[str, Any] = {}
    for name, value in fields:
        name = "image" if name == "image[]" else name  # which OpenAI's client sends for a list
        if name in values:
            raise RequestError(f"{shortened(name)} must be given once", shortened(name), "invalid_value")
        if isinstance(value, bytes) != (name == "image") and name in EditRequest.model_fields:
            kind = "a file" if name == "image" else "text, not a file"
            raise RequestError(f"{name} must be {kind}", name, "invalid_value")
        values[name] = _decoded(value, limits) if isinstance(value, bytes) and name == "image" else value
    try:
        request = EditRequest.model_validate(values, strict=False)  # numbers of a form are text
    except ValidationError as failure:
        raise _explained(failure.errors()[0], EditRequest) from None
    return _within(request, limits, model)


def _decoded(file: bytes, limits: Limits) -> Image.Image:
    try:
        with Image.open(BytesIO(file), formats=[name.upper() for name in SUFFIXES]) as image:
            if max(image.size) > limits.side:
                size = "x".join(map(str, image.size))
                message = f"image must have sides of at most {limits.side:,} pixels, got {size}"
                raise RequestError(message, "image", "limit_exceeded")
            return image.convert("RGB")
    except RequestError:
        raise
    except Exception:  # decoders raise errors of any type for broken files
        raise RequestError(f"image must be a {', '.join(SUFFIXES)} file", "image", "invalid_value") from None


def _within(request: AnyRequest, limits: Limits, model: str) -> AnyRequest:
    """Return the request; raise a ``RequestError`` if it is for another model, or beyond the limits."""
    if request.model not in (None, model):
        message = f"model {shown(request.model)} does not exist; this server has {model}"
        raise RequestError(message, "model", "model_not_found", 404)
    for param, value, most in (("n", request.n, limits.images), ("steps", request.steps or 1, limits.steps)):
        if value > most:
            raise RequestError(f"{param} must be at most {most:,}, got {value:,}", param, "limit_exceeded")
    for side in request.sides:
        if side is not None and (side % SIDE_UNIT or not SIDE_UNIT <= side <= limits.side):
            rule = f"sides of {SIDE_UNIT} to {limits.side:,} pixels, multiples of {SIDE_UNIT}"
            raise RequestError(f"size must have {rule}, got {request.size}", "size", "invalid_value")
    return request


def requested_preset(request: ImageRequest, default: Preset | None) -> Preset | None:
    """Return the preset of a request for images, None = plain.

    Args:
        default: the server's preset.

    Raises:
        RequestError: the preset is unknown, or has no such target.
    """
    from dit_accel.models.presets import load_preset

    if request.preset not in (None, "none", *preset_names()):  # a path of the server is no preset
        meant = did_you_mean(request.preset, preset_names())
        raise RequestError(f"preset {shown(request.preset)} does not exist{meant}", "preset", "invalid_value")
    named = default if request.preset is None else None if request.preset == "none" else request.preset
    changes = {} if request.target_error is None else {"target_error": request.target_error}
    if named is None:
        if changes:
            raise RequestError("target_error needs a preset, but none runs the plain pipeline", "target_error")
        return None
    try:
        return load_preset(default_preset(named, is_video=False), **changes)
    except PresetError as error:
        raise RequestError(str(error), "target_error" if changes else "preset", "invalid_value") from None


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
        case OptionError():
            option, message = error.args
            return RequestError(f"{_fields(option)}: {_fields(message)}", _fields(option), "unsupported")
        case PresetError() | UnsupportedError():
            return RequestError(
                _fields(str(error)), "preset" if isinstance(error, PresetError) else None, "unsupported"
            )
        case DitAccelError():
            return RequestError(str(error), code="failed", status=500)
    return RequestError("the request failed; the server's log has the reason", code="failed", status=500)


def _retry_after(seconds: int) -> dict[str, str]:
    return {"Retry-After": str(seconds)}


def _fields(text: str) -> str:
    """Replace names of options in a message by names of fields: ``--negative-prompt`` by ``negative_prompt``."""
    return re.sub(r"--([a-z][a-z-]*)", lambda found: found[1].replace("-", "_"), text)


def _explained(error: Any, kind: type[ImageRequest]) -> RequestError:
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
