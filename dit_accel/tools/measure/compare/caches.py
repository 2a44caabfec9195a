"""The caches of diffusers, each with a sweep of settings.

Settings follow each cache's documentation. Improvements beyond it, which give each cache its best results, are
explained at the code and in docs/notes/comparisons.md.
"""

import ast
import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from functools import partial
from typing import Any

import diffusers
import torch
from diffusers.hooks import HookRegistry

from dit_accel.models import denoisers
from dit_accel.tools.measure.compare.methods import Peer, Subject
from dit_accel.tools.measure.timing import removed_after

# Layers whose outputs TaylorSeer forecasts "per layer", as in its paper, and layers that it then skips.
_LAYERS = [r"(transformer_)?blocks\.\d+\.(attn[12]?|ff|ffn|ff_context)", r"single_transformer_blocks\.\d+\.proj_out"]
_IDLE_LAYERS = [r"single_transformer_blocks\.\d+\.(attn|proj_mlp)"]
_ATTENTIONS = [r"((single_)?transformer_)?blocks\.\d+\.(attn|attn1|attn2)"]

# Warm-up, order and interval.
_TAYLOR_SETTINGS = [(3, 1, 3), (3, 1, 4), (3, 1, 6), (3, 2, 2), (3, 2, 3), (3, 2, 4), (3, 2, 6), (3, 2, 8)]
_TAYLOR_SETTINGS += [(8, 1, 3), (8, 1, 6)]
# Threshold, most skipped steps and retention; threshold and most reuses in a row.
_MAG_SETTINGS = [(0.02, 1, 0.2), (0.06, 2, 0.2), (0.06, 3, 0.2), (0.12, 4, 0.2), (0.12, 4, 0.1), (0.24, 6, 0.1)]
_MAG_SETTINGS += [(0.5, 5, 0.2), (0.5, 8, 0.1), (2.0, 4, 0.1), (2.0, 6, 0.1)]
_SEA_SETTINGS = [(0.05, 1), (0.1, 1), (0.1, 2), (0.15, 2), (0.25, 2), (0.25, 3), (0.4, 4), (0.6, 5), (1.0, 6), (2.0, 8)]
_THRESHOLDS = [(threshold,) for threshold in (0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.18, 0.25, 0.35, 0.5)]
# Warm-up and interval of attention caches.
_INTERVALS = [(3, 2), (3, 3), (3, 4), (3, 6), (3, 10), (8, 4)]


def _cache(
    cache: str,
    name: str,
    settings: Sequence[tuple],
    arguments: Callable[..., dict[str, Any]],
    *,
    series: str | None = None,
    within: Callable[[Subject], AbstractContextManager[None]] = nullcontext,
) -> Peer:
    """Make a method from a cache of diffusers; ``arguments`` returns those of ``cache`` + ``Config`` for a setting."""
    config = f"{cache}Config"

    @contextmanager
    def put_on(subject: Subject, *setting: Any) -> Iterator[dict[str, Any]]:
        make = getattr(diffusers, config)
        with _enabled(subject.pipe, lambda: make(**arguments(subject, *setting))), within(subject):
            yield {}

    def why_not(pipe: Any) -> str | None:
        if not hasattr(diffusers, config):
            return f"diffusers {diffusers.__version__} has no {config}"
        uncached = [type(module).__name__ for module in denoisers(pipe).values() if not hasattr(module, "enable_cache")]
        return f"{uncached[0]} does not support caches" if uncached else None

    return Peer(series or cache, name, settings, put_on, why_not)


def _taylorseer(variant: str, label: str, settings: Sequence[tuple[int, int, int]], **parts: Any) -> Peer:
    def arguments(subject: Subject, warmup: int, order: int, interval: int) -> dict[str, Any]:
        steps = {"disable_cache_before_step": warmup, "disable_cache_after_step": subject.steps - 1}
        dtype = next(iter(denoisers(subject.pipe).values())).dtype
        return {"cache_interval": interval, "max_order": order, "taylor_factors_dtype": dtype, **steps, **parts}

    name = f"TaylorSeer {label} W={{0}} N={{2}} D={{1}}"
    return _cache("TaylorSeerCache", name, settings, arguments, series=f"TaylorSeer{variant} (diffusers)")


def _mag(subject: Subject, threshold: float, skipped: int, retained: float) -> dict[str, Any]:
    """Arguments of MagCache. Its calibration on the tuning prompt prints magnitude ratios; their mean over branches."""
    if "mag_cache" not in subject.calibrations:
        config = diffusers.MagCacheConfig(calibrate=True, num_inference_steps=subject.steps)
        with _enabled(subject.pipe, lambda: config), redirect_stdout(io.StringIO()) as printed:
            subject.tuning_run()
        lists = [ast.literal_eval(line) for line in printed.getvalue().splitlines() if line.startswith("[1.0")]
        subject.calibrations["mag_cache"] = torch.tensor(lists).mean(0).tolist()
    limits = {"threshold": threshold, "max_skip_steps": skipped, "retention_ratio": retained}
    return limits | {"num_inference_steps": subject.steps, "mag_ratios": subject.calibrations["mag_cache"]}


def _sea(subject: Subject, threshold: float, consecutive: int) -> dict[str, Any]:
    limits = {"threshold": threshold, "max_consecutive_cached": consecutive, "retention_steps": 3}
    return limits | {"raw_vision_callback": _vision_latents}


