"""Compare presets with other acceleration methods on the same pipeline, prompts and seeds.

    bench = Bench(load, arguments, prompts, tuning_prompt)
    for method in [*our_methods(bench.pipe, presets), *peer_methods(bench.pipe, steps, peers)[0]]:
        row = bench.measure(method)

Every run is compared with the plain run of its prompt and seed. ``work`` counts computed fractions at the linear layers
of the transformer's blocks. After every method ``snapshot`` checks that the pipeline is unchanged.
"""

from collections.abc import Sequence
from typing import Any

from dit_accel.tools.measure.compare.caches import CACHES
from dit_accel.tools.measure.compare.dbcache import DBCACHES
from dit_accel.tools.measure.compare.forecasters import FORECASTERS
from dit_accel.tools.measure.compare.methods import Method, of_preset, our_methods
from dit_accel.tools.measure.compare.runs import Bench, Prompt
from dit_accel.tools.measure.compare.sheet import Sheet
from dit_accel.tools.measure.compare.solvers import FEWER_STEPS
from dit_accel.tools.measure.compare.sweep import Sweep

__all__ = ["PEERS", "Bench", "Method", "Prompt", "Sheet", "Sweep", "of_preset", "our_methods", "peer_methods", "spread"]

# Methods that users of diffusers can run instead.
PEERS = {**CACHES, **FORECASTERS, **DBCACHES, **FEWER_STEPS}


def peer_methods(
    pipe: Any, steps: int, names: Sequence[str] | None = None, settings: int | None = None
) -> tuple[list[Method], dict[str, str]]:
    """Return settings of other methods, keys of `PEERS`, and the reason for each method that can't run.

    ``names=None`` are all methods. ``settings`` is the maximum number of settings per method, spread over its sweep.
    """
    reasons = {name: PEERS[name].why_not(pipe) for name in (PEERS if names is None else names)}
    able = [PEERS[name] for name, reason in reasons.items() if reason is None]
    methods = [method for peer in able for method in spread(peer.methods(steps), settings)]
    return methods, {name: reason for name, reason in reasons.items() if reason is not None}


def spread(methods: list[Method], count: int | None) -> list[Method]:
    """Return ``count`` methods, evenly spaced from the first to the last; all if there are no more."""
    if count is None or len(methods) <= count:
        return methods
    if count == 1:
        return [methods[len(methods) // 2]]
    return [methods[round(i * (len(methods) - 1) / (count - 1))] for i in range(count)]
