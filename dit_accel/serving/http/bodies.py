"""Read the body of a request: bytes up to a limit, or the fields of a form.

A client that disconnects meanwhile raises ``Cancelled``.
"""

import asyncio
from collections.abc import AsyncGenerator

from fastapi import Request
from starlette.datastructures import FormData
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from dit_accel.errors import shortened
from dit_accel.serving.engine import Cancelled
from dit_accel.serving.http.api import Models, RequestError, Served, model_in
from dit_accel.serving.http.requests import AnyRequest, EditRequest, VideoRequest, read

SLOWEST_BODY = 10.0  # seconds
MOST_FIELDS = 100  # of a form, and as many files


async def received(request: Request, kind: type[AnyRequest], models: Models) -> tuple[AnyRequest, Served]:
    """Read and check a request, for the model that it names: edits are forms, images JSON, and videos either."""
    is_form = _is_form(request) if issubclass(kind, VideoRequest) else issubclass(kind, EditRequest)
    most = models.limits.upload if is_form else models.limits.body
    body = await (read_form if is_form else read_body)(request, most)
    served = await models.find(await asyncio.to_thread(model_in, body))
    served.require(videos=issubclass(kind, VideoRequest))
    return await asyncio.to_thread(read, body, kind, served), served


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
        late = f"the body must arrive within {SLOWEST_BODY:g} seconds"
        raise RequestError(late, code="body_too_slow", status=408) from None
    except ClientDisconnect:
        raise Cancelled from None
    return bytes(body)


class _WholeForm(MultiPartParser):
    """Parser that refuses a form without its last boundary; starlette drops the fields at such an end."""

    _is_whole = False

    def on_end(self) -> None:
        self._is_whole = True

    async def parse(self) -> FormData:
        self.stream = self._until_end(self.stream)
        return await super().parse()

    async def _until_end(self, chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        async for chunk in chunks:
            yield chunk
        if not self._is_whole:  # while the form is parsed, so that the files of all its parts are closed
            raise MultiPartException("Its last boundary is missing.")


async def read_form(request: Request, most: int) -> list[tuple[str, str | bytes]]:
    async def chunks() -> AsyncGenerator[bytes, None]:
        yield await read_body(request, most)

    try:
        if not _is_form(request):
            raise MultiPartException("Content-Type is another one.")
        parser = _WholeForm(request.headers, chunks(), max_files=MOST_FIELDS, max_fields=MOST_FIELDS)
        form = await parser.parse()
    except (MultiPartException, ValueError) as error:
        message = f"the body must be multipart/form-data: {shortened(str(error))}"
        raise RequestError(message, code="invalid_form") from None
    try:
        return [(name, value if isinstance(value, str) else await value.read()) for name, value in form.multi_items()]
    finally:
        await form.close()
