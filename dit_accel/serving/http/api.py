"""Models of a server, limits of requests, and errors in the form of OpenAI's interface."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from dit_accel.errors import ArgumentError, DitAccelError, PresetError, UnsupportedError, shortened, shown
from dit_accel.presets import Preset
from dit_accel.presets.complaints import did_you_mean
from dit_accel.serving.dispatcher import AwaitedTask, Busy, Dispatcher
from dit_accel.serving.engine import Cancelled, VideoForm

Fields = Sequence[tuple[str, str | bytes]]  # of a form or a query; bytes for files
Head = Mapping[str, str] | None  # headers of an answer


@dataclass(frozen=True)
class Limits:
    """Largest values of a request, and of the finished videos that are kept for each API key."""

    side: int = 2048  # pixels
    steps: int = 100
    images: int = 4
    body: int = 65_536  # bytes of JSON
    seconds: float = 600.0  # from the request to its answer, with the time in the queue; of a video's run alone
    upload: int = 20 * 2**20  # bytes of a body with an image
    frames: int = 300
    videos: int = 64  # finished ones, and as many failed ones
    video_bytes: int = 4 * 2**30  # the latest video stays, whatever its size
    kept: float = 3600.0  # seconds


@dataclass(frozen=True)
class Served:
    model: str
    preset: Preset | None  # of requests that name none; None = plain
    limits: Limits
    form: VideoForm | None = None  # None = it makes images
    loras: Collection[str] = ()  # names


class RequestError(Exception):
    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400, headers: Head = None
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status
        self.headers = headers
        self.outcome = code if code in ("busy", "timeout") else "invalid" if status < 500 else "failed"

    def to_json(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Models:
    """The models of a server by name; requests that name none run on the first."""

    def __init__(self, dispatcher: Dispatcher, first: Served, others: Sequence[str] = ()) -> None:
        self.first, self.names, self.limits = first, [first.model, *others], first.limits
        self._dispatcher, self.loaded = dispatcher, {first.model: first}

    async def find(self, name: str | None) -> Served:
        """Return a model with its facts, for which a worker loads it the first time."""
        if (name := name or self.first.model) in self.loaded:
            return self.loaded[name]
        if name not in self.names:
            message = f"model {shown(name)} does not exist; this server has {', '.join(self.names)}"
            raise RequestError(message, "model", "model_not_found", 404)
        task = AwaitedTask([], None, "")
        task.model = name
        self._dispatcher.add(task)
        try:
            async with asyncio.timeout(self.limits.seconds):
                async for _ in task:
                    pass
        finally:
            task.cancel()  # it may still wait
        assert task.loaded is not None  # without an error
        self.loaded[name] = replace(self.first, model=name, preset=task.loaded.requested, form=task.loaded.form)
        return self.loaded[name]


def answered(error: BaseException, limits: Limits) -> RequestError:
    match error:
        case RequestError():
            return error
        case Busy():
            return RequestError(str(error), code="busy", status=503, headers={"Retry-After": str(error.wait)})
        case Cancelled() | asyncio.CancelledError() | GeneratorExit():
            answer = answered(Busy("the server is shutting down", 10), limits)
            answer.outcome = "cancelled"
            return answer
        case TimeoutError():
            return RequestError(f"not finished after {limits.seconds:g} seconds", code="timeout", status=504)
        case ArgumentError():
            return RequestError(str(error), error.field, "unsupported")
        case PresetError() | UnsupportedError():
            return RequestError(str(error), "preset" if isinstance(error, PresetError) else None, "unsupported")
        case DitAccelError():
            return RequestError(str(error), code="failed", status=500)
    return RequestError("the request failed; the server's log has the reason", code="failed", status=500)


def explained(error: Any, kind: type[BaseModel]) -> RequestError:
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
        case "value_error":  # an ArgumentError, for example
            return answered(error["ctx"]["error"], Limits())
    got = "" if param in ("prompt", "negative_prompt") else f", got {shown(error['input'])}"  # the log has no prompts
    return RequestError(f"{param}: {error['msg']}{got}", param, "invalid_value")
