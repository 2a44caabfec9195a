#!/usr/bin/env python3
"""Load test of `dit-accel serve`: its capacity, latencies at half of the capacity, and behaviour under overload.

Starts the server with a shipped model and sends HTTP requests: first from enough clients to keep it busy, to measure
its capacity; then at random times at half of the capacity; then at `--factor` times the capacity. The memory of all its
processes is read once a second; in an overload of a minute or more the process that runs the model is killed after a
quarter of the time. Finally the server is stopped while requests wait.

    python -m scripts.checks.serving --output docs/results/serving.json --overload 300
    python -m scripts.checks.serving --output serving.json --capacity 5 --half 5 --overload 10 --steps 2

Exits with 1 if a request got no answer, or an answer other than an image or "busy"; if the server's counts differ; if
memory grew by more than 5% from the second third of a long overload to the last; or if the server did not stop cleanly.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from dit_accel.tools.measure.origin import describe_run
from scripts.tables import as_json

OUTCOMES = {"ok": "200", "busy": "503"}  # of the server's metrics, and the status of their answers
CLIENTS = 8  # enough to keep it busy
IMAGE, BUSY, NOTHING = "200", "503", "no answer"
PROMPTS = ("a yellow ring over the sea", "two pink stars at sunset", "a red square over the hills")
LONG, MOST_GROWTH = 60, 0.05  # seconds of overload from which memory is checked; share
PATIENCE = 300  # seconds


@dataclass
class Phase:
    """Outcomes of the requests of one phase."""

    answers: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)  # for images, seconds
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        quantiles = statistics.quantiles(self.latencies, n=100) if len(self.latencies) > 1 else []
        return {
            "seconds": self.seconds,
            "answers": dict(self.answers),
            "images_per_second": self.answers[IMAGE] / self.seconds,
            **{f"p{percent}_seconds": quantiles[percent - 1] for percent in (50, 99) if quantiles},
        }


class Load:
    """Requests for images of `--size` or twice that."""

    def __init__(self, session: httpx.AsyncClient, options: argparse.Namespace) -> None:
        self.session, self.draw = session, random.Random(0)
        self.sizes, self.steps = (options.size, 2 * options.size), options.steps
        self.answers: Counter[str] = Counter()  # over all phases

    async def ask(self, phase: Phase) -> None:
        side, prompt, seed = self.draw.choice(self.sizes), self.draw.choice(PROMPTS), self.draw.randrange(2**32)
        wanted = {"prompt": prompt, "seed": seed, "steps": self.steps, "size": f"{side}x{side}"}
        started = time.monotonic()
        try:
            reply = await self.session.post("/v1/images/generations", json=wanted)
            answer, body = str(reply.status_code), reply.content
        except httpx.HTTPError:
            answer, body = NOTHING, b""
        if answer == IMAGE:
            phase.latencies.append(time.monotonic() - started)
            image = base64.b64decode(json.loads(body)["data"][0]["b64_json"])
            assert image.startswith(b"\x89PNG"), "an answer of 200 is an image"
        phase.answers[answer] += 1
        self.answers[answer] += 1

    async def busy(self, seconds: float) -> Phase:
        """Run clients that send the next request once they have the answer."""
        phase, ends = Phase(), time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < ends:
                await self.ask(phase)

        return await self._timed(phase, [asyncio.create_task(client()) for _ in range(CLIENTS)])

    async def random(self, rate: float, seconds: float) -> Phase:
        """Send requests at random times, ``rate`` per second on average, without waiting for answers."""
        phase, tasks, now = Phase(), set[asyncio.Task[None]](), time.monotonic()
        started, ends = now, now + seconds
        while (now := now + self.draw.expovariate(rate)) < ends:
            await asyncio.sleep(now - time.monotonic())
            tasks.add(task := asyncio.create_task(self.ask(phase)))
            task.add_done_callback(tasks.discard)
        return await self._timed(phase, tasks, started)

    async def counted(self) -> dict[str, int]:
        """Answers by status, as counted by the server."""
        metrics = (await self.session.get("/metrics")).text
        found = re.findall(r'requests_total{outcome="(\w+)"} ([\d.]+)', metrics)
        return {OUTCOMES.get(outcome, outcome): int(float(number)) for outcome, number in found}

    async def _timed(self, phase: Phase, tasks: Any, started: float | None = None) -> Phase:
        started = started or time.monotonic()
        await asyncio.gather(*tasks)
        phase.seconds = time.monotonic() - started
        return phase


class Memory:
    """MiB of private memory of the server's processes, sampled once a second within the ``async with`` block."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self.server, self.samples = psutil.Process(server.pid), list[float]()

    async def __aenter__(self) -> list[float]:
        self.task = asyncio.create_task(self._sample())
        return self.samples

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()

    async def _sample(self) -> None:
        while True:
            self.samples.append(await asyncio.to_thread(self._read))
            await asyncio.sleep(1)

    def _read(self) -> float:
        used = 0
        for process in (self.server, *self.server.children(recursive=True)):
            try:
                used += process.memory_full_info().uss
            except psutil.NoSuchProcess:
                continue
        return used / 2**20


