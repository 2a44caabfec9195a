"""Axes of a tuning: the run-level thresholds of a preset, each with its possible values."""

from dataclasses import dataclass, replace

from dit_accel.errors import TuningError
from dit_accel.presets import Preset, Skip
from dit_accel.sparse.policies import policy_of

# Error thresholds are geometric: each value is looser than the one before by the same factor.
TARGET_ERRORS = tuple(round(0.003 * 1.26**step, 5) for step in range(26))  # 0.003 … 0.97
INTERVALS = tuple(range(2, 13))
BOUNDS = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4)
BOUND_RATIOS = (1.0, 1.1, 1.2, 1.4, 1.7, 2.0)
TAU_Q = tuple(round(0.05 * step, 2) for step in range(20))  # 0 … 0.95
DEGRADE_BELOW = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
ORDERS = (1, 2, 3)
WARMUPS = (10, 8, 6, 5, 4, 3, 2)
LINEAR_BOUNDS = (0.0, 0.003, 0.005, 0.007, 0.009, 0.011, 0.014, 0.018, 0.025, 0.04, 1.0)

# Not keys of a preset: bounds that choose the thresholds of single layers, and the linear layers in 8 bits.
NO_KEYS = BOUND, BOUND_RATIO, LINEAR_BOUND = "l1", "l2 / l1", "error of 8 bits"


@dataclass(frozen=True)
class Axis:
    """One threshold and its values."""

    key: str  # dotted key of a preset, or one of the three above
    values: tuple[float, ...]  # from the closest to the cheapest, if they have such an order
    start: int  # index of the first value to try
    closest_first: bool = True  # whether the values have this order


Setting = dict[str, float]  # axis key -> value


def axes_of(preset: Preset, *, by_layer: bool) -> list[Axis]:
    """Return the axes of a preset; the search fits the first one for each setting of the others.

    With ``by_layer`` each layer gets its own thresholds, under l1 and l2. No thresholds in a preset: a TuningError.
    """
    axes = []
    schedule, forecast, reuse = preset.schedule, preset.forecast, preset.reuse
    forecasts = schedule.interval != 1
    if schedule.measures:
        axes.append(_axis("schedule.target_error", TARGET_ERRORS, schedule.bound))
    elif forecasts:
        axes.append(_axis("schedule.interval", INTERVALS, schedule.interval))
    if by_layer:
        axes.append(_axis(BOUND, BOUNDS, 0.05))  # 0.05 and 0.06 are SpargeAttn's for video models
        if any(map(skips_values, preset.skip.variants)):
            axes.append(_axis(BOUND_RATIO, BOUND_RATIOS, 1.2))
    if preset.linear.dtype is not None:
        axes.append(_axis(LINEAR_BOUND, LINEAR_BOUNDS, LINEAR_BOUNDS[-1]))
    if forecasts and forecast.level == "head":
        axes.append(_axis("reuse.tau_q", TAU_Q, reuse.tau_q))
        axes.append(_axis("reuse.degrade_below", DEGRADE_BELOW, reuse.degrade_below))
    if forecasts and forecast.method != "reuse":
        axes.append(replace(_axis("forecast.order", ORDERS, forecast.order), closest_first=False))
    if forecasts or by_layer:
        axes.append(_axis("schedule.warmup", WARMUPS, schedule.warmup))
    if not axes:
        raise TuningError(f"preset {preset.name!r} computes everything, so it has no threshold to tune")
    return axes


def skips_values(config: Skip) -> bool:
    """Return True if attention skips further tiles by ``pv_threshold``, in addition to the policy's tiles."""
    return policy_of(config).options(config).get("pv_threshold") is not None


def _axis(key: str, values: tuple[float, ...], near: float) -> Axis:
    """Make an axis that starts at the preset's own value, which replaces the nearest value."""
    start = min(range(len(values)), key=lambda index: abs(values[index] - near))
    return Axis(key, (*values[:start], near, *values[start + 1 :]), start)