def _vision_latents(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
    """Return latents ``[C, T, H, W]`` of each sample, or None if their shape is unknown, to compute all steps."""
    latents = kwargs["hidden_states"]
    if latents.ndim == 4:
        latents = latents.unsqueeze(2)
    if latents.ndim == 3:
        if "img_ids" not in kwargs:
            return None
        rows, columns = (int(last) + 1 for last in kwargs["img_ids"][:, 1:].amax(0))
        latents = latents.transpose(1, 2).unflatten(2, (1, rows, columns))
    return list(latents.unbind(0))


def _pab(subject: Subject, warmup: int, interval: int) -> dict[str, Any]:
    ranges = {"block": interval, "timestep": (1, subject.steps - warmup + 1)}
    of_attentions = {f"{kind}_attention_{of}_skip_range": ranges[of] for kind in ("spatial", "cross") for of in ranges}
    return of_attentions | {"current_timestep_callback": partial(_steps_left, subject)}


def _faster(subject: Subject, warmup: int, interval: int) -> dict[str, Any]:
    return {
        "spatial_attention_block_skip_range": interval,
        "spatial_attention_timestep_skip_range": (1, subject.steps - warmup + 1),
        # It can skip the unconditional branch only if both branches run in one batch, which no tested pipeline does.
        "is_guidance_distilled": True,
        # The paper's weight grows from 0 to 1 over the run.
        "attention_weight_callback": lambda _: 1 - _steps_left(subject) / subject.steps,
        "current_timestep_callback": partial(_steps_left, subject),
    }


def _steps_left(subject: Subject) -> int:
    """Steps left, 1 at the last step. Replaces the timestep, whose values are uneven under shifted schedules."""
    return subject.steps - (subject.pipe.scheduler.step_index or 0)


@contextmanager
def _enabled(pipe: Any, config: Callable[[], Any]) -> Iterator[None]:
    transformers = denoisers(pipe).values()
    try:
        for transformer in transformers:
            transformer.enable_cache(config())
        yield
    finally:
        for transformer in transformers:
            if transformer.is_cache_enabled:
                transformer.disable_cache()


@contextmanager
def _with_steps(subject: Subject) -> Iterator[None]:
    """Within the block, add step, sigma and number of steps to cache contexts if the pipeline does not."""
    scheduler = subject.pipe.scheduler

    def with_steps(plain: Callable[..., Any], name: str, **values: Any) -> Any:
        step = scheduler.step_index or 0
        known = {"step_index": step, "sigma": float(scheduler.sigmas[step]), "num_inference_steps": subject.steps}
        return plain(name, **{**known, **values})

    transformers = denoisers(subject.pipe).values()
    for transformer in transformers:
        transformer.cache_context = partial(with_steps, transformer.cache_context)
    try:
        yield
    finally:
        for transformer in transformers:
            del transformer.cache_context


def _state_by_branch(subject: Subject) -> AbstractContextManager[None]:
    """Give each branch of guidance its own state of hooks that expect both branches in one batch, within the block."""
    handles = []
    for transformer in denoisers(subject.pipe).values():
        registries = [HookRegistry.check_if_exists_or_initialize(transformer)]
        registries += [part._diffusers_hook for part in transformer.modules() if hasattr(part, "_diffusers_hook")]
        hooks = [hook for registry in registries for hook in registry.hooks.values() if hasattr(hook, "state")]
        turns = itertools.cycle([{hook: type(hook.state)() for hook in hooks} for _ in range(subject.branches)])

        def take_turn(*_: Any, turns: Iterator[dict[Any, Any]] = turns) -> None:
            for hook, state in next(turns).items():
                hook.state = state

        handles.append(transformer.register_forward_pre_hook(take_turn))
    return removed_after(handles)


CACHES = {
    # Forecasts attentions, the default. Its own patterns don't match Wan's attentions; these do.
    "taylorseer": _taylorseer(
        "", "attention", [(3, 1, 2), (3, 1, 4), (3, 1, 8), (3, 2, 4), (8, 1, 6)], cache_identifiers=_ATTENTIONS
    ),
    # Forecasts attentions and MLPs, as the paper does.
    "taylorseer-layers": _taylorseer(
        " per layer", "layers", _TAYLOR_SETTINGS, cache_identifiers=_LAYERS, skip_predict_identifiers=_IDLE_LAYERS
    ),
    # Forecasts the transformer's output; no block runs.
    "taylorseer-lite": _taylorseer(" lite", "lite", _TAYLOR_SETTINGS, use_lite_mode=True),
    "first-block-cache": _cache(
        "FirstBlockCache", "FirstBlockCache {:g}", _THRESHOLDS, lambda _, threshold: {"threshold": threshold}
    ),
    "mag-cache": _cache("MagCache", "MagCache {:g} K={} R={:g}", _MAG_SETTINGS, _mag),
    # Only diffusers' Wan pipeline passes step and sigma; for others they are added to the cache context here.
    "sea-cache": _cache("SeaCache", "SeaCache {:g} K={}", _SEA_SETTINGS, _sea, within=_with_steps),
    "pab": _cache("PyramidAttentionBroadcast", "PAB W={} N={}", _INTERVALS, _pab, within=_state_by_branch),
    "faster-cache": _cache("FasterCache", "FasterCache W={} N={}", _INTERVALS, _faster, within=_state_by_branch),
}
