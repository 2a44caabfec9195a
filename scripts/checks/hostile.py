#!/usr/bin/env python3
"""Send hostile requests to the servers of `dit-accel serve`, and check that each is refused and nothing else happens.

Three servers listen on sockets of this process, with tiny pipelines: for images and videos with API keys, for edits
without. Requests come from a seed: wrong types, sizes and characters, deep and changed JSON, broken forms and images,
bodies of 10 MiB, wrong keys, hosts, methods and ids of videos, paths of files, bytes that are no HTTP, clients that
disconnect, and bodies that never end. Few of them are valid by chance; these are answered with images or videos.

    python -m scripts.checks.hostile --output docs/results/hostile.json
    python -m scripts.checks.hostile --output hostile.json --requests 300 --seed 7

Exits with 1 if an answer has a status that its request does not allow, such as 5xx, or shows a key, a path or a
traceback; if a connection hangs; if anything is logged; if a file is opened outside the folder of temporary files and
those of Python's modules, or left over; if a run failed; or if a good request is answered otherwise than before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import io
import logging
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import uvicorn

from dit_accel.presets import Preset, load_preset
from dit_accel.serving.dispatcher import Dispatcher
from dit_accel.serving.engine import Made
from dit_accel.serving.http import bodies
from dit_accel.serving.http.api import Limits, Served
from dit_accel.serving.http.connections import configured
from dit_accel.serving.http.server import build_app
from dit_accel.serving.http.videos import VideoStore
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.prompts import Job
from dit_accel.serving.worker import Worker
from dit_accel.tools.measure.origin import describe_run
from scripts.checks.hostile_requests import CLOSED, EDITS, GOOD, IMAGES, VIDEOS, Attacks, Hostile
from scripts.tables import as_json
from tests.tiny import tiny_pipeline

LIMITS = Limits(side=64, steps=4, images=2, frames=9, seconds=60.0)
AT_ONCE = 8  # connections, besides slow ones
LONGEST_REFUSAL = 4000  # bytes
PATIENCE = 30.0  # seconds for an answer, besides those of a slow body
SITES = {IMAGES: "flux", EDITS: "flux-img2img", VIDEOS: "wan"}  # tiny pipelines by their route
ROOT = Path(__file__).parents[2]
HANGS = -1  # the status of a connection without an answer in time


@dataclass
class Findings:
    """Statuses by kind, and faults with the requests that show them."""

    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    slowest: float = 0.0  # seconds of an answer to a request that is not slow itself
    faults: list[str] = field(default_factory=list)

    def add(self, request: Hostile, status: int, body: bytes, seconds: float, secret: list[bytes]) -> None:
        self.statuses.setdefault(request.kind, Counter())[status] += 1
        if not request.is_slow:
            self.slowest = max(self.slowest, seconds)
        problem = None
        if status not in request.allowed or b'"server_error"' in body:
            problem = f"status {status}"
        elif any(text in body for text in secret):
            problem = "a secret in the answer"
        elif status >= 400 and len(body) > LONGEST_REFUSAL:
            problem = f"{len(body)} bytes"
        if problem is not None:
            sent = request.pieces[0]
            self.faults.append(f"{request.kind}, {request.route}: {problem}: {body[:300]!r} for {sent[:1500]!r}")


class Tiny(Worker):
    """A worker in this process; what a request leaves out is small."""

    def run(self, jobs: Sequence[Job], preset: Preset | None, suffix: str, tell: Callable[..., None]) -> list[Made]:
        small = {"width": 32, "height": 32, "steps": 2, **({"num-frames": 5} if self.video_form else {})}
        return super().run([replace(job, settings=small | job.settings) for job in jobs], preset, suffix, tell)

    def restart(self) -> None:
        """Nothing to do: only a worker in a process of its own breaks."""


class Opened:
    """Files that this process opens and hosts that it looks up within the ``with`` block."""

    def __init__(self) -> None:
        self.files, self._is_on = set[tuple[str, bool]](), False
        sys.addaudithook(self._note)  # stays until the process ends

    def __enter__(self) -> Opened:
        self._is_on = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_on = False

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_on and event == "open" and isinstance(arguments[0], str | bytes):
            path, mode, flags = arguments
            writes = bool(flags & 3) or bool(set(mode or "") & set("wax+"))
            self.files.add((path if isinstance(path, str) else path.decode(errors="replace"), writes))
        elif self._is_on and event == "socket.getaddrinfo":
            self.files.add((f"host {arguments[0]}", True))

    def foreign(self, outside: str) -> list[str]:
        """Return files that a server need not open."""
        temporary = tempfile.gettempdir()
        modules = (temporary, sys.prefix, sys.base_prefix, str(ROOT), "/dev/", "/proc/", "/sys/")
        allowed = {True: (temporary, "/dev/null"), False: modules}
        wrong = {path for path, writes in self.files if not path.startswith(allowed[writes]) and ".pyc" not in path}
        return sorted(wrong - {"host 127.0.0.1"} | {path for path, _ in self.files if outside in path})


@contextlib.contextmanager
def listening(route: str, folder: Path, keys: list[str]) -> Iterator[tuple[int, uvicorn.Server, Dispatcher]]:
    """The port, the server and the dispatcher of a tiny pipeline."""
    tiny_pipeline(SITES[route]).save_pretrained(folder)
    worker = Tiny(Setup(str(folder)))
    dispatcher = Dispatcher([worker], 1000)
    with contextlib.ExitStack() as closing:
        closing.callback(dispatcher.stop, 10.0)
        videos = closing.enter_context(VideoStore(LIMITS)) if worker.video_form else None
        preset = load_preset("video-balanced" if videos else "balanced")
        app = build_app(dispatcher, Served("tiny", preset, LIMITS, worker.video_form), keys, {"localhost"}, videos)
        site = uvicorn.Server(configured(app, LIMITS, port=0))
        thread = Thread(target=site.run, daemon=True)
        thread.start()
        while not site.started:
            time.sleep(0.01)
        yield site.servers[0].sockets[0].getsockname()[1], site, dispatcher
        site.should_exit = True
        thread.join()


async def exchange(port: int, request: Hostile) -> tuple[int, bytes]:
    """Send a request; return the status of its answer, and the body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**26)

    async def send() -> None:
        with contextlib.suppress(OSError):
            for piece in request.pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(request.pause)

    sending = asyncio.create_task(send())
    try:
        if request.leaves:
            await sending
            return CLOSED, b""
        async with asyncio.timeout(PATIENCE + (2 * bodies.SLOWEST_BODY if request.is_slow else 0)):
            answer = await _answer(reader, is_head=request.pieces[0].startswith(b"HEAD "))
            if request.is_slow:
                await reader.read()  # until the server closes the connection
            return answer
    except TimeoutError:
        return HANGS, b""
    except (OSError, asyncio.IncompleteReadError):
        return CLOSED, b""
    finally:
        sending.cancel()
        writer.transport.abort() if request.leaves else writer.close()


