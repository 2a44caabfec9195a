"""Handlers of ``/v1/videos``, OpenAI's interface for videos."""

from __future__ import annotations

import os
from typing import BinaryIO, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Receive, Scope, Send

from dit_accel.serving.dispatcher import Busy, Dispatcher
from dit_accel.serving.engine import Cancelled
from dit_accel.serving.http.api import RequestError, Served
from dit_accel.serving.http.bodies import received
from dit_accel.serving.http.metrics import Metrics
from dit_accel.serving.http.requests import AnyRequest, VideoRequest, read, requested_preset
from dit_accel.serving.http.videos import VideoJob, VideoStore

CHUNK = 2**18  # bytes


class ListQuery(BaseModel):
    """Parameters of ``GET /v1/videos``; ``after`` is the id of the last video of the page before."""

    model_config = ConfigDict(extra="forbid")
    limit: int = Field(20, ge=1, le=100)
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"


class ContentQuery(BaseModel):
    """Parameters of ``GET /v1/videos/{id}/content``."""

    model_config = ConfigDict(extra="forbid")
    variant: Literal["video"] = "video"


class VideoServer:
    """Handlers of the routes; each answers with an error if there is no store, since the model makes images."""

    def __init__(self, dispatcher: Dispatcher, served: Served, metrics: Metrics, videos: VideoStore | None) -> None:
        self._dispatcher, self._served, self._metrics, self._store = dispatcher, served, metrics, videos

    def add_routes(self, router: APIRouter) -> None:
        router.add_api_route("/v1/videos", self.create, methods=["POST"])
        router.add_api_route("/v1/videos", self.list, methods=["GET"])
        router.add_api_route("/v1/videos/{video_id}", self.retrieve, methods=["GET"])
        router.add_api_route("/v1/videos/{video_id}", self.delete, methods=["DELETE"])
        router.add_api_route("/v1/videos/{video_id}/content", self.content, methods=["GET"])

    async def create(self, request: Request) -> JSONResponse:
        try:
            store = self._videos()
            wanted = await received(request, VideoRequest, self._served)
            preset = requested_preset(wanted, self._served)
            job = VideoJob(wanted, self._served, preset, request.state.owner, store.new_file(), self._metrics)
            self._dispatcher.add(job)
        except (RequestError, Busy, Cancelled) as error:
            raise self._metrics.counted(error) from None
        store.add(job)
        return JSONResponse(job.to_json())

    async def retrieve(self, video_id: str, request: Request) -> JSONResponse:
        return JSONResponse(self._videos().get(video_id, request.state.owner).to_json())

    async def list(self, request: Request) -> JSONResponse:
        store, query = self._videos(), self._query(request, ListQuery)
        jobs = store.of_owner(request.state.owner)
        if query.order == "desc":
            jobs.reverse()
        if query.after is not None:
            last = store.get(query.after, request.state.owner, "after")
            jobs = jobs[jobs.index(last) + 1 :]
        page = [job.to_json() for job in jobs[: query.limit]]
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return JSONResponse({"object": "list", "data": page, **ends, "has_more": len(jobs) > query.limit})

    async def content(self, video_id: str, request: Request) -> Response:
        job = self._videos().get(video_id, request.state.owner)
        self._query(request, ContentQuery)
        return _VideoFile(job.open(), f"{job.id}.mp4")

    async def delete(self, video_id: str, request: Request) -> JSONResponse:
        """Cancel a job that waits or runs, and delete it."""
        self._videos().delete(video_id, request.state.owner)
        return JSONResponse({"id": video_id, "object": "video.deleted", "deleted": True})

    def _videos(self) -> VideoStore:
        if self._store is None:
            message = f"{self._served.model} makes images, no videos: use /v1/images/generations"
            raise RequestError(message, code="unsupported")
        return self._store

    def _query(self, request: Request, kind: type[AnyRequest]) -> AnyRequest:
        return read(request.query_params.multi_items(), kind, self._served)


class _VideoFile(StreamingResponse):
    """An mp4 file, which is read while it is sent; it may be deleted meanwhile."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        length = os.fstat(file.fileno()).st_size
        headers = {"Content-Length": str(length), "Content-Disposition": f'attachment; filename="{name}"'}
        super().__init__(iter(lambda: file.read(CHUNK), b""), headers=headers, media_type="video/mp4")
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)
