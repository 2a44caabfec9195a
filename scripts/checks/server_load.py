#!/usr/bin/env python3
"""Overload `dit-accel serve` with two demo models, of which one is loaded, and kill a process.

    python -m scripts.checks.server_load --minutes 5 --output docs/results/server-load.json

Sends three times as many requests as clients that ask again at once get, now and then for a video of the other model.
After a quarter of the time a process is killed, and at the end the server is stopped while requests wait. Exits with 1
if a request gets neither its result nor 503, if memory grows, or if a process is left.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from dit_accel.tools.measure.origin import describe_run
from scripts.checks.contracts import PATIENCE, SIZES, Client, Row, serving
from scripts.tables import write_result

CLIENTS, FACTOR, VIDEOS = 8, 3, 0.02  # that keep the server busy; requests over its capacity; share of videos
VIDEO = {"model": "demo-wan", "size": "64x64", "num_frames": 5, "steps": 4, "prompt": "a yellow ring", "seed": 0}
GROWTH = 0.05  # share of memory, from the second third of the time to the last


class BusyClient(Client):
    async def ask_again(self, seconds: float) -> list[Row]:
        """Return the answers to clients that ask again as soon as they have an answer."""
        rows, ends = [], time.monotonic() + seconds

        async def ask() -> None:
            while time.monotonic() < ends:
                rows.append(await self.ask(**self.draw.choice(SIZES)))

        await asyncio.gather(*(ask() for _ in range(CLIENTS)))
        return rows

    async def ask(self, **fields: Any) -> Row:
        if fields.get("model") != VIDEO["model"]:
            return await super().ask(**fields)
        begun = time.monotonic()
        reply = await self.session.post("/v1/videos", json=VIDEO)
        while reply.status_code == 200 and reply.json()["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.5)
            reply = await self.session.get(f"/v1/videos/{reply.json()['id']}")
        row = {"fields": fields, "status": reply.status_code, "seconds": time.monotonic() - begun}
        if (error := reply.json().get("error")) is None:
            return row
        return row | {"status": 503 if error["code"] == "busy" else reply.status_code, "error": error["message"]}


async def overload(server: psutil.Popen, url: str, seconds: float) -> Row:
    client, memory = BusyClient(url, 0), list[list[float]]()
    await client.ask_again(1.0)
    begun = time.monotonic()
    phases = {"capacity": summary(await client.ask_again(seconds / 5), time.monotonic() - begun)}
    watching = asyncio.create_task(watch_memory(server, memory))
    killing = asyncio.create_task(kill_a_process(server, seconds / 4))
    begun = time.monotonic()

    def drawn() -> Iterator[Row]:
        while time.monotonic() - begun < seconds:
            yield VIDEO if client.draw.random() < VIDEOS else client.draw.choice(SIZES)

    rows = await client.ask_at_random(FACTOR * phases["capacity"]["results_per_second"], drawn())
    phases["overload"] = summary(rows, time.monotonic() - begun)
    watching.cancel()
    await killing
    processes = server.children(recursive=True)
    last = asyncio.create_task(client.ask_again(0.1))
    await asyncio.sleep(0.3)
    server.send_signal(signal.SIGTERM)
    phases["end"] = summary(await last, 0.1)
    code = await asyncio.to_thread(server.wait, PATIENCE)
    left = await asyncio.to_thread(lambda: psutil.wait_procs(processes, timeout=20)[1])
    found = {"phases": phases, "memory_mib": memory, "exit_code": code, "processes_left": len(left)}
    return found | {"failures": failures_of(found)}


def summary(rows: list[Row], seconds: float) -> Row:
    taken = sorted(row["seconds"] for row in rows if row["status"] == 200)
    answers = Counter(f"{row['status']} {row['fields'].get('model', 'demo-flux')}" for row in rows)
    quantiles = {f"p{share}": taken[share * len(taken) // 100] for share in (50, 99) if taken}
    errors = Counter(re.sub(r"[\d.]+", "N", row["error"]) for row in rows if "error" in row)
    found = {"seconds": seconds, "answers": answers, "results_per_second": len(taken) / seconds, **quantiles}
    print(json.dumps(found), flush=True)
    return found | {"errors": errors}


async def watch_memory(server: psutil.Popen, samples: list[list[float]]) -> None:
    """Add the MiB that the server's process and its others have for themselves, once a second."""
    while True:
        used = []
        for process in (server, *server.children(recursive=True)):
            try:
                used.append((await asyncio.to_thread(process.memory_full_info)).uss / 2**20)
            except psutil.Error:  # it has ended
                continue
        samples.append([round(used[0]), round(sum(used[1:]))])
        await asyncio.sleep(1)


async def kill_a_process(server: psutil.Popen, seconds: float) -> None:
    """Kill the process that has a model after some seconds."""
    await asyncio.sleep(seconds)
    max(server.children(), key=lambda process: process.memory_info().rss).kill()


def failures_of(found: Row) -> list[str]:
    wrong = [
        f"{name}: {count} answers of {answer}"
        for name, phase in found["phases"].items()
        for answer, count in phase["answers"].items()
        if answer.split()[0] not in ("200", "503")
    ]
    third = len(found["memory_mib"]) // 3
    for place, name in enumerate(("server", "processes of models") if third >= 20 else ()):
        middle, last = (max(item[place] for item in found["memory_mib"][at : at + third]) for at in (third, 2 * third))
        if last > (1 + GROWTH) * middle:
            wrong.append(f"the memory of the {name} grew from {middle} to {last} MiB")
    if found["exit_code"] or found["processes_left"]:
        wrong.append(f"the server ended with {found['exit_code']} and left {found['processes_left']} processes")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--minutes", type=float, default=5.0, help="of overload; default %(default)s")
    options = parser.parse_args()
    with serving("demo-flux", VIDEO["model"]) as (server, url):
        found = asyncio.run(overload(server, url, 60 * options.minutes))
    write_result(options.output, {**describe_run("cpu"), "cores": os.cpu_count(), **found})
    print("\n".join(found["failures"]))
    return int(bool(found["failures"]))


if __name__ == "__main__":
    sys.exit(main())
