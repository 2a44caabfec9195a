"""``/v1/videos``, OpenAI's interface for videos: jobs that wait, run or are kept for download, and the routes."""

from __future__ import annotations

import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Lock, RLock, Thread
from typing import Any, BinaryIO, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field

from dit_accel.errors import ArgumentError, shown
from dit_accel.serving.dispatcher import Dispatcher, Step, Task
from dit_accel.serving.engine import Made
from dit_accel.serving.http.api import Limits, Models, RequestError, Served, answered
from dit_accel.serving.http.bodies import received
from dit_accel.serving.http.log import Entry
from dit_accel.serving.http.requests import AnyRequest, VideoRequest, read, requested_preset
from dit_accel.streaming import GrowingFile

SUFFIX = ".mp4"
SWEEP = 60.0  # seconds between deletions of old videos that no request asks for
CHUNK = 2**18  # bytes of a file that is sent


class VideoJob(Task):
    """A requested video of a key (its index or None), in OpenAI's form; any thread may read it while it runs."""

    outlives_answer = True

    def __init__(self, request: VideoRequest, served: Served, owner: int | None, file: Path, entry: Entry) -> None:
        form, preset = served.form, requested_preset(request, served)
        super().__init__([request.job(form)], preset, SUFFIX)
        self.deadline, self.model = request.max_seconds, served.model
        entry.take(self)
        self.id, self.owner = f"video_{secrets.token_hex(16)}", owner
        self.ended: float | None = None  # by the monotonic clock
        self.bytes = 0  # of its file, once it is completed
        self.status: Literal["queued", "in_progress", "completed", "failed"] = "queued"
        self.growing = GrowingFile() if request.stream else None  # until its end
        self._progress, self._error, self._latest = 0, None, math.inf
        self._file, self._limits, self._entry, self._lock = file, served.limits, entry, RLock()
        frames, self._fps = request.frames(form), request.fps or form.fps
        times = {"created_at": int(time.time()), "completed_at": None, "expires_at": None}
        self._facts: dict[str, Any] = {"request_id": entry.id, **times, "model": served.model, "prompt": request.prompt}
        self._facts |= {"seconds": "auto" if frames is None else f"{round(frames / self._fps, 2):g}"}
        self._facts |= {"size": request.size, "num_frames": frames, "fps": self._fps}
        self._facts |= {"seed": self.jobs[0].settings["seed"], "preset": "none" if preset is None else preset.name}

    def to_json(self) -> dict[str, Any]:
        with self._lock:
            state = {"status": self.status, "progress": self._progress, "error": self._error}
            return {"id": self.id, "object": "video", **state, **self._facts}

    def open(self) -> BinaryIO:
        with self._lock:
            if self.status != "completed":
                raise RequestError(f"the video is {self.status}: wait for completed", "video_id", "not_ready")
            try:
                return self._file.open("rb")
            except FileNotFoundError:
                raise _unknown(self.id) from None

    def discard(self) -> None:
        self.cancel()
        with self._lock:
            self._file.unlink(missing_ok=True)

    def begin(self, samples: int = 1) -> None:
        with self._lock:
            if self.ended is None:
                self.status, self._latest = "in_progress", time.monotonic() + samples * self._limits.seconds

    def step(self, job: Any, done: int, steps: int, part: bytes | None = None) -> None:
        if time.monotonic() > self._latest:
            self.tell(TimeoutError())
            self.cancel()
        super().step(job, done, steps, part)

    def tell(self, event: Step | Made | BaseException | None) -> None:
        if isinstance(event, Made):
            self._file.parent.mkdir(0o700, exist_ok=True)  # a cleaner of temporary folders may have removed it
            self._file.write_bytes(event.data)  # which takes time, so that the lock stays free
        with self._lock:
            if self.ended is not None:
                if isinstance(event, Made):  # the job was deleted, or took too long
                    self._file.unlink(missing_ok=True)
                return
            match event:
                case Step(done=done, steps=steps, part=part):
                    self._progress = min(99, 100 * done // steps)
                    if self.growing is not None and part:
                        self.growing.append(part)
                case Made():
                    self._complete(event)
                case BaseException():
                    self._file.unlink(missing_ok=True)  # half of it, if the disk is full
                    if isinstance(event, ArgumentError) and event.field == "image":
                        event = ArgumentError("input_reference", event.rule)
                    self._entry.error = self._entry.error or answered(event, self._limits)
                    self._error = self._entry.error.to_json()["error"]
                    self._end("failed")

    def _complete(self, result: Made) -> None:
        assert result.shape is not None  # of a video
        now, (frames, height, width) = time.time(), result.shape
        self._facts |= {"completed_at": int(now), "expires_at": int(now + self._limits.kept), "num_frames": frames}
        self._facts |= {"seconds": f"{round(frames / self._fps, 2):g}", "size": f"{width}x{height}"}
        self._facts |= {"computed_fraction": result.computed_fraction, "stage_seconds": result.stages}
        self._facts |= {"batch_size": len(result.batch), "contract": result.contract}
        self._facts |= {"notes": [result.note]} if result.note else {}
        self._progress, self.bytes, self._entry.results = 100, len(result.data), [result]
        self._end("completed")

    def _end(self, status: Literal["completed", "failed"]) -> None:
        self.status, self.ended = status, time.monotonic()
        self.jobs = []  # the input image needs memory
        if self.growing is not None:
            self.growing.append(b"" if status == "completed" else None)
            self.growing = None
        self._entry.end()


class VideoStore:
    """Jobs that wait or run, and ended ones up to limits of each key, in a context whose end deletes all videos."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._folder = TemporaryDirectory(prefix="dit-accel-videos-", ignore_cleanup_errors=True)
        self._jobs: dict[str, VideoJob] = {}  # in the order of their creation
        self._numbers, self._lock, self._closed = count(), Lock(), Event()

    def __enter__(self) -> VideoStore:
        Thread(target=self._drop_regularly, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._folder.cleanup()

    def new_file(self) -> Path:
        return Path(self._folder.name) / f"{next(self._numbers):08}{SUFFIX}"

    def add(self, job: VideoJob) -> None:
        with self._lock:
            self._drop_old()
            self._jobs[job.id] = job

    def get(self, video_id: str, owner: int | None, param: str = "video_id") -> VideoJob:
        with self._lock:
            self._drop_old()
            job = self._jobs.get(video_id)
        if job is None or job.owner != owner:
            raise _unknown(video_id, param)
        return job

    def delete(self, video_id: str, owner: int | None) -> None:
        job = self.get(video_id, owner)
        with self._lock:
            self._jobs.pop(video_id, None)
        job.discard()

    def of_owner(self, owner: int | None) -> list[VideoJob]:
        with self._lock:
            self._drop_old()
            return [job for job in self._jobs.values() if job.owner == owner]

    def _drop_regularly(self) -> None:
        while not self._closed.wait(SWEEP):
            with self._lock:
                self._drop_old()

    def _drop_old(self) -> None:
        """Delete ended jobs beyond the limits, failed ones counted apart; a key's latest video stays."""
        ended = [(job.ended, job) for job in self._jobs.values() if job.ended is not None]
        limits, latest = self._limits, time.monotonic() - self._limits.kept
        number, size = Counter[tuple[int | None, str]](), Counter[tuple[int | None, str]]()  # so far, newest first
        for when, job in sorted(ended, key=lambda pair: pair[0], reverse=True):
            kind = job.owner, job.status
            number[kind] += 1
            size[kind] += job.bytes
            is_too_large = number[kind] > 1 and size[kind] > limits.video_bytes
            if number[kind] > limits.videos or is_too_large or when < latest:
                del self._jobs[job.id]
                job.discard()


class ListQuery(BaseModel, extra="forbid"):
    limit: int = Field(20, ge=1, le=100)
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"


class ContentQuery(BaseModel, extra="forbid"):
    variant: Literal["video"] = "video"


class VideoServer:
    def __init__(self, dispatcher: Dispatcher, models: Models, videos: VideoStore) -> None:
        self._dispatcher, self._models, self._store = dispatcher, models, videos

    def add_routes(self, router: APIRouter) -> None:
        router.add_api_route("/v1/videos", self.create, methods=["POST"])
        router.add_api_route("/v1/videos", self.list, methods=["GET"])
        router.add_api_route("/v1/videos/{video_id}", self.retrieve, methods=["GET"])
        router.add_api_route("/v1/videos/{video_id}", self.delete, methods=["DELETE"])
        router.add_api_route("/v1/videos/{video_id}/content", self.content, methods=["GET"])

    async def create(self, request: Request) -> JSONResponse:
        wanted, served = await received(request, VideoRequest, self._models)
        job = VideoJob(wanted, served, request.state.owner, self._store.new_file(), request.state.entry)
        self._dispatcher.add(job)
        self._store.add(job)
        return JSONResponse(job.to_json())

    async def retrieve(self, video_id: str, request: Request) -> JSONResponse:
        return JSONResponse(self._store.get(video_id, request.state.owner).to_json())

    async def list(self, request: Request) -> JSONResponse:
        query, jobs = self._query(request, ListQuery), self._store.of_owner(request.state.owner)
        if query.order == "desc":
            jobs.reverse()
        if query.after is not None:
            jobs = jobs[jobs.index(self._store.get(query.after, request.state.owner, "after")) + 1 :]
        page = [job.to_json() for job in jobs[: query.limit]]
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return JSONResponse({"object": "list", "data": page, **ends, "has_more": len(jobs) > query.limit})

    async def content(self, video_id: str, request: Request) -> Response:
        self._query(request, ContentQuery)
        job = self._store.get(video_id, request.state.owner)
        if (growing := job.growing) is not None:
            return StreamingResponse(growing.follow(), media_type="video/mp4")
        file, name = job.open(), f"{job.id}.mp4"  # which may be deleted while it is sent
        length = os.fstat(file.fileno()).st_size
        headers = {"Content-Length": str(length), "Content-Disposition": f'attachment; filename="{name}"'}
        return StreamingResponse(_chunks(file), headers=headers, media_type="video/mp4")

    async def delete(self, video_id: str, request: Request) -> JSONResponse:
        self._store.delete(video_id, request.state.owner)
        return JSONResponse({"id": video_id, "object": "video.deleted", "deleted": True})

    def _query(self, request: Request, kind: type[AnyRequest]) -> AnyRequest:
        return read(request.query_params.multi_items(), kind, self._models.first)


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        yield from iter(partial(file.read, CHUNK), b"")


def _unknown(video_id: str, param: str = "video_id") -> RequestError:
    return RequestError(f"video {shown(video_id)} does not exist, or is no longer kept", param, "not_found", 404)
