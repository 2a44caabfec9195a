#!/usr/bin/env python3
"""Check what answers of `dit-accel serve` state of their contracts, with `demo-flux` on the CPU.

    python -m scripts.checks.contracts --output docs/results/contracts.json

Sends requests with random floors, deadlines, budgets and faults at random times, and checks each statement of the
answers, floors by plain images. A refusal must name a deadline that an earlier run missed. Exits with 1 if a statement
is false or a deadline is missed by more than one computed step.
"""

import argparse
import asyncio
import base64
import io
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import torch
from PIL import Image

from dit_accel.tools.measure.metrics import psnr
from dit_accel.tools.measure.origin import describe_run
from scripts.tables import write_result

Row = dict[str, Any]
PROMPTS = ("a yellow ring over the sea", "two pink stars at sunset", "a red square over the hills")
SIZES = [{"size": size, "steps": steps} for size in ("64x64", "128x128") for steps in (10, 20)]
FLOORS = (25.0, 27.0, 30.0, 34.0)  # dB
FAULTS = ({"computed_steps": 21}, {"target_psnr": 90.0}, {"target_error": 0.1, "max_seconds": 9.0}, {"max_seconds": 0})
LEAST = re.compile(r"must be at least ([\d.e+-]+) for|the nearest deadline is ([\d.e+-]+)")
PATIENCE = 300.0  # seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--requests", type=int, default=200, help="default %(default)s")
    parser.add_argument("--plain", type=int, default=40, help="floors that plain images check; default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the requests; default %(default)s")
    options = parser.parse_args()
    with serving("demo-flux") as (_, url):
        found = asyncio.run(check(url, options))
    write_result(options.output, {**describe_run("cpu"), "cores": os.cpu_count(), **found})
    print(found)
    return int(bool(found["failures"]))


