"""Read the body of a request, bytes or a form; a client that disconnects meanwhile raises ``Cancelled``."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

from fastapi import Request
from python_multipart.multipart import parse_options_header
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from dit_accel.errors import shortened
from dit_accel.serving.engine import Cancelled, VideoForm
from dit_accel.serving.http.api import Models, RequestError, Served
from dit_accel.serving.http.requests import AnyPrompt, EditRequest, VideoRequest, read

SLOWEST_BODY = 10.0  # seconds
UNKNOWN = VideoForm(1.0, 2**31, True)  # of a model that has not loaded: all durations are within limits
MOST_FIELDS = 100  # of a form, and as many files


class FormParser(MultiPartParser):
    """Parser that refuses a part without a body, whose field starlette would drop or join to the next one."""

    delimiter: bytes  # of parts, at the beginning of a line

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if data.startswith(self.delimiter, start):
            name = shortened(self._current_part.field_name)
            raise RequestError(f"the form's field {name!r} has no body", name, "invalid_form")
        super().on_part_data(data, start, end)


async def received(request: Request, kind: type[AnyPrompt], models: Models) -> tuple[AnyPrompt, Served]:
    """Read and check a request, for the model that it names: edits are forms, images JSON, and videos either."""
    is_form = _is_form(request) if issubclass(kind, VideoRequest) else issubclass(kind, EditRequest)
    most = models.limits.upload if is_form else models.limits.body
    body = await (read_form if is_form else read_body)(request, most)
    makes_videos = issubclass(kind, VideoRequest)
    wanted = await asyncio.to_thread(read, body, kind, replace(models.first, form=UNKNOWN if makes_videos else None))
    served = await models.find(wanted.model)  # which loads nothing for a request that is refused
    if makes_videos != (served.form is not None):
        makes = "images, no videos: use /v1/images/generations" if makes_videos else "videos, no images: use /v1/videos"
        raise RequestError(f"{served.model} makes {makes}", code="unsupported")
    return await asyncio.to_thread(read, body, kind, served) if makes_videos else wanted, served


def _is_form(request: Request) -> bool:
    return request.headers.get("content-type", "").lower().startswith("multipart/form-data")


async def read_body(request: Request, most: int) -> bytes:
    body = bytearray()
    too_long = RequestError(f"the body must have at most {most:,} bytes", code="body_too_large", status=413)
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > most):
        raise too_long
    try:
        async with asyncio.timeout(SLOWEST_BODY):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise too_long
    except TimeoutError:
        raise RequestError(f"the body took over {SLOWEST_BODY:g} s", code="body_too_slow", status=408) from None
    except ClientDisconnect:
        raise Cancelled from None
    return bytes(body)


async def read_form(request: Request, most: int) -> list[tuple[str, str | bytes]]:
    body = await read_body(request, most)

    async def chunks() -> AsyncGenerator[bytes, None]:
        yield body

    try:
        _, options = parse_options_header(request.headers.get("content-type"))
        if not _is_form(request):
            raise MultiPartException("Content-Type is another one.")
        delimiter = b"--" + options.get(b"boundary", b"")
        if b"\r\n%b--" % delimiter not in b"\r\n" + body:  # starlette would drop fields
            raise MultiPartException("Its last boundary is missing.")
        parser = FormParser(request.headers, chunks(), max_files=MOST_FIELDS, max_fields=MOST_FIELDS)
        parser.delimiter = delimiter
        form = await parser.parse()
    except (MultiPartException, ValueError) as error:
        raise RequestError(f"the body is no valid form: {shortened(str(error))}", code="invalid_form") from None
    try:
        return [(name, value if isinstance(value, str) else await value.read()) for name, value in form.multi_items()]
    finally:
        await form.close()
