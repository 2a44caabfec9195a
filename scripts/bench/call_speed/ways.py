"""Ways to run a pipeline's call: diffusers, with compiled blocks, with cache-dit, and accelerated."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from dit_accel import Preset, accelerated
from dit_accel.errors import UnsupportedError
from dit_accel.pipeline import preset_for
from dit_accel.sparse.projections import PROJECTIONS
from dit_accel.tools.measure.compare.dbcache import DBCACHES, put_on
from dit_accel.tools.measure.compare.methods import Subject
from dit_accel.tools.measure.compare.snapshot import Snapshot
from dit_accel.tools.measure.timing import Output, timed_output
from scripts.bench.model_speed.bench import OF_REPORT, compiled_blocks
from scripts.bench.model_speed.forced import forced_density
from scripts.bench.model_speed.measures import peak_memory
from scripts.bench.model_speed.models import MODELS

from .pipelines import FEW_STEPS, Call, Case, arguments, size, steps

Row = dict[str, Any]
Describe = Callable[[], Row]  # facts of the latest call
OURS = ("exact", "balanced", "int8", "float8", "sparse", "sparse-float8", "sla")
WHOLE = ("cache-dit", *OURS)  # ways whose kernels only a whole call compiles
TILES = 0.5  # computed share of the tiles of ways `sparse` and `sparse-float8`


@contextmanager
def _compiled(pipe: Any, call: Call, count: int) -> Iterator[Describe]:
    with compiled_blocks(pipe.transformer, pipe.device, fullgraph=False):
        yield dict


@contextmanager
def _cache_dit(pipe: Any, call: Call, count: int) -> Iterator[Describe]:
    """DBCache with TaylorSeer and compiled blocks; a mask fixes its computed steps, as the interval fixes ours."""
    reason = DBCACHES["scm"].why_not(pipe) if call.cacheable else "a step must be forecast, and have at most two calls"
    if reason is not None:
        raise UnsupportedError(reason)
    warmup, interval = call.schedule

    def describe() -> Row:
        import cache_dit

        cached = len(cache_dit.summary(pipe, logging=False)[0].cached_steps)
        return {"setting": f"SCM W={warmup} N={interval} static D=1", "computed_steps": count - cached}

    before = Snapshot(pipe)
    try:
        subject = Subject(pipe, count, call.branches, lambda: None)
        masked = put_on(subject, warmup, interval=interval, policy="static", calibrator="TaylorSeer")
        with _compiled(pipe, call, count), masked:
            yield describe
    finally:
        before.restore()


@contextmanager
def _accelerated(pipe: Any, call: Call, count: int, name: str | Preset, **sections: Any) -> Iterator[Describe]:
    schedule = {}
    if name != "exact" and call.schedule is not None:
        warmup, interval = call.schedule
        schedule = {"schedule": {"control": "interval", "warmup": warmup, "interval": interval, "cooldown": 1}}
    stages = {"prompts": False, "share": dist.is_initialized()}  # each call has a new prompt
    preset = preset_for(pipe, name, **schedule, **sections, stages=stages)

    def describe() -> Row:
        report = pipe.dit_accel.report()
        return {
            "setting": preset.name,
            **({} if preset.linear.dtype is None else {"linear": preset.linear.dtype}),
            "computed_steps": len(report.steps) - report.steps_by_mode.get("dispatch", 0),
            "computed_fraction": report.computed_fraction,
            "decoded": report.decoding,
            "parts": report.parts,
            **{key: getattr(report, key) for key in OF_REPORT},
        }

    with accelerated(pipe, preset):
        yield describe


def _in_8_bits(pipe: Any, call: Call, count: int, dtype: str) -> AbstractContextManager[Describe]:
    """Compute linear layers in 8 bits, on the steps of `balanced` where it leaves steps out."""
    return _accelerated(pipe, call, count, "exact" if call.schedule is None else "balanced", linear={"dtype": dtype})


@contextmanager
def _sparse(pipe: Any, call: Call, count: int, **sections: Any) -> Iterator[Describe]:
    """Leave random tiles out of computed steps after the warm-up: attention maps of random weights are noise."""
    if not call.sparse:
        raise UnsupportedError("no preset leaves tiles out of this model")
    sparse = MODELS[call.sparse].sparse
    with forced_density(1.0, TILES, 1.0), _accelerated(pipe, call, count, sparse, **sections) as describe:
        yield lambda: {"tile_density": TILES, **describe()}


@contextmanager
def _sla(pipe: Any, call: Call, count: int) -> Iterator[Describe]:
    """Attend by SLA with random projections in every step, and compute linear layers in float8."""
    if not call.sla:
        raise UnsupportedError("no preset of SLA is for this model")
    side = pipe.transformer.config.attention_head_dim
    with TemporaryDirectory() as folder:
        skip = {"projection": f"{folder}/{PROJECTIONS}"}
        names = [f"transformer.blocks.{number}" for number in range(len(pipe.transformer.blocks))]
        save_file({name: torch.randn(side, side) / side**0.5 for name in names}, skip["projection"])
        with _accelerated(pipe, call, count, call.sla, skip=skip, linear={"dtype": "float8"}) as describe:
            yield describe


WAYS: dict[str, Callable[[Any, Call, int], AbstractContextManager[Describe]]] = {
    "eager": lambda *_: nullcontext(dict),
    "compiled": _compiled,
    "exact": partial(_accelerated, name="exact"),
    "balanced": partial(_accelerated, name="balanced"),
    "int8": partial(_in_8_bits, dtype="int8"),
    "float8": partial(_in_8_bits, dtype="float8"),
    "sparse": _sparse,
    "sparse-float8": partial(_sparse, linear={"dtype": "float8"}),
    "sla": _sla,
    "cache-dit": _cache_dit,  # last, because it leaves attributes behind
}


def ways_of(call: Call, *, alone: bool) -> list[str]:
    """Return the ways that are timed by default: ``exact`` and 8 bits where steps are few; ours on several GPUs."""
    few = call.steps <= FEW_STEPS
    which = {"exact": few, "balanced": call.schedule is not None, "sparse": bool(call.sparse)}
    which |= {"int8": few, "float8": few, "sla": bool(call.sla)}
    ours = [way for way in OURS if which.get(way)]
    return [*["eager", "compiled"] * alone, *ours, *["cache-dit"] * (alone and call.cacheable)]


def measure(pipe: Any, case: Case, call: Call, way: str, runs: int, few: int | None = None, *, tiny: bool) -> Row:
    """Time a call: a warm-up, of two steps where these compile all kernels, then whole calls.

    A way in `WHOLE` gets `runs` of these, and a warm-up of twice ``few`` steps, if that is given. The others get one
    call, of ``few`` steps, whose share of the denoising is added for each step left out. Processes that share a call
    warm up twice, because each decodes the first latents by itself, to compare.
    """
    values, count = arguments(case, call, tiny=tiny), steps(call, tiny=tiny)
    few = few or count
    warm, timed = (min(2 * few, count), count) if way in WHOLE else (2, min(few, count))
    tiled = _in_tiles(pipe.vae) if case.tiles and way not in OURS else nullcontext()
    with tiled, WAYS[way](pipe, call, count) as describe:
        for _ in range(1 + dist.is_initialized()):
            _checked(pipe, case, values | {"num_inference_steps": warm}, tiny=tiny)
        with peak_memory(pipe.device) as memory:
            whole = values | {"num_inference_steps": timed}
            output = [_checked(pipe, case, whole, tiny=tiny) for _ in range(runs if way in WHOLE else 1)]
        facts = describe()
    stages = {name: statistics.median(item.stages[name] for item in output) for name in output[0].stages}
    left_out = (count - timed) * call.branches / output[0].calls * stages["denoising"]
    seconds = [item.seconds + left_out for item in output]
    return {
        "seconds": statistics.median(seconds),
        "seconds_each": seconds,
        "stages": stages | {"denoising": stages["denoising"] + left_out},
        **memory,
        "computed_steps": count,
        **({} if timed == count else {"timed_steps": timed}),
        **facts,
    }


@contextmanager
def _in_tiles(autoencoder: Any) -> Iterator[None]:
    autoencoder.enable_tiling()
    try:
        yield
    finally:
        autoencoder.disable_tiling()


def _checked(pipe: Any, case: Case, values: dict[str, Any], *, tiny: bool) -> Output:
    """Call the pipeline once, and check its latents and the size of its result."""
    latents: list[torch.Tensor] = []

    def keep(pipe: Any, step: int, timestep: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        latents[:] = [tensors["latents"]]
        return tensors

    output = timed_output(pipe, values | {"callback_on_step_end": keep}, seed=0)
    height, width, frames = size(case, tiny=tiny)
    (result,) = output.results
    shape = (result.height, result.width) if frames is None else result.shape[:3]
    if shape != ((height, width) if frames is None else (frames, height, width)):
        raise RuntimeError(f"the result's sides must be {height} x {width}, {frames} frames, got {shape}")
    if not latents[0].isfinite().all():
        raise RuntimeError("the latents have values that are no numbers")
    return output
