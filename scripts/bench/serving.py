#!/usr/bin/env python3
"""Time calls of one and of several requests to a server's worker, and changes of LoRAs, with random weights.

    python -m scripts.bench.serving --output docs/results/serving-batches.json
    python -m scripts.bench.serving --tiny  # the same paths on the CPU

Computed steps are fixed, because forecasts of random weights fail. Answers to clients that ask again at once follow
from the calls' seconds, and with `run` are those of a queue with a batch size. HTTP and files of videos are left out.
`use_seconds` is a change of LoRAs, and `more_seconds` how much longer its request takes than one with the same again.
"""

import argparse
import math
import sys
import time
from collections import deque
from collections.abc import Iterator
from io import BytesIO
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from dit_accel.errors import headline
from dit_accel.models.beside.quantized_linears import block_linears
from dit_accel.pipeline import preset_for
from dit_accel.serving import loading
from dit_accel.serving.dispatcher import Dispatcher, Task
from dit_accel.serving.loras import NamedLoras
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.prompts import Job
from dit_accel.serving.worker import Worker
from dit_accel.tools.measure.origin import describe_run
from scripts.bench.call_speed.pipelines import CASES, EVERY_FIFTH, FEW_STEPS, build
from scripts.tables import names_in, write_rows

Row = dict[str, Any]
FLUX = {"steps": 28}
PARTS = {  # case, settings of its requests, layers' dtype, and samples of the timed calls; the most important first
    "flux-1024": ("flux", FLUX | {"height": 1024, "width": 1024}, None, (1, 2, 4)),
    "flux-512": ("flux", FLUX | {"height": 512, "width": 512}, None, (1, 2, 4, 8)),
    "loras": ("flux", {"height": 512, "width": 512, "steps": 5}, None, ()),
    "klein-1024": ("flux2-klein-4b", {"height": 1024, "width": 1024, "steps": 4}, None, (1, 2, 4, 8)),
    "wan-480p": ("wan-1.3b", {"height": 480, "width": 832, "num-frames": 33, "steps": 20}, None, (1, 4)),
    "flux-1024-float8": ("flux", FLUX | {"height": 1024, "width": 1024}, "float8", (1, 4)),
}
ANSWERS, SHORT = 400, 8.0  # SHORT: seconds of calls that are timed twice
CLIENTS, QUEUED = (1, 4, 16), (8, 16)  # clients, and those of a run with its answers
LORAS = {"a": 16, "b": 64}  # ranks by name
CHANGES = ("", "", "a", "a", "b", "b", "a", "b", "", "b")  # LoRA of each request; "" = none
SHOWN = ("part", "way", "samples", "seconds", "most", "clients", "per_second", "p50", "p95", "lora", "error")


class Requests:
    """Requests of a part to a worker; each has another prompt and seed."""

    def __init__(self, part: str, worker: Worker, *, plain: bool, tiny: bool) -> None:
        _, self.settings, dtype, _ = PARTS[part]
        few, (warmup, interval) = self.settings["steps"] <= FEW_STEPS, EVERY_FIFTH
        if tiny:
            toy = {"height": 32, "width": 64, "num-frames": 5, "steps": 8}
            self.settings = {name: min(value, toy[name]) for name, value in self.settings.items()}
        schedule = {"control": "interval", "warmup": warmup, "interval": interval, "cooldown": 1}
        sections = ({} if few else {"schedule": schedule}) | ({"linear": {"dtype": dtype}} if dtype else {})
        self.preset = None if plain else preset_for(worker.pipe, "exact" if few else "balanced", **sections)
        self.worker, self.suffix, self.report, self._numbers = worker, worker.suffix, dict[str, Any](), count()

    def job(self, **settings: Any) -> Job:
        number = next(self._numbers)
        return Job(0, {"prompt": f"fox {number}", "seed": number, **self.settings, **settings})

    def seconds(self, samples: int = 1, **settings: Any) -> float:
        """Make samples in one call, and return its seconds with those of their files."""
        begun = time.perf_counter()
        jobs = [self.job(**settings) for _ in range(samples)]
        made = self.worker.run(jobs, self.preset, self.suffix, lambda *_: None)
        self.report, self._made = made[0].report or {}, (jobs[0], made[0].data)
        return time.perf_counter() - begun

    def psnr(self) -> float | None:
        """Return the PSNR in dB of the latest call's first image, compared with the image made alone; None = equal."""
        job, data = self._made
        (alone,) = self.worker.run([job], self.preset, self.suffix, lambda *_: None)
        images = (torch.from_numpy(np.array(Image.open(BytesIO(file)))).float() for file in (data, alone.data))
        error = torch.nn.functional.mse_loss(*images).item()
        return 10 * math.log10(255**2 / error) if error else None


