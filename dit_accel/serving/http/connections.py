"""Connections of a server: those of uvicorn, with limits on clients that send or read too slowly."""

import asyncio
from typing import Any

import h11
import uvicorn
from uvicorn.config import LOGGING_CONFIG
from uvicorn.protocols.http.h11_impl import H11Protocol

from dit_accel.serving.http import bodies
from dit_accel.serving.http.api import Limits
from dit_accel.serving.http.log import JsonLines, TextLines

SLOWEST_READER = 60.0  # seconds in which a client has to read some of an answer


class Connection(H11Protocol):
    """A connection that ends if a request does not arrive in time, or if the client stops reading an answer."""

    _awaited: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._awaited, self._unread):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _await_request(self) -> None:
        """Limit the time until a whole request is here: to that of a body, twice, as its head takes time too."""
        is_awaited = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if is_awaited and self._awaited is None:
            self._awaited = self.loop.call_later(2 * bodies.SLOWEST_BODY, self.transport.close)
        elif not is_awaited and self._awaited is not None:
            self._awaited.cancel()
            self._awaited = None

    def _await_reader(self, before: int | None = None) -> None:
        """End the connection if none of ``before`` unread bytes was read; otherwise look again later."""
        unread = self.transport.get_write_buffer_size()
        if before is not None and unread >= before:
            self.transport.abort()
        else:
            self._unread = self.loop.call_later(SLOWEST_READER, self._await_reader, unread)


def configured(app: Any, limits: Limits, *, log_json: bool = False, **more: Any) -> uvicorn.Config:
    line, level = (JsonLines, "INFO") if log_json else (TextLines, "WARNING")
    loggers = {"dit_accel.serving": {"handlers": ["default"], "level": level}}
    loggers |= LOGGING_CONFIG["loggers"] | {"python_multipart": {"level": "ERROR"}}  # it warns of each broken form
    formatters = LOGGING_CONFIG["formatters"] | {"default": {"()": line}}
    more |= {"log_config": LOGGING_CONFIG | {"loggers": loggers, "formatters": formatters}, "log_level": "error"}
    more |= {"ws": "none", "lifespan": "off", "access_log": False, "server_header": False}
    return uvicorn.Config(app, http=Connection, timeout_graceful_shutdown=round(limits.seconds) + 1, **more)