async def _answer(reader: asyncio.StreamReader, *, is_head: bool) -> tuple[int, bytes]:
    """Read an answer: with a length, in chunks, or up to the end of the connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status, length = int(head.split(b" ")[1]), head.partition(b"content-length: ")[2]
    if is_head:
        return status, b""
    if length:
        return status, await reader.readexactly(int(length.split(b"\r")[0]))
    return status, await (reader.readuntil(b"\r\n0\r\n\r\n") if b"chunked" in head else reader.read())


async def attack(ports: dict[str, int], attacks: Attacks, count: int, found: Findings, secret: list[bytes]) -> None:
    free, tasks = asyncio.Semaphore(AT_ONCE), set[asyncio.Task[None]]()

    async def one(request: Hostile) -> None:
        started = time.monotonic()
        try:
            status, body = await exchange(ports[request.route], request)
        finally:
            if not request.is_slow:
                free.release()
        found.add(request, status, body, time.monotonic() - started, secret)

    for _ in range(count):
        request = attacks.one()
        if not request.is_slow:
            await free.acquire()
        tasks.add(task := asyncio.create_task(one(request)))
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)


def good_answers(ports: dict[str, int], key: str) -> list[Any]:
    """Return the image of a good request, its statuses where it is not allowed, and metrics of failed runs."""
    headers = {"Authorization": f"Bearer {key}", "Host": "localhost"}
    with httpx.Client(headers=headers, timeout=60) as client:
        image = client.post(f"http://127.0.0.1:{ports[IMAGES]}{IMAGES}", json=GOOD).json()["data"][0]["b64_json"]
        metrics = [client.get(f"http://127.0.0.1:{port}/metrics").text for port in ports.values()]
        health = [client.get(f"http://127.0.0.1:{port}/health").json() for port in ports.values()]
    failed = [line for text in metrics for line in text.splitlines() if 'total{outcome="failed"}' in line]
    return [image, health, failed]


def run(options: argparse.Namespace) -> dict[str, Any]:
    key, found, log = secrets.token_hex(16), Findings(), io.StringIO()
    handler, opened = logging.StreamHandler(log), Opened()
    with contextlib.ExitStack() as closing, tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        outside = Path(folder) / "outside.txt"
        outside.write_text(hidden := secrets.token_hex(16))
        closing.enter_context(temporary_files(Path(folder) / "temporary"))
        secret = [key.encode(), hidden.encode(), b"Traceback", str(ROOT).encode()]
        sites = {
            route: closing.enter_context(listening(route, Path(folder) / name, [] if route == EDITS else [key]))
            for route, name in SITES.items()
        }
        ports = {route: port for route, (port, _, _) in sites.items()}
        before, there = good_answers(ports, key), set(Path(tempfile.gettempdir()).iterdir())
        logging.getLogger().addHandler(handler)
        closing.callback(logging.getLogger().removeHandler, handler)
        started = time.monotonic()
        with opened, contextlib.redirect_stderr(log), contextlib.redirect_stdout(log):
            asyncio.run(attack(ports, Attacks(options.seed, str(outside), key), options.requests, found, secret))
            wait_until_idle(sites, found)
        seconds = time.monotonic() - started
        if (after := good_answers(ports, key)) != before:
            found.faults.append(f"good requests are answered otherwise: {after[1:]} after {before[1:]}")
        gc.collect()
        new = set(Path(tempfile.gettempdir()).iterdir()) - there
        found.faults += [f"left over: {path}" for path in sorted(new)]
        found.faults += [f"opened: {path}" for path in opened.foreign(str(outside))]
        if log.getvalue():
            found.faults.append(f"logged: {log.getvalue()[:20_000]}")
    statuses = {
        kind: {str(status): count for status, count in sorted(counts.items())}
        for kind, counts in sorted(found.statuses.items())
    }
    return {"seconds": seconds, "slowest_answer_seconds": found.slowest, "statuses": statuses, "faults": found.faults}


@contextlib.contextmanager
def temporary_files(folder: Path) -> Iterator[None]:
    """Within the block, make temporary files in a new folder, which no other process uses."""
    folder.mkdir()
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def wait_until_idle(sites: dict[str, Any], found: Findings) -> None:
    """Wait until no request waits or runs, and no connection is open."""
    for route, (_, site, dispatcher) in sites.items():
        ends = time.monotonic() + PATIENCE + 2 * bodies.SLOWEST_BODY
        while any(busy := (dispatcher.waiting, dispatcher.running, len(site.server_state.connections))):
            if time.monotonic() > ends:
                found.faults.append(f"{route}: {busy} requests that wait, that run, and open connections")
                break
            time.sleep(0.05)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON file")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    found = run(options)
    settings = {"requests": options.requests, "seed": options.seed}
    options.output.write_text(as_json({"run": describe_run("cpu"), **settings, **found}))
    if found["faults"]:
        raise SystemExit("\n".join(found["faults"][:20]))


if __name__ == "__main__":
    main()