def time_part(part: str, workers: dict[str, Worker], *, tiny: bool) -> Iterator[Row]:
    name, _, dtype, samples = PARTS[part]
    if name not in workers:
        case = CASES[name]
        call = {**case.calls[0].arguments, **(case.tiny_arguments if tiny else {})}
        with (
            patch.object(loading, "resolve_model", str),
            patch.object(loading, "_from_pretrained", lambda *_, **__: build(case, tiny=tiny)),
        ):
            workers[name] = worker = Worker(Setup(name, "none", call=call, batch_size=max(CLIENTS)))
        if worker.suffix == ".mp4":
            worker.medium.write = lambda _clip, path, _sound: path.touch()
    facts = {"part": part, "case": name}
    if part == "loras":
        yield from (facts | row for row in changes(Requests(part, workers[name], plain=False, tiny=tiny)))
        return
    if dtype is None:
        plain = Requests(part, workers[name], plain=True, tiny=tiny)
        plain.seconds(steps=2)
        yield facts | {"way": "plain", "samples": 1, "seconds": [plain.seconds()]}
    requests = Requests(part, workers[name], plain=False, tiny=tiny)
    calls: dict[int, float] = {}
    for size in samples:
        for _ in range(2 if requests.settings["steps"] <= FEW_STEPS else 1):  # in which graphs and 8 bits are chosen
            requests.seconds(size)
        if not tiny:
            torch.cuda.reset_peak_memory_stats()
        times = [requests.seconds(size)]
        times += [requests.seconds(size)] if times[0] < SHORT else []
        calls[size] = median(times)
        row = {key: requests.report[key] for key in ("replayed", "not_captured", "notes")}
        row |= {"computed": len(requests.report["steps"]) - requests.report["steps_by_mode"].get("dispatch", 0)}
        row |= {"psnr_db": requests.psnr()} if size == samples[-1] and requests.suffix == ".png" else {}
        row |= {} if tiny else {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1)}
        yield facts | {"way": "accelerated", "samples": size, "seconds": times} | row
    for most in samples:
        for clients in CLIENTS:
            yield facts | {"most": most, "clients": clients} | answers(calls, clients, most)
    if part == "flux-512":
        yield facts | {"most": 4, "clients": QUEUED[0], "run": True} | run_queue(requests, 4)


def answers(calls: dict[int, float], clients: int, most: int) -> Row:
    """Serve clients that ask again just after the next call has begun, by the seconds of calls of some sizes."""
    waiting, late, now, ends, latencies = deque([0.0] * clients), list[float](), 0.0, list[float](), list[float]()
    while len(latencies) < clients + ANSWERS:
        if not waiting:
            waiting.append(late.pop())
        asked = [waiting.popleft() for _ in range(min(most, len(waiting)))]
        waiting.extend(late)
        now += float(np.interp(len(asked), [*calls], [*calls.values()]))
        late = [now] * len(asked)
        ends += late
        latencies += [now - before for before in asked]
    return figures(ends[clients:], latencies[clients:], ends[clients - 1])


