"""Layers in 8 bits whose original weights wait on the host, and layers of torchao under our blocks and CUDA graphs."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from dit_accel import load_preset
from dit_accel.models.beside.quantized_linears import roundable
from dit_accel.models.graphs import limits

from .bench import STEPS, Bench, compiled_blocks, noting_failure
from .measures import limit_memory, peak_memory

INT8 = load_preset("exact", linear={"dtype": "int8"})
ON_HOST = load_preset(INT8, **{"linear.weights": "host"})
CARD_GIB = 16


def weights_on_host(bench: Bench) -> Iterator[dict[str, Any]]:
    """Time int8 layers whose weights move from the GPU to the host, and a transformer that never fits on its GPU."""
    run = "exact, int8 layers, weights on the host"
    row = bench.accelerated(run, ON_HOST, 6, warm=2)
    yield row | {"relative_error": bench.relative_error(ON_HOST)}
    yield bench.accelerated(f"{run}, CUDA graphs", load_preset(ON_HOST, **{"kernels.graphs": "always"}), 8, warm=4)
    yield _accelerated_before_it_moves(bench, f"{run}, {CARD_GIB} GiB")


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


def torchao_layers(bench: Bench) -> Iterator[dict[str, Any]]:
    """Time torchao's float8 and int8 layers under `exact`, then with diffusers' compiled blocks."""
    for dtype, quantize in (("float8", _to_float8), ("int8", _to_int8)):
        run = f"torchao's {dtype} layers"
        failed: dict[str, str] = {}
        bench.rebuild()
        with noting_failure(failed, run):
            quantize(bench.transformer)
        if failed:
            yield {"run": run, "failed": failed}
            continue
        for graphs in ("never", "always"):
            preset = load_preset("exact", **{"kernels.graphs": graphs})
            row: dict[str, Any] = {"run": f"exact, {run}" + ", CUDA graphs" * (graphs == "always"), "failed": {}}
            with noting_failure(row["failed"], row["run"]), _captures_torchao(bench.transformer):
                row |= bench.accelerated(row["run"], preset, 8, warm=4)
                row["relative_error"] = bench.relative_error(preset)
            yield row
        row = {"run": f"{run}, compiled blocks", "failed": {}}
        with noting_failure(row["failed"], row["run"]), compiled_blocks(bench.transformer, bench.device):
            row |= _timed(bench)
        yield row
    bench.rebuild()


def _timed(bench: Bench) -> dict[str, Any]:
    """Time steps of the transformer as it is; the first step compiles or uploads."""
    with peak_memory(bench.device) as memory:
        run = bench.loop(STEPS)
        first, _ = bench.timed(run, 1), bench.timed(run, 1)
        times = bench.timed(run, bench.timed_steps)
    error = bench.error_of(next(bench.loop(STEPS)))
    return {
        "ms": statistics.median(times),
        "first_step_seconds": first[0] / 1000,
        "relative_error": error,
        **memory,
    }


def _quantize(transformer: torch.nn.Module, config: Any) -> None:
    """Quantise the layers that linear.dtype rounds."""
    from torchao.quantization import quantize_

    names = roundable(transformer, INT8.linear)
    quantize_(transformer, config, lambda _, name: name in names)
    gc.collect()


def _to_float8(transformer: torch.nn.Module) -> None:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow

    _quantize(transformer, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))


def _to_int8(transformer: torch.nn.Module) -> None:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    _quantize(transformer, Int8DynamicActivationInt8WeightConfig())


@contextmanager
def _captures_torchao(transformer: torch.nn.Module) -> Iterator[None]:
    """Let CUDA graphs read torchao's weights, whose addresses stay the same during a benchmark."""
    kinds = {type(each) for each in transformer.parameters()}
    with patch.object(limits, "PLAIN_TENSORS", (*{*limits.PLAIN_TENSORS, *kinds},)):
        yield
