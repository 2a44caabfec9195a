"""HTTP server with OpenAI's interface for images and videos: an ASGI application over a dispatcher of workers.

app = build_app(Dispatcher([worker], 16), Served("demo-flux", preset, limits), [], [], VideoStore(limits))
"""

import asyncio
import json
import signal
import socket
import time
from base64 import b64encode
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from io import BytesIO
from multiprocessing import resource_tracker
from typing import Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from PIL import Image
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException as RoutingError
from starlette.types import ASGIApp

from dit_accel.errors import ArgumentError, DitAccelError
from dit_accel.serving.dispatcher import AwaitedTask, Busy, Dispatcher, Step, Task
from dit_accel.serving.engine import Cancelled, Made
from dit_accel.serving.http.access import Access
from dit_accel.serving.http.api import Limits, Models, RequestError, Served, answered
from dit_accel.serving.http.bodies import received
from dit_accel.serving.http.connections import configured
from dit_accel.serving.http.log import logged
from dit_accel.serving.http.metrics import Metrics
from dit_accel.serving.http.requests import SUFFIXES, EditRequest, ImageRequest, requested_preset
from dit_accel.serving.http.videos import VideoServer, VideoStore

LAST_STEPS = 30.0  # seconds that cancelled runs have at the end


class ImageServer:
    """Handlers of the routes; those of images answer with an error if the model makes videos."""

    def __init__(self, dispatcher: Dispatcher, models: Models, metrics: Metrics) -> None:
        self.dispatcher, self._models, self.limits, self.metrics = dispatcher, models, models.limits, metrics
        self._started = int(time.time())

    async def generate(self, request: Request) -> Response:
        return await self._answer(request, ImageRequest)

    async def edit(self, request: Request) -> Response:
        return await self._answer(request, EditRequest)

    async def _answer(self, request: Request, kind: type[ImageRequest]) -> Response:
        wanted, served = await received(request, kind, self._models)
        task = AwaitedTask(wanted.jobs(), requested_preset(wanted, served), SUFFIXES[wanted.output_format])
        task.deadline, task.model = wanted.max_seconds, served.model
        request.state.entry.take(task)
        self.dispatcher.add(task)
        if wanted.stream:
            events = self._events(request, wanted, task)
            return StreamingResponse(events, headers={"Cache-Control": "no-store"}, media_type="text/event-stream")
        async with self._watched(request, task):
            results = request.state.entry.results = [event async for event in task if isinstance(event, Made)]
        images = [self._image(wanted, task, index, result) for index, result in enumerate(results)]
        if wanted.response_format == "url":
            for image in images:
                image["url"] = f"data:image/{wanted.output_format};base64,{image.pop('b64_json')}"
        answer = {"created": int(time.time()), "output_format": wanted.output_format, "data": images}
        return JSONResponse(answer | _notes(wanted, results))

    async def _events(self, request: Request, wanted: ImageRequest, task: AwaitedTask) -> AsyncIterator[str]:
        results, common = request.state.entry.results, {"output_format": wanted.output_format}
        partials: Counter[int] = Counter()  # partial images by job
        try:
            async with self._watched(request, task):
                async for event in task:
                    if isinstance(event, Step):
                        step = {"index": event.job.index, "step": event.done, "steps": event.steps}
                        yield _event(f"{wanted.event}.progress", step)
                        if event.part is not None:
                            partial = {"partial_image_index": partials[event.job.index], **common}
                            partials[event.job.index] += 1
                            partial |= {"index": event.job.index, "b64_json": b64encode(event.part).decode()}
                            yield _event(f"{wanted.event}.partial_image", {"created_at": int(time.time()), **partial})
                        continue
                    whole = {"created_at": int(time.time()), **common, "index": len(results)}
                    whole |= self._image(wanted, task, len(results), event) | _notes(wanted, [event])
                    results.append(event)
                    yield _event(f"{wanted.event}.completed", whole)
        except RequestError as error:
            yield _event("error", error.to_json() | {"request_id": request.state.entry.id})

    @asynccontextmanager
    async def _watched(self, request: Request, task: Task) -> AsyncIterator[None]:
        """Cancel the block's task when its client disconnects or time is up; note its error, and raise the answer."""

        async def wait_for_end() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            task.cancel()

        client = asyncio.create_task(wait_for_end())
        try:
            async with asyncio.timeout(self.limits.seconds - (time.monotonic() - task.created)):
                yield
        except BaseException as error:
            task.cancel()
            answer = request.state.entry.error = answered(error, self.limits)
            raise (answer if isinstance(error, Exception) else error) from None
        finally:
            client.cancel()

    def _image(self, wanted: ImageRequest, task: Task, index: int, result: Made) -> dict[str, Any]:
        width, height = Image.open(BytesIO(result.data)).size
        return {
            "b64_json": b64encode(result.data).decode(),
            "size": f"{width}x{height}",
            "seed": task.jobs[index].settings["seed"],
            "preset": "none" if task.preset is None else task.preset.name,
            "computed_fraction": result.computed_fraction,
            "seconds": result.stages,
            "batch_size": len(result.batch),
            "contract": result.contract,
        }

    async def models(self) -> dict[str, Any]:
        facts = {"object": "model", "created": self._started, "owned_by": "dit-accel"}
        return {"object": "list", "data": [{"id": name, **facts} for name in self._models.names]}

    async def health(self) -> JSONResponse:
        reason = self.dispatcher.failure or ("shutting down" if self.dispatcher.is_closed else None)
        state = {"status": reason or "ok", "waiting": self.dispatcher.waiting, "running": self.dispatcher.running}
        return JSONResponse(state, 503 if reason else 200)

    async def read_metrics(self) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def build_app(
    dispatcher: Dispatcher,
    served: Served,
    keys: Sequence[str],
    hosts: Collection[str],
    videos: VideoStore,
    others: Sequence[str] = (),
) -> ASGIApp:
    metrics, models = Metrics(dispatcher), Models(dispatcher, served, others)
    server, video_server = ImageServer(dispatcher, models, metrics), VideoServer(dispatcher, models, videos)
    app = FastAPI(title="dit-accel", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    protected = APIRouter(dependencies=[Depends(Access(keys, hosts).require)])
    protected.add_api_route("/v1/images/generations", server.generate, methods=["POST"])
    protected.add_api_route("/v1/images/edits", server.edit, methods=["POST"])
    video_server.add_routes(protected)
    protected.add_api_route("/v1/models", server.models, methods=["GET"])
    protected.add_api_route("/metrics", server.read_metrics, methods=["GET"])
    app.include_router(protected)
    app.add_api_route("/health", server.health, methods=["GET"])

    async def refuse(request: Request, error: Exception) -> JSONResponse:
        answer = request.state.entry.error = answered(error, served.limits)
        return JSONResponse(answer.to_json() | {"request_id": request.state.entry.id}, answer.status, answer.headers)

    for kind in (RequestError, DitAccelError, Busy, Cancelled, TimeoutError, Exception):  # uvicorn logs the last
        app.add_exception_handler(kind, refuse)

    @app.exception_handler(RoutingError)
    async def refuse_route(request: Request, error: RoutingError) -> JSONResponse:
        routes = "/v1/images/generations, /v1/images/edits, /v1/videos, /v1/models, /health and /metrics"
        code = "method_not_allowed" if error.status_code == 405 else "not_found"
        answer = RequestError(f"{error.detail}: see {routes}", None, code, error.status_code, error.headers)
        return await refuse(request, answer)

    return logged(app, metrics)


def bound_socket(host: str, port: int) -> socket.socket:
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(kind, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        message = f"can't listen on {host}:{port} ({error.strerror}); give another --host or --port"
        raise ArgumentError("port", message) from None
    return bound


def serve(app: ASGIApp, dispatcher: Dispatcher, bound: socket.socket, limits: Limits, log_json: bool) -> None:
    """Serve until a signal of :func:`ended_by_signals`; then refuse waiting requests and finish running ones."""
    server = _Server(configured(app, limits, log_json=log_json))
    server.dispatcher = dispatcher
    try:
        server.run(sockets=[bound])  # which raises KeyboardInterrupt again after its end
    finally:
        dispatcher.stop(LAST_STEPS)


class _Ended(KeyboardInterrupt):
    """A signal ended the server. Python would end the process by SIGINT if a plain KeyboardInterrupt left an import."""


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """End the block at SIGTERM or Ctrl-C, with its ``finally`` clauses."""

    def end(*_: Any) -> None:
        raise _Ended

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with suppress(KeyboardInterrupt):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signals_held() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C wait for the end of the block, which starts a process and notes how to end it."""
    resource_tracker.ensure_running()  # otherwise the first process starts it, which lets the signals through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Server(uvicorn.Server):
    """Refuse waiting requests when the shutdown begins; uvicorn then waits for open connections."""

    dispatcher: Dispatcher

    async def shutdown(self, sockets: Any = None) -> None:
        self.dispatcher.close()
        await super().shutdown(sockets)


def _notes(wanted: ImageRequest, results: Sequence[Made]) -> dict[str, list[str]]:
    notes = [*wanted.notes(), *dict.fromkeys(result.note for result in results if result.note)]
    return {"notes": notes} if notes else {}


def _event(kind: str, content: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **content})}\n\n"
