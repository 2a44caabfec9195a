"""Runs of a model's benchmark; each yields its rows one after the other."""

import itertools
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import save_file

from dit_accel import Preset, load_preset
from dit_accel.models.families import require_family
from dit_accel.sla.checkpoints import trained_preset

from .bench import STEPS, Bench
from .layers_in_8_bits import weights_by_torchao, weights_on_host

# FlashOmni's table 1: (40%, 1%, 6, 1, 0) skips 39% of all attention. That is 57% of each of the 34 DISPATCH steps among
# 50, nearly all of it whole rows.
FLASHOMNI_ROWS, FLASHOMNI_TILES = 0.45, 0.96
# Kept shares: SpargeAttn skips 38% and 47% on Flux and Mochi (table 1); FG-Attn on Wan 1.3B (table 3).
SPARGE_TILES = {"flux": 0.62, "hunyuan": 0.53, "wan21": 0.53}
FG_ATTN_KEYS = 0.59
TILED_STEPS = 9  # every second one is computed; by then such steps are captured in graphs if that is faster
FLASHOMNI = {"flux": "flux-flashomni-paper", "hunyuan": "hunyuan-flashomni-paper", "wan21": "wan21-flashomni"}


def baseline(bench: Bench) -> Iterator[dict[str, Any]]:
    """Time the fastest dense run of diffusers."""
    yield bench.baseline()


def computed_steps(bench: Bench) -> Iterator[dict[str, Any]]:
    """Time a step that computes everything, and computed steps that skip half and four fifths of the tiles."""
    exact = load_preset("exact")
    row = bench.accelerated("exact", exact, 4)
    yield row | {"relative_error": bench.relative_error(exact), **bench.occupancy(exact)}
    for density in (0.5, 0.2):
        preset = fixed(bench.model.sparse, warmup=1, interval=2, cooldown=0)
        row = bench.accelerated(f"{1 - density:.0%} of tiles left out", preset, TILED_STEPS, tiles=density)
        if density == 0.5:
            row |= bench.occupancy(_always_computing(bench.model.sparse), tiles=density)
        yield row
        means = load_preset(preset, **{"skip.means": True})
        name = f"{1 - density:.0%} of tiles left out, by their means"
        yield bench.accelerated(name, means, TILED_STEPS, tiles=density)


def exact(bench: Bench) -> Iterator[dict[str, Any]]:
    """Time a step that computes everything, also as CUDA graphs and with layers in float8."""
    for dtype, graphs in itertools.product((None, "float8"), ("never", "always")):
        preset = load_preset("exact", **{"kernels.graphs": graphs, "linear.dtype": dtype})
        run = f"exact{', float8 layers' if dtype else ''}{', CUDA graphs' if graphs == 'always' else ''}"
        yield bench.accelerated(run, preset, 8, warm=4) | {"relative_error": bench.relative_error(preset)}


def fifty_steps(bench: Bench) -> Iterator[dict[str, Any]]:
    """Time 50 steps with 14 computed, 4 of them dense; for videos the other 10 skip half of the tiles."""
    is_video = bench.model.is_video
    name = bench.model.sparse if is_video else "balanced"
    preset = fixed(name, warmup=4, interval=5, cooldown=1)
    tiles = 0.5 if is_video else 1.0
    run = f"14 of {STEPS} steps computed" + (", 50% of tiles" if tiles < 1 else "")
    row = bench.accelerated(run, preset, STEPS, tiles=tiles, warm=20, whole=True)  # every kernel of a run
    if not is_video:
        row |= bench.occupancy(_always_computing(name))
    yield row


def dispatch_steps(bench: Bench) -> Iterator[dict[str, Any]]:
    """Time a DISPATCH step at level output against a computed step, for the model and its variants."""
    preset = fixed("balanced", warmup=3, interval=4, cooldown=0)
    for name in ("", *bench.model.variants):
        case = bench.variant(name) if name else bench
        row = case.accelerated(f"DISPATCH, {name or 'plain'}", preset, 9, warm=0)
        shares = {
            f"{part}_share": row[key]["dispatch"] / row[key]["update"]
            for part, key in (("dispatch", "transformer_ms_by_mode"), ("dispatch_step", "ms_by_mode"))
        }
        yield row | shares


def flashomni_steps(bench: Bench) -> Iterator[dict[str, Any]]:
    """Time FlashOmni's own setting; ten steps cover every mode, and 50 steps are calculated from them."""
    preset = load_preset(FLASHOMNI[bench.model.family], **{"schedule.warmup": 2, "reuse.ramp": 0.01})
    yield bench.accelerated("FlashOmni", preset, 10, rows=FLASHOMNI_ROWS, tiles=FLASHOMNI_TILES)