@contextmanager
def serving(*models: str) -> Iterator[tuple[psutil.Popen, str]]:
    """Start a server, and yield its process and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [word for model in models for word in ("--model", model)]
    command = [sys.executable, "-m", "dit_accel", "serve", *words, "--device", "cpu", "--port", str(port)]
    server = psutil.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        if not any(line.startswith("ready at ") for line in server.stdout):
            raise SystemExit(f"the server ended with {server.wait()}")
        yield server, f"http://127.0.0.1:{port}"
    finally:
        for process in (*server.children(recursive=True), server) if server.is_running() else ():
            process.kill()


class Client:
    def __init__(self, url: str, seed: int) -> None:
        self.session = httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=httpx.Limits(max_connections=None))
        self.draw = random.Random(seed)

    async def ask(self, **fields: Any) -> Row:
        """Return the answer to a request for an image: its status, seconds, contract and pixels, or its error."""
        fields = {"prompt": self.draw.choice(PROMPTS), "seed": self.draw.randrange(2**32), **fields}
        begun = time.monotonic()
        try:
            reply = await self.session.post("/v1/images/generations", json=fields)
        except httpx.HTTPError as error:
            return {"fields": fields, "status": 0, "error": repr(error)}
        row = {"fields": fields, "status": reply.status_code, "begun": begun, "seconds": time.monotonic() - begun}
        if reply.status_code != 200:
            return row | {"error": reply.json()["error"]["message"]}
        (image,) = reply.json()["data"]
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(image["b64_json"]))))
        return row | {"contract": image["contract"], "stages": image["seconds"], "image": pixels}

    async def ask_at_random(self, rate: float, requests: Iterator[Row]) -> list[Row]:
        """Send requests at random times, ``rate`` a second on average, and return their answers."""
        tasks, now = [], time.monotonic()
        for fields in requests:
            await asyncio.sleep(now - time.monotonic())
            tasks.append(asyncio.create_task(self.ask(**fields)))
            now += self.draw.expovariate(rate)
        return await asyncio.gather(*tasks)


async def check(url: str, options: argparse.Namespace) -> Row:
    client = Client(url, options.seed)
    first = [await client.ask(**size) for size in SIZES * 3][len(SIZES) :]
    usual = {_size(row): row["seconds"] for row in first}
    drawn = (drawn_contract(client.draw, usual) for _ in range(options.requests))
    rows = await client.ask_at_random(0.7 / statistics.mean(usual.values()), drawn)
    failures = [text for row in rows for text in wrong(row, first + rows)]
    floors = [row for row in rows if row.get("contract", {}).get("floor_met")][: options.plain]
    for row in floors:
        fields = {key: value for key, value in row["fields"].items() if key in ("prompt", "seed", "size", "steps")}
        whole = await client.ask(**fields, preset="none")
        row["psnr"] = psnr(*(torch.from_numpy(item["image"] / 255.0) for item in (row, whole)))
    kept = sum(row["psnr"] >= row["fields"]["target_psnr"] for row in floors)
    if kept < 0.9 * len(floors):
        failures.append(f"{len(floors) - kept} of {len(floors)} images are below target_psnr")
    accepted = [row for row in rows if row["status"] == 200]
    return {
        "answers": Counter(row["status"] for row in rows),
        "decided_by": Counter(row["contract"]["decided_by"] for row in accepted),
        "deadlines": sum("max_seconds" in row["fields"] for row in accepted),
        "late_by_steps": sorted((late for row in accepted if (late := steps_late(row)) > 0), reverse=True),
        "floors": {"plain": len(floors), "kept": kept, "least": min((row["psnr"] for row in floors), default=None)},
        "failures": failures,
    }


def drawn_contract(draw: random.Random, usual: dict[tuple[str, int], float]) -> Row:
    """Draw a request with a floor, a budget or neither, and with a deadline, possible or not, or one with a fault."""
    (size, steps), seconds = draw.choice(list(usual.items()))
    fields: Row = {"size": size, "steps": steps}
    if draw.random() < 0.05:
        return fields | draw.choice(FAULTS)
    fields |= draw.choice([{}, {"target_psnr": draw.choice(FLOORS)}, {"computed_steps": draw.randint(3, steps)}])
    return fields | ({"max_seconds": round(seconds * draw.uniform(0.2, 3.0), 3)} if draw.random() < 0.7 else {})


def wrong(row: Row, rows: list[Row]) -> list[str]:
    """List the false statements of an answer."""
    fields, limit = row["fields"], row["fields"].get("max_seconds")
    if row["status"] != 200:
        is_fault = any(fault.items() <= fields.items() for fault in FAULTS)
        named = LEAST.search(row["error"])
        if row["status"] not in (400, 503) or (named is None) != is_fault:
            return [] if "requests are waiting" in row["error"] else [f"{fields}: {row['status']}, {row['error']}"]
        before = (it for it in rows if it["status"] == 200 and it["begun"] + it["seconds"] < row["begun"])
        slowest = max((it["contract"]["run_seconds"] for it in before if _size(it) == _size(row)), default=0.0)
        least = float(named[1] or named[2]) if named else 0.0
        is_true = named is None or (least >= limit and (named[1] is None or 0.99 * least <= slowest))
        return [] if is_true else [f"{fields}: {row['error']}, but runs took at most {slowest:.3g} s"]
    stated, budget = row["contract"], fields.get("computed_steps", fields["steps"])
    took, decided = stated["queue_seconds"] + stated["run_seconds"], stated["decided_by"]
    by_deadline, floor = decided == "deadline", "target_psnr" in fields
    named = "floor" if floor else "budget" if "computed_steps" in fields else "deadline" if limit else "preset"
    statements = {
        "steps": stated["steps"] == fields["steps"],
        "seconds": took <= row["seconds"] <= took + 1.0,
        "deadline_met": stated.get("deadline_met") == (None if limit is None else took <= limit),
        "a step too late": steps_late(row) <= 1.0,
        "computed_steps": stated["computed_steps"] <= budget,
        "budget": decided != "budget" or stated["computed_steps"] == budget,
        "decided_by": decided == named or (by_deadline and limit is not None),
        "floor_met": stated.get("floor_met") == (not by_deadline if floor else None),
    }
    return [f"{fields}: {name} of {stated}" for name, is_true in statements.items() if not is_true]


def steps_late(row: Row) -> float:
    """Return by how many computed steps of its run an answer missed its deadline; 0 = it did not."""
    stated = row["contract"]
    late = stated["queue_seconds"] + stated["run_seconds"] - row["fields"].get("max_seconds", float("inf"))
    return max(0.0, late * stated["computed_steps"] / row["stages"]["denoising"])


def _size(row: Row) -> tuple[str, int]:
    return row["fields"]["size"], row["fields"]["steps"]


if __name__ == "__main__":
    sys.exit(main())
