"""Log of requests: the client's id or a drawn one, a line at the end, and spans where OpenTelemetry is installed."""

import json
import logging
import re
import secrets
import time
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dit_accel.serving.dispatcher import Task
from dit_accel.serving.engine import Cancelled, Made
from dit_accel.serving.http.api import Limits, RequestError, answered
from dit_accel.serving.http.metrics import Metrics

logger = logging.getLogger(__name__)
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
USUAL_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")  # others could forge lines


class Entry:
    """A request, whose task, results and error the routes note."""

    def __init__(self, scope: Scope, metrics: Metrics) -> None:
        self._headers, self._metrics = Headers(scope=scope), metrics
        sent = self._headers.get("x-request-id", "")
        self.id = sent if USUAL_ID.fullmatch(sent) else secrets.token_hex(16)
        self.name, self.began = f"{scope['method']} {scope['path']}", time.monotonic()
        self.task: Task | None = None
        self.results: list[Made] = []
        self.error: RequestError | None = None
        self.status = 0  # of the answer's head; none if the client left
        self._asked: dict[str, Any] = {}

    def take(self, task: Task) -> None:
        settings, task.created = task.jobs[0].settings, self.began
        size = "x".join(str(settings.get(side, "auto")) for side in ("width", "height"))
        self.task, self._asked = task, {"model": task.model, "preset": task.preset and task.preset.name, "size": size}
        self._asked |= {name: settings[name] for name in ("steps", "loras") if name in settings}

    def end(self) -> None:
        """Count the request, log it, and report its spans."""
        ended = time.monotonic()
        begun = (self.task and self.task.started) or ended
        outcome = self._metrics.take(self.error, ended - self.began, self.results)
        status = self.error.status if self.error else self.status
        facts = {"request_id": self.id, "status": status, "outcome": outcome, **self._asked}
        facts |= {"error": self.error.message} if self.error else {}
        facts |= {"queue_seconds": round(begun - self.began, 3), "run_seconds": round(ended - begun, 3)}
        facts["computed_fractions"] = [result.computed_fraction for result in self.results]
        facts["batch_sizes"] = [len(result.batch) for result in self.results]
        facts["contracts"] = [result.contract for result in self.results]
        logger.info(self.name, extra={"facts": facts})
        parts = {"queue": (self.began, begun), "run": (begun, ended)} if self.task else {}
        self._trace(facts, {self.name: (self.began, ended), **parts})

    def _trace(self, facts: dict[str, Any], times: dict[str, tuple[float, float]]) -> None:
        """Report spans with their times, the first within the client's ``traceparent`` and the others within it."""
        try:
            from opentelemetry import propagate, trace
        except ImportError:
            return
        tracer, context = trace.get_tracer("dit_accel"), propagate.extract(self._headers)
        values = {f"dit_accel.{name}": it for name, it in facts.items() if isinstance(it, str | int | float)}
        zero, whole = time.time() - time.monotonic(), None
        for name, span in times.items():
            start, end = (round(1e9 * (zero + seconds)) for seconds in span)
            part = tracer.start_span(name, context, attributes=values, start_time=start)
            if whole is None:
                whole, context = part, trace.set_span_in_context(part, context)
            if self.error is not None:
                part.set_status(trace.StatusCode.ERROR, self.error.message)
            part.end(end)


def logged(app: ASGIApp, metrics: Metrics) -> ASGIApp:
    """Return an ASGI application that gives each request of another one an id, and each POST a line in the log."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["entry"] = entry = Entry(scope, metrics)
        request_id.set(entry.id)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = entry.id
            await send(message)

        try:
            await app(scope, receive, answer)
        except ConnectionAbortedError:
            pass  # a growing file broke off: uvicorn closes the connection of an answer without its end
        finally:
            is_over = (task := entry.task) is None or entry.status != 200 or not task.outlives_answer
            if is_over and task is not None:
                task.cancel()
            if is_over and (not entry.status or (task and len(entry.results) < len(task.jobs))):
                entry.error = entry.error or answered(Cancelled(), Limits())  # its client left, or the server ends
            if is_over and scope["method"] == "POST" and not getattr(task, "outlives_answer", False):
                entry.end()

    return run


class TextLines(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        return f"{record.levelname} [{request_id.get() or '-'}] {record.message}"


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": when, "level": record.levelname, "message": record.getMessage(), "request_id": request_id.get()}
        problem = {"traceback": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps(line | getattr(record, "facts", {}) | problem)