def papers(bench: Bench) -> Iterator[dict[str, Any]]:
    """Time computed steps of the other papers' methods at their published densities; the first steps make the masks."""
    family, model = bench.model.family, load_preset(bench.model.tiles).model
    yield bench.accelerated("SpargeAttn", load_preset(f"{family}-sparge"), 5, tiles=SPARGE_TILES[family])
    with tempfile.TemporaryDirectory() as folder:
        file = _random_checkpoint(bench, folder, "proj_l")
        yield bench.accelerated("SLA", load_preset("wan21-sla", model=model, skip={"projection": file}), 5)
    single_keys = load_preset("wan21-fgattn", model=model, **{"schedule.warmup": 1})
    yield bench.accelerated("FG-Attn", single_keys, 15, keys=FG_ATTN_KEYS, warm=4)


def trained(bench: Bench) -> Iterator[dict[str, Any]]:
    """Time the steps of TurboWan (SLA) and FastWan (VSA), which have few, also with layers in 8 bits."""
    for module, run, scores in (("proj_l", "SLA", (None, "int8")), ("to_gate_compress", "VSA", (None,))):
        with tempfile.TemporaryDirectory() as folder:
            preset = trained_preset(_random_checkpoint(bench, folder, module))
            for qk_dtype, dtype in itertools.product(scores, (None, "float8")):
                changed = load_preset(preset, **{"kernels.qk_dtype": qk_dtype, "linear.dtype": dtype})
                parts = [run, f"{qk_dtype} scores" if qk_dtype else "", f"{dtype} layers" if dtype else ""]
                yield bench.accelerated(", ".join(filter(None, parts)), changed, 4)


def _random_checkpoint(bench: Bench, folder: str, module: str) -> str:
    """Write a random projection of SLA or gate of VSA for every attention layer; all weights are random."""
    family = require_family(bench.transformer)
    heads, head_dim = family.heads(bench.transformer)
    side = head_dim if module == "proj_l" else heads * head_dim
    sites = [item.site for item in family.all_attentions(bench.transformer, "transformer")]
    weights = {f"{site}.{module}.weight": torch.randn(side, side, device="cpu") / side for site in sites}
    save_file(weights, f"{folder}/model.safetensors")
    return folder


def kernel_times(bench: Bench) -> Iterator[dict[str, Any]]:
    """Time of a computed step, kernel by kernel."""
    for run, preset, tiles in (
        ("exact", load_preset("exact"), 1.0),
        ("50% of tiles left out", _always_computing(bench.model.sparse), 0.5),
    ):
        row = bench.accelerated(run, preset, 4, tiles=tiles, warm=2)
        yield row | {"kernels": bench.kernel_times(preset, tiles=tiles), **bench.occupancy(preset, tiles=tiles)}


def linear_layers(bench: Bench) -> Iterator[dict[str, Any]]:
    """Time a step that computes everything with linear layers in 8 bits; for images also as CUDA graphs."""
    for dtype in ("int8", "float8"):
        preset = load_preset("exact", linear={"dtype": dtype})
        row = bench.accelerated(f"exact, {dtype} layers", preset, 6, warm=2)
        yield row | {"relative_error": bench.relative_error(preset), "kernels": bench.kernel_times(preset)}
        if not bench.model.is_video:
            preset = load_preset(preset, **{"kernels.graphs": "always"})
            yield bench.accelerated(f"exact, {dtype} layers, CUDA graphs", preset, 8, warm=4)


def batches(bench: Bench) -> Iterator[dict[str, Any]]:
    """Time a computed step that several prompts share, with and without layers in 8 bits."""
    exact = load_preset("exact")
    for layers, preset in (("", exact), (", float8 layers", load_preset(exact, linear={"dtype": "float8"}))):
        for size in (1, 2, 4, 8):
            yield bench.batch(size).accelerated(f"exact{layers}, {size} a call", preset, 8, warm=4)


RUNS = {
    "baseline": baseline,
    "computed": computed_steps,
    "fifty": fifty_steps,
    "dispatch": dispatch_steps,
    "flashomni": flashomni_steps,
    "papers": papers,
    "trained": trained,
    "kernels": kernel_times,
    "exact": exact,
    "linear": linear_layers,
    "host": weights_on_host,
    "batches": batches,
    "torchao": weights_by_torchao,
}


def fixed(name: str | Preset, **schedule: int) -> Preset:
    """Return a preset with a fixed interval of computed steps, because forecasts fail on random weights."""
    return load_preset(name, schedule={"control": "interval", **schedule})


def _always_computing(name: str | Preset) -> Preset:
    """Return a closed-loop preset that checks every forecast and computes every step."""
    return load_preset(name, **{"schedule.warmup": 0, "schedule.max_interval": 1, "schedule.cooldown": 0})
