#!/usr/bin/env python3
"""Time a server's requests at full size with random weights, and changes of their LoRAs.

    python -m scripts.bench.serving --output docs/results/serving-speed.json
    python -m scripts.bench.serving --models flux --parts changes     # of LoRAs only
    python -m scripts.bench.serving --tiny                            # the same paths on the CPU, in seconds

Calls of one and of `MOST` requests are timed. The answers to clients that ask again at once follow from their seconds:
one request a call, or up to `MOST` that wait together. Rows with `run` are such clients. Computed steps are fixed,
because forecasts of random weights fail. HTTP is left out.

LoRAs of the layers in FLUX's blocks change from request to request, with steps that CUDA graphs replay and without.
`use_seconds` is the change itself, and `more_seconds` what the request takes longer than one with the same LoRAs again.
"""

import argparse
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from dit_accel.models.beside.quantized_linears import block_linears
from dit_accel.pipeline import preset_for
from dit_accel.presets import Preset
from dit_accel.serving.loading import Loading
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.prompts import Job
from dit_accel.serving.worker import Worker
from dit_accel.tools.measure.origin import describe_run
from scripts.bench.call_speed.pipelines import CASES, FEW_STEPS, Call, steps
from scripts.bench.random_weights import MARK, random_weights
from scripts.tables import names_in, write_rows

Row = dict[str, Any]
MODELS, PARTS = ("flux", "flux2-klein-4b"), ("changes", "answers")
SIDES, TINY_SIDES = (1024, 512), (64, 32)  # pixels
MOST, CLIENTS = 4, (1, 4, 16)
RUNS, ANSWERS, RUN_ANSWERS = 3, 400, 8
CHANGE_STEPS = 5
RANKS = {"a": 16, "b": 64}  # of LoRAs by name
CHANGES = ("", "", "a", "a", "b", "b", "a", "b", "", "b")  # LoRA of each request; "" = none
SHOWN = ("case", "side", "way", "calls", "clients", "most", "per_second", "p50", "p95", "run")
SHOWN += (
    "before",
    "lora",
    "use_seconds",
    "more_seconds",
    "seconds",
    "replayed",
    "fallbacks",
    "stages",
    "not_captured",
    "notes",
)


def main() -> int:
    options = _options()
    with random_weights(tiny=options.tiny), TemporaryDirectory() as folder:
        rows = (row for name in options.models for row in time_model(name, Path(folder), options))
        write_rows(options.output, describe_run("cpu" if options.tiny else "cuda"), rows, SHOWN)
    return 0


