"""The caches that ship with diffusers, each swept over its own knobs.

Settings follow each cache's documentation; what is done beyond it, so that none does badly for want of care, is said
where it is done and in docs/comparing.md.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import diffusers
import torch
from diffusers.hooks import HookRegistry

from dit_accel.models import denoisers
from dit_accel.tools.compare.methods import Method, Subject

# Parts of blocks whose outputs TaylorSeer forecasts "per layer", as its paper does, and those that need not run then.
_LAYERS = [
    r"(transformer_)?blocks\.\d+\.(attn|attn1|attn2|ff|ffn|ff_context)",
    r"single_transformer_blocks\.\d+\.proj_out",
]
_IDLE_LAYERS = [r"single_transformer_blocks\.\d+\.(attn|proj_mlp)"]
_ATTENTIONS = [r"((single_)?transformer_)?blocks\.\d+\.(attn|attn1|attn2)"]

# Warm-up, order and interval.
_TAYLOR_SETTINGS = [(3, 1, 3), (3, 1, 4), (3, 1, 6), (3, 2, 2), (3, 2, 3), (3, 2, 4), (3, 2, 6), (3, 2, 8)]
_TAYLOR_SETTINGS += [(8, 1, 3), (8, 1, 6)]
# Warm-up and interval, of caches of attentions.
_INTERVALS = [(3, 2), (3, 3), (3, 4), (3, 6), (3, 10), (8, 4)]

MakeConfig = Callable[[Subject], Any]


def taylorseer_attention(steps: int) -> list[Method]:
    """Attentions are forecast, the default; its own patterns don't find Wan's attentions, these do."""
    settings = [(3, 1, 2), (3, 1, 4), (3, 1, 8), (3, 2, 4), (8, 1, 6)]
    return [
        _taylorseer("TaylorSeer (diffusers)", "attention", *each, cache_identifiers=_ATTENTIONS) for each in settings
    ]


def taylorseer_layers(steps: int) -> list[Method]:
    """Attentions and MLPs are forecast, the paper's TaylorSeer."""
    parts = {"cache_identifiers": _LAYERS, "skip_predict_identifiers": _IDLE_LAYERS}
    return [_taylorseer("TaylorSeer per layer (diffusers)", "layers", *each, **parts) for each in _TAYLOR_SETTINGS]


def taylorseer_lite(steps: int) -> list[Method]:
    """The transformer's output is forecast, and no block runs."""
    return [_taylorseer("TaylorSeer lite (diffusers)", "lite", *each, use_lite_mode=True) for each in _TAYLOR_SETTINGS]


def _taylorseer(series: str, label: str, warmup: int, order: int, interval: int, **parts: Any) -> Method:
    def config(subject: Subject) -> Any:
        return diffusers.TaylorSeerCacheConfig(
            cache_interval=interval,
            disable_cache_before_step=warmup,
            disable_cache_after_step=subject.steps - 1,
            max_order=order,
            taylor_factors_dtype=next(iter(denoisers(subject.pipe).values())).dtype,
            **parts,
        )

    return _cached(series, f"TaylorSeer {label} W={warmup} N={interval} D={order}", config)


def first_block_cache(steps: int) -> list[Method]:
    thresholds = (0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.18, 0.25, 0.35, 0.5)
    return [
        _cached(
            "FirstBlockCache", f"FirstBlockCache {t:g}", lambda _, t=t: diffusers.FirstBlockCacheConfig(threshold=t)
        )
        for t in thresholds
    ]


def mag_cache(steps: int) -> list[Method]:
    """Its magnitude ratios come from a run on the tuning prompt."""
    settings = [(0.02, 1, 0.2), (0.06, 2, 0.2), (0.06, 3, 0.2), (0.12, 4, 0.2), (0.12, 4, 0.1), (0.24, 6, 0.1)]
    settings += [(0.5, 5, 0.2), (0.5, 8, 0.1), (2.0, 4, 0.1), (2.0, 6, 0.1)]

    def config(subject: Subject, threshold: float, skipped: int, retained: float) -> Any:
        return diffusers.MagCacheConfig(
            threshold=threshold,
            max_skip_steps=skipped,
            retention_ratio=retained,
            num_inference_steps=subject.steps,
            mag_ratios=_mag_ratios(subject),
        )

    return [
        _cached("MagCache", f"MagCache {t:g} K={k} R={r:g}", partial(config, threshold=t, skipped=k, retained=r))
        for t, k, r in settings
    ]


def _mag_ratios(subject: Subject) -> list[float]:
    """Ratios as MagCache's calibration prints them, one list a branch; their mean."""
    if "mag_cache" not in subject.calibrations:
        config = diffusers.MagCacheConfig(calibrate=True, num_inference_steps=subject.steps)
        with _enabled(subject.pipe, lambda: config), contextlib.redirect_stdout(io.StringIO()) as printed:
            subject.tuning_run()
        lists = [ast.literal_eval(line) for line in printed.getvalue().splitlines() if line.startswith("[1.0")]
        subject.calibrations["mag_cache"] = torch.tensor(lists).mean(0).tolist()
    return subject.calibrations["mag_cache"]


