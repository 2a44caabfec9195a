"""Layers in 8 bits whose original weights wait on the host, or are stored in 8 bits by torchao."""

import statistics
from collections.abc import Iterator
from typing import Any

from dit_accel import load_preset
from dit_accel.serving.loading import quantize

from .bench import STEPS, Bench, noting_failure
from .measures import limit_memory, peak_memory

INT8 = load_preset("exact", linear={"dtype": "int8"})
ON_HOST = load_preset(INT8, **{"linear.weights": "host"})
CARD_GIB = 16


def weights_on_host(bench: Bench) -> Iterator[dict[str, Any]]:
    """Time int8 layers whose weights move from the GPU to the host, and a transformer that never fits on its GPU."""
    run = "exact, int8 layers, weights on the host"
    yield bench.accelerated(run, ON_HOST, 6, warm=2) | {"relative_error": bench.relative_error(ON_HOST)}
    yield bench.accelerated(f"{run}, CUDA graphs", load_preset(ON_HOST, **{"kernels.graphs": "always"}), 8, warm=4)
    yield _accelerated_before_it_moves(bench, f"{run}, {CARD_GIB} GiB")


def weights_by_torchao(bench: Bench) -> Iterator[dict[str, Any]]:
    """Time what `--quantize` loads, by torchao's products and by those of `linear.dtype`, as CUDA graphs."""
    for kind in ("int8", "float8") if bench.device.type == "cuda" else ("int8",):  # torchao's float8 needs a GPU
        quantized = Bench(bench.model, bench.device.type, bench.timed_steps)
        quantize(quantized, kind, quantized.device)
        quantized.velocity = bench.velocity
        for run, dtype in ((f"--quantize {kind}", None), (f"--quantize {kind}, {kind} layers", kind)):
            preset = load_preset("exact", **{"linear.dtype": dtype, "kernels.graphs": "always"})
            row = quantized.accelerated(f"{run}, CUDA graphs", preset, 6, warm=4)
            yield row | {"relative_error": quantized.relative_error(preset)}


def _accelerated_before_it_moves(bench: Bench, run: str) -> dict[str, Any]:
    row: dict[str, Any] = {"run": run, "failed": {}}
    bench.transformer.to("cpu")
    try:
        with noting_failure(row["failed"], run), bench.accelerating(ON_HOST):
            limit_memory(bench.device, CARD_GIB)
            try:
                bench.transformer.to(bench.device)
                row |= _timed(bench)
            finally:
                bench.transformer.to("cpu")
    finally:
        limit_memory(bench.device, None)
        bench.transformer.to(bench.device)
    return row


def _timed(bench: Bench) -> dict[str, Any]:
    """Time steps of the transformer as it is; the first step compiles or uploads."""
    with peak_memory(bench.device) as memory:
        run = bench.loop(STEPS)
        first, _ = bench.timed(run, 1), bench.timed(run, 1)
        times = bench.timed(run, bench.timed_steps)
    error = bench.error_of(next(bench.loop(STEPS)))
    return {"ms": statistics.median(times), "first_step_seconds": first[0] / 1000, "relative_error": error, **memory}