def time_model(name: str, folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    case, tiny = CASES[name], options.tiny
    call, has_loras = case.calls[-1], name == "flux" and "changes" in options.parts
    files = {key: str(folder / f"{key}.safetensors") for key in RANKS if has_loras}
    arguments = {**call.arguments, **(case.tiny_arguments if tiny else {})}
    worker = Worker(Setup(case.model + MARK, "none", loading=Loading(named_loras=files), call=arguments))
    sides = TINY_SIDES if tiny else SIDES
    for key, file in files.items():
        write_lora(worker.pipe.transformer, RANKS[key], Path(file))
    for way, preset in of_changes(worker.pipe).items() if files else ():
        requests = Requests(worker, preset, sides[-1], CHANGE_STEPS)
        yield from ({"case": name, "side": requests.side, "way": way, **row} for row in changes(requests))
    if files:
        worker.pipe.unload_lora_weights()
        worker._loras = None
    for side in sides if "answers" in options.parts else ():
        for way, preset in ways(worker.pipe, call).items():
            requests = Requests(worker, preset, side, steps(call, tiny=tiny))
            facts = {"case": name, "side": side, "way": way, "steps": requests.steps}
            for row in answers(requests, 1 if preset is None else MOST, runs=side == sides[-1]):
                yield facts | row


def ways(pipe: Any, call: Call) -> dict[str, Preset | None]:
    preset, sections = "exact", {}
    if call.schedule is not None:
        warmup, interval = call.schedule
        preset, sections = "balanced", {"control": "interval", "warmup": warmup, "interval": interval, "cooldown": 1}
    sections = {"schedule": sections} if sections else {}
    float8 = preset_for(pipe, preset, **sections, linear={"dtype": "float8"})
    return {"plain": None, preset: preset_for(pipe, preset, **sections), f"{preset}, float8 layers": float8}


def of_changes(pipe: Any) -> dict[str, Preset]:
    layers = {"bf16": {}, "float8 layers": {"linear": {"dtype": "float8"}}}
    return {
        f"{name}, graphs {graphs}": preset_for(pipe, "exact", kernels={"graphs": graphs}, **sections)
        for name, sections in layers.items()
        for graphs in ("auto", "never")
    }


class Requests:
    """Requests of a size to a worker; each has another prompt."""

    def __init__(self, worker: Worker, preset: Preset | None, side: int, steps: int) -> None:
        self.worker, self.preset, self.side, self.steps = worker, preset, side, steps
        self._numbers = count()

    def seconds(self, size: int = 1, *, steps: int | None = None, **settings: Any) -> float:
        """Run requests in one call, and return its seconds with those of the images' files."""
        settings |= {"height": self.side, "width": self.side, "steps": steps or self.steps}
        jobs = [Job(at, {"prompt": f"fox {next(self._numbers)}", "seed": at, **settings}) for at in range(size)]
        begun = time.perf_counter()
        made, *_ = self.worker.run(jobs, self.preset, ".png", lambda *_: None)
        seconds = time.perf_counter() - begun
        self.report, self.stages = made.report or {}, made.stages | {"file": seconds - sum(made.stages.values())}
        return seconds


def answers(requests: Requests, most: int, *, runs: bool) -> Iterator[Row]:
    """Time calls, and yield the answers to each number of clients, of one request a call and of up to ``most``."""
    calls: dict[int, list[float]] = {}
    stages: dict[int, dict[str, float]] = {}
    for size in sorted({1, most}):
        for _ in range(2 if requests.steps <= FEW_STEPS else 1):  # in which graphs and 8 bits are chosen
            requests.seconds(size, steps=2 if requests.preset is None else None)
        calls[size] = [requests.seconds(size) for _ in range(RUNS)]
        stages[size] = requests.stages  # of the last one
    computed = requests.steps - requests.report.get("steps_by_mode", {}).get("dispatch", 0)
    report = {key: requests.report.get(key) for key in ("replayed", "not_captured", "notes")}
    yield {"calls": calls, "stages": stages, "computed": computed, **report}
    draw = random.Random(0)
    for limit in sorted(calls):
        for clients in CLIENTS:
            found = queue(lambda size: draw.choice(calls[size]), clients, limit, ANSWERS)
            yield {"clients": clients, "most": limit, **found}
        if runs and requests.preset is not None:
            yield {"clients": MOST, "most": limit, "run": True, **queue(requests.seconds, MOST, limit, RUN_ANSWERS)}


def queue(call: Callable[[int], float], clients: int, most: int, answers: int) -> Row:
    """Serve clients that ask again at once, the longest waiting first; their first answers do not count."""
    waiting, now, begun, latencies = deque([0.0] * clients), 0.0, 0.0, list[float]()
    while len(latencies) < clients + answers:
        asked = [waiting.popleft() for _ in range(min(most, clients))]
        now += call(len(asked))
        latencies += [now - before for before in asked]
        waiting.extend([now] * len(asked))
        begun = now if len(latencies) <= clients else begun
    counted = sorted(latencies[clients:])
    p50, p95 = (counted[int(share * len(counted))] for share in (0.5, 0.95))
    return {"per_second": len(counted) / (now - begun), "p50": p50, "p95": p95}


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
    loras, of_use, rows = requests.worker._loras, list[float](), list[Row]()

    def timed(weights: dict[str, float], use: Any = loras.use) -> None:
        begun = time.perf_counter()
        use(weights)
        of_use.append(time.perf_counter() - begun)

    with patch.object(loras, "use", timed):
        for before, lora in zip((None, *CHANGES), CHANGES, strict=False):
            row: Row = {"before": before, "lora": lora, "loads": bool(lora) and lora not in loras._bytes}
            row["seconds"] = requests.seconds(loras={lora: 0.8} if lora else {})
            row |= {"use_seconds": of_use[-1], "replayed": requests.report["replayed"]}
            rows.append(row | {"fallbacks": len(requests.report["fallbacks"])})
    again = {row["lora"]: row["seconds"] - row["use_seconds"] for row in rows if row["before"] == row["lora"]}
    for row in rows:
        yield row | {"more_seconds": row["seconds"] - again[row["lora"]]}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=names_in(MODELS), default=list(MODELS), help=f"among {', '.join(MODELS)}")
    parser.add_argument("--parts", type=names_in(PARTS), default=list(PARTS), help=f"among {', '.join(PARTS)}")
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--tiny", action="store_true", help="toy size, on the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