def figures(ends: list[float], latencies: list[float], begun: float) -> Row:
    p50, p95 = (sorted(latencies)[int(share * len(latencies))] for share in (0.5, 0.95))
    return {"per_second": len(ends) / (ends[-1] - begun), "p50": p50, "p95": p95}


class Asked(Task):
    """A request of a client, which asks again at its end."""

    def __init__(self, requests: Requests, ended: SimpleQueue[Any]) -> None:
        super().__init__([requests.job()], requests.preset, requests.suffix)
        self._ended = ended

    def tell(self, event: Any) -> None:
        if event is None or isinstance(event, BaseException):
            self._ended.put((time.monotonic(), time.monotonic() - self.created, event))


def run_queue(requests: Requests, most: int) -> Row:
    """Serve clients by a queue; their first answers do not count."""
    clients, count = QUEUED
    queue, ended = Dispatcher([requests.worker], clients, most), SimpleQueue[Any]()
    ends, latencies = list[float](), list[float]()
    for _ in range(clients):
        queue.add(Asked(requests, ended))
    while len(ends) < clients + count:
        now, latency, error = ended.get(timeout=60)
        if error is not None:
            raise error
        queue.add(Asked(requests, ended))
        ends.append(now)
        latencies.append(latency)
    queue.stop(60.0)
    return figures(ends[clients:], latencies[clients:], ends[clients - 1])


def write_lora(transformer: torch.nn.Module, rank: int, file: Path) -> None:
    """Write a random LoRA of all linear layers in the blocks but modulations, in bf16."""
    state = {}
    for name, layer in block_linears(transformer):
        if "norm" not in name:
            for part, shape in ("A", (rank, layer.in_features)), ("B", (layer.out_features, rank)):
                weight = torch.randn(shape, dtype=torch.bfloat16, device=layer.weight.device) / rank
                state[f"transformer.{name}.lora_{part}.weight"] = weight
    save_file(state, file)


def changes(requests: Requests) -> Iterator[Row]:
    """Run requests with other LoRAs in turn; the first use of each loads its file."""
    worker, of_use, rows = requests.worker, list[float](), list[Row]()
    with TemporaryDirectory() as folder:
        files = {name: str(Path(folder) / f"{name}.safetensors") for name in LORAS}
        for name, file in files.items():
            write_lora(worker.pipe.transformer, LORAS[name], Path(file))
        loras = worker._loras = NamedLoras(worker.pipe, files)

        def timed(weights: dict[str, float], use: Any = loras.use) -> None:
            begun = time.perf_counter()
            use(weights)
            of_use.append(time.perf_counter() - begun)

        with patch.object(loras, "use", timed), patch("dit_accel.serving.worker.require_named"):
            for before, lora in zip((None, *CHANGES), CHANGES, strict=False):
                row: Row = {"before": before, "lora": lora, "loads": bool(lora) and lora not in loras._bytes}
                row["seconds"] = requests.seconds(loras={lora: 0.8} if lora else {})
                rows.append(row | {"use_seconds": of_use[-1], "replayed": requests.report["replayed"]})
        worker.pipe.unload_lora_weights()
        worker._loras = None
    again = {row["lora"]: row["seconds"] - row["use_seconds"] for row in rows if row["before"] == row["lora"]}
    yield from (row | {"more_seconds": row["seconds"] - again[row["lora"]]} for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=names_in(PARTS), default=list(PARTS), help=f"among {', '.join(PARTS)}")
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--tiny", action="store_true", help="toy size, on the CPU")
    options = parser.parse_args()
    workers: dict[str, Worker] = {}

    def rows() -> Iterator[Row]:
        for part in options.parts:
            try:
                yield from time_part(part, workers, tiny=options.tiny)
            except Exception as problem:  # the other parts may still run
                yield {"part": part, "error": headline(problem)}

    facts = write_rows(options.output, describe_run("cpu" if options.tiny else "cuda"), rows(), SHOWN)
    return int(any("error" in row for row in facts["rows"]))


if __name__ == "__main__":
    sys.exit(main())