def sea_cache(steps: int) -> list[Method]:
    """Only diffusers' Wan pipeline tells it step and sigma; for others they are put into the cache context here."""
    settings = [(0.05, 1), (0.1, 1), (0.1, 2), (0.15, 2), (0.25, 2), (0.25, 3), (0.4, 4), (0.6, 5), (1.0, 6), (2.0, 8)]

    def config(subject: Subject, threshold: float, consecutive: int) -> Any:
        return diffusers.SeaCacheConfig(
            threshold=threshold,
            max_consecutive_cached=consecutive,
            retention_steps=3,
            raw_vision_callback=_vision_latents,
        )

    return [
        _cached("SeaCache", f"SeaCache {t:g} K={k}", partial(config, threshold=t, consecutive=k), told_steps=True)
        for t, k in settings
    ]


def _vision_latents(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
    """Latents ``[C, T, H, W]`` of each sample, or None where they can't be told, and every step is computed.

    FLUX's tokens ``[B, S, C]`` are put back into their picture.
    """
    latents = kwargs["hidden_states"]
    if latents.ndim == 4:
        latents = latents.unsqueeze(2)
    if latents.ndim == 3:
        if "img_ids" not in kwargs:
            return None
        rows, columns = (int(last) + 1 for last in kwargs["img_ids"][:, 1:].amax(0))
        latents = latents.transpose(1, 2).unflatten(2, (1, rows, columns))
    return list(latents.unbind(0))


def pyramid_attention_broadcast(steps: int) -> list[Method]:
    return [
        _cached("PyramidAttentionBroadcast", f"PAB W={w} N={n}", partial(_pab, warmup=w, interval=n), by_branch=True)
        for w, n in _INTERVALS
    ]


def _pab(subject: Subject, warmup: int, interval: int) -> Any:
    skipped = (1, subject.steps - warmup + 1)
    return diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=interval,
        cross_attention_block_skip_range=interval,
        spatial_attention_timestep_skip_range=skipped,
        cross_attention_timestep_skip_range=skipped,
        current_timestep_callback=partial(_steps_left, subject),
    )


def faster_cache(steps: int) -> list[Method]:
    return [
        _cached("FasterCache", f"FasterCache W={w} N={n}", partial(_faster, warmup=w, interval=n), by_branch=True)
        for w, n in _INTERVALS
    ]


def _faster(subject: Subject, warmup: int, interval: int) -> Any:
    return diffusers.FasterCacheConfig(
        spatial_attention_block_skip_range=interval,
        spatial_attention_timestep_skip_range=(1, subject.steps - warmup + 1),
        # It can skip the unconditional branch only where that comes in one batch with the other, as in none of ours.
        is_guidance_distilled=True,
        # The paper's weight grows from 0 to 1 over the run.
        attention_weight_callback=lambda _: 1 - _steps_left(subject) / subject.steps,
        current_timestep_callback=partial(_steps_left, subject),
    )


def _steps_left(subject: Subject) -> int:
    """Counts down to 1 at the last step; given for the timestep, whose values bunch where schedules are shifted."""
    return subject.steps - (subject.pipe.scheduler.step_index or 0)


def why_not_cacheable(config: str, pipe: Any) -> str | None:
    """Why a cache can't run on a pipeline, or None.

    Args:
        config: name of its configuration in diffusers.
    """
    if not hasattr(diffusers, config):
        return f"diffusers {diffusers.__version__} has no {config}"
    uncached = [type(module).__name__ for module in denoisers(pipe).values() if not hasattr(module, "enable_cache")]
    return f"{uncached[0]} takes no caches" if uncached else None


def _cached(series: str, name: str, config: MakeConfig, *, by_branch: bool = False, told_steps: bool = False) -> Method:
    """A setting of a cache of diffusers.

    Args:
        config: makes its configuration.
        by_branch: it keeps one state for all branches, so that each here gets its own.
        told_steps: it wants step and sigma in the cache context.
    """

    @contextmanager
    def put_on(subject: Subject) -> Iterator[dict[str, Any]]:
        with contextlib.ExitStack() as stack:
            if told_steps:
                stack.enter_context(_telling_steps(subject))
            stack.enter_context(_enabled(subject.pipe, lambda: config(subject)))
            if by_branch:
                stack.enter_context(_state_by_branch(subject))
            yield {}

    return Method(series, name, put_on)


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
def _telling_steps(subject: Subject) -> Iterator[None]:
    """Within, cache contexts hold the step, its sigma and the number of steps, where the pipeline does not say."""
    scheduler = subject.pipe.scheduler

    def telling(plain: Callable[..., Any], name: str, **told: Any) -> Any:
        step = scheduler.step_index or 0
        known = {"step_index": step, "sigma": float(scheduler.sigmas[step]), "num_inference_steps": subject.steps}
        return plain(name, **{**known, **told})

    transformers = denoisers(subject.pipe).values()
    for transformer in transformers:
        transformer.cache_context = partial(telling, transformer.cache_context)
    try:
        yield
    finally:
        for transformer in transformers:
            del transformer.cache_context


@contextmanager
def _state_by_branch(subject: Subject) -> Iterator[None]:
    """Within, each branch of guidance has its own state of every hook that keeps one as ``hook.state``.

    These hooks take both branches to come in one batch. Where they come one after the other, the second would be given
    what the first has computed.
    """
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
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
