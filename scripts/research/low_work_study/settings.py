"""Settings of methods, and numbers to search so that a method reaches a computed fraction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dit_accel.pipeline import preset_for
from dit_accel.tools.compare import PEERS, Method, our_methods, spread
from dit_accel.tools.compare.methods import OURS
from scripts.research.fixed_schedules import fixed_schedules

# They decide by values of the whole batch, so a prompt in a batch would get another result than alone.
ALONE = (
    "SeaCache",
    "FirstBlockCache",
    "DBCache (cache-dit)",
    "DBCache + TaylorSeer (cache-dit)",
    "DBCache + DMD (cache-dit)",
    "DBCache + FoCa (cache-dit)",
    "SCM + TaylorSeer (cache-dit)",
)
MOST_STEPS = 50  # maximum distance between computed steps, in the closed loop at low work

# Warm-up and interval that come to 5, 6, 8 and 10 of 50 steps: of a fixed interval on our engine, and of TaylorSeer as
# diffusers counts, where a warm-up of 3 steps leaves no 5.
INTERVALS = [(1, 20), (1, 14), (1, 9), (1, 6), (3, 46), (3, 24), (3, 12), (3, 8)]
_TAYLOR = [(1, 20), (1, 12), (1, 8), (1, 6), (3, 24), (3, 12), (3, 8)]
_DBCACHE: list[tuple] = [(3, 1.0), (3, 1.5), (3, 2.5), (1, 1.0), (1, 2.5)]
_STEPS: list[tuple] = [(count,) for count in (5, 6, 8, 10)]
# More settings of other methods, whose own settings do not reach such low work.
LOWER: dict[str, list[tuple]] = {
    "taylorseer-lite": [(warmup, order, interval) for warmup, interval in _TAYLOR for order in (1, 2)],
    "taylorseer-layers": [(warmup, 1, interval) for warmup, interval in _TAYLOR],
    "dbcache": _DBCACHE,
    "dbcache-taylorseer": _DBCACHE,
    "scm": [(3, 8), (3, 12), (3, 16), (3, 24), (1, 8), (1, 12)],
    "dbcache-dmd": _DBCACHE,
    "dbcache-foca": _DBCACHE,
    "spectrum": [(interval, growth, 0.5) for interval, growth in ((4, 3.0), (5, 4.0), (8, 8.0), (20, 10.0), (45, 1.0))],
    "meancache": [(share, moves) for share in (0.1, 0.12, 0.16) for moves in ("skipped", "whole")],
    "hicache": [(warmup, order, interval, 0.5) for warmup, interval in _TAYLOR for order in (1, 2)],
    "foca": _TAYLOR,
    "dmd": _TAYLOR,
    "fewer-steps": _STEPS,
    "fewer-steps-dpm": _STEPS,
    "fewer-steps-unipc": _STEPS,
}
# Other methods with a threshold to search, and the rest of their setting.
SEARCHED: dict[str, Callable[[float], tuple]] = {
    "sea-cache": lambda threshold: (threshold, 16),
    "first-block-cache": lambda threshold: (threshold,),
    "mag-cache": lambda threshold: (threshold, 24, 0.04),
}
FEW_TARGETS = (0.15, 0.3, 0.6, 1.2, 2.4)
FEW_INTERVALS = [(1, 2), (1, 3), (2, 2), (2, 3)]


@dataclass(frozen=True)
class Search:
    """A method whose work depends on a number; a larger number means less work.

    Args:
        of: returns the method for a number.
        low, high: range of the search.
    """

    of: Callable[[float], Method]
    low: float
    high: float


def searches(pipe: Any, peers: Sequence[str], changes: dict[str, Any]) -> dict[str, Search]:
    """Return by name the closed loop, whose target is searched, and other methods with a threshold.

    Args:
        changes: keys of the closed loop's preset.
    """

    own = {"max_interval": MOST_STEPS, **changes}
    found = {OURS: Search(lambda target: _loop(pipe, "turbo", target_error=target, **own), 0.1, 100.0)}
    for name, setting in SEARCHED.items():
        of = PEERS[name].of
        if name in peers and of is not None:
            found[name] = Search(
                lambda number, of=of, setting=setting: of(*setting(float(f"{number:.4g}"))), 0.02, 50.0
            )
    return found


def low_settings(pipe: Any, steps: int, peers: Sequence[str]) -> list[Method]:
    """Settings that may reach the wanted fractions of runs with ``steps``; running them shows which do."""
    others = [method for name in peers if name not in SEARCHED for method in PEERS[name].methods(steps)]
    others += [PEERS[name].of(*setting) for name in peers for setting in LOWER.get(name, ()) if PEERS[name].of]
    return _distinct([*_intervals(pipe, INTERVALS), *fixed_schedules(pipe), *others])


def few_settings(pipe: Any, steps: int, peers: Sequence[str], changes: dict[str, Any]) -> list[Method]:
    """Settings on top of runs with few steps.

    These are our presets, the closed loop over targets, all steps with layers in 8 bits, and some of each other method.
    """
    presets = [_loop(pipe, name, name=name, **changes) for name in ("quality", "balanced", "turbo")]
    swept = [_loop(pipe, "turbo", **{"target_error": target, **changes}) for target in FEW_TARGETS]
    narrow = [
        replace(our_methods(pipe, [preset_for(pipe, "exact", linear={"dtype": dtype})])[0], name=f"layers in {dtype}")
        for dtype in ("int8", "float8")
    ]
    others = [method for name in peers for method in spread(PEERS[name].methods(steps), 4)]
    return _distinct([*presets, *swept, *narrow, *_intervals(pipe, FEW_INTERVALS), *others])


def _loop(pipe: Any, preset: str, *, name: str | None = None, **changes: Any) -> Method:
    """The closed loop with separate decisions for each prompt of a batch."""
    method = our_methods(pipe, [preset_for(pipe, preset, per_prompt=True, **changes)])[0]
    return replace(method, series=OURS, name=name or f"{OURS}, target {changes['target_error']:.4g}")


def _intervals(pipe: Any, settings: Sequence[tuple[int, int]]) -> list[Method]:
    """Fixed intervals over the whole stack, of order 1 and 2."""
    methods = []
    for warmup, interval in settings:
        for order in (1, 2):
            changes = {"warmup": warmup, "interval": interval, "order": order, "cooldown": 1}
            method = our_methods(pipe, [preset_for(pipe, "exact", **changes)])[0]
            methods.append(replace(method, name=f"stack W={warmup} N={interval} D={order}"))
    return methods


def _distinct(methods: Sequence[Method]) -> list[Method]:
    """Return the first method of each name."""
    found: dict[str, Method] = {}
    for method in methods:
        found.setdefault(method.name, method)
    return list(found.values())