async def measure(server: subprocess.Popen[str], url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run all phases one after the other."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as session:
        load = Load(session, options)
        warm_up = await load.busy(options.capacity / 2)
        capacity = await load.busy(options.capacity)
        print("capacity", capacity.to_json(), flush=True)
        rate = capacity.answers[IMAGE] / capacity.seconds
        half = await load.random(rate / 2, options.half)
        print("half", half.to_json(), flush=True)
        async with Memory(server) as memory:
            killing = asyncio.create_task(kill_a_worker(server, options.overload / 4))
            overload = await load.random(options.factor * rate, options.overload)
            killing.cancel()
        print("overload", overload.to_json(), flush=True)
        counted, answered = await load.counted(), dict(load.answers)
        processes = psutil.Process(server.pid).children(recursive=True)
        end = asyncio.create_task(load.busy(0.1))
        await asyncio.sleep(0.2)
        server.send_signal(signal.SIGTERM)
        phases = {"warm-up": warm_up, "capacity": capacity, "half": half, "overload": overload, "end": await end}
        code = await asyncio.to_thread(server.wait, PATIENCE)
        left = psutil.wait_procs(processes, timeout=20)[1]
    return {
        "phases": {name: phase.to_json() for name, phase in phases.items()},
        "answers": answered,
        "counted_by_the_server": counted,
        "memory_mib": [round(sample) for sample in memory],
        "exit_code": code,
        "processes_left": [process.name() for process in left],
    }


async def kill_a_worker(server: subprocess.Popen[str], seconds: float) -> None:
    """Kill a process that runs the model after some seconds of a long overload."""
    await asyncio.sleep(seconds)
    if seconds >= LONG / 4:
        workers = [item for item in psutil.Process(server.pid).children() if "spawn_main" in " ".join(item.cmdline())]
        workers[0].kill()


def failures(found: dict[str, Any]) -> list[str]:
    """List the failures."""
    phases, memory = found["phases"], found["memory_mib"]
    wrong = [
        f"{name}: {count} answers of {answer}"
        for name, phase in phases.items()
        for answer, count in phase["answers"].items()
        if answer not in (IMAGE, BUSY)
    ]
    if found["answers"] != found["counted_by_the_server"]:
        wrong.append(f"the server counted {found['counted_by_the_server']}, and gave {found['answers']}")
    third = len(memory) // 3
    if third >= LONG / 3:
        before, after = (statistics.mean(memory[start : start + third]) for start in (third, 2 * third))
        if after > (1 + MOST_GROWTH) * before:
            wrong.append(f"memory grew from {before:.0f} to {after:.0f} MiB")
    if found["exit_code"] != 0 or found["processes_left"]:
        wrong.append(f"the server ended with {found['exit_code']} and left {found['processes_left']}")
    return wrong


def start() -> tuple[subprocess.Popen[str], str]:
    """Start the server; return it and its address once it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "dit_accel",
        "serve",
        "--model",
        "demo-flux",
        "--device",
        "cpu",
        "--port",
        str(port),
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith("ready at "):
            return server, line.split()[2]
    raise SystemExit(f"the server ended with {server.wait()}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON file")
    parser.add_argument("--capacity", type=float, default=30, help="seconds of the capacity measurement")
    parser.add_argument("--half", type=float, default=60, help="seconds at half of the capacity")
    parser.add_argument("--overload", type=float, default=300, help="seconds of overload")
    parser.add_argument("--factor", type=float, default=3, help="overload as a multiple of the capacity")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--size", type=int, default=64, help="side in pixels; half of the images have twice that")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    server, url = start()
    try:
        found = asyncio.run(measure(server, url, options))
    finally:
        server.kill()
    wrong = failures(found)
    facts = {**describe_run("cpu"), "cores": os.cpu_count()}
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    options.output.write_text(as_json({"run": facts, **settings, **found, "failures": wrong}))
    if wrong:
        raise SystemExit("; ".join(wrong))


if __name__ == "__main__":
    main()
