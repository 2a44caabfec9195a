"""Our presets beside what else makes diffusion transformers faster, on the same pipeline, prompts and seeds.

    bench = Bench(load, arguments, prompts, tuning_prompt)
    for method in [*our_methods(bench.pipe, presets), *peer_methods(bench.pipe, steps, peers)[0]]:
        row = bench.measure(method)

Every run is compared with the plain run of its prompt and seed. Computed fractions are counted at the linear layers of
the transformer's blocks, whatever the method (:mod:`~dit_accel.tools.compare.work`); after every method the pipeline is
shown to be as it was (:mod:`~dit_accel.tools.compare.snapshot`).
"""

from collections.abc import Sequence
from typing import Any

from dit_accel.errors import UnsupportedError
from dit_accel.tools.compare.caches import CACHES
from dit_accel.tools.compare.dbcache import DBCACHES
from dit_accel.tools.compare.forecasters import FORECASTERS
from dit_accel.tools.compare.methods import Method, Subject, of_preset, our_methods
from dit_accel.tools.compare.runs import Bench, Prompt
from dit_accel.tools.compare.solvers import FEWER_STEPS
from dit_accel.tools.compare.sweep import Sweep

__all__ = [
    "PEERS",
    "Bench",
    "Method",
    "Prompt",
    "Subject",
    "Sweep",
    "of_preset",
    "our_methods",
    "peer_methods",
    "spread",
]

# Who we are compared with: what users of diffusers can run instead, where it is installed.
PEERS = {**CACHES, **FORECASTERS, **DBCACHES, **FEWER_STEPS}


def peer_methods(
    pipe: Any, steps: int, names: Sequence[str] | None = None, settings: int | None = None
) -> tuple[list[Method], dict[str, str]]:
    """Settings of peers, and why some peers are left out.

    Args:
        pipe: a plain pipeline.
        steps: of its plain runs.
        names: of `PEERS`; None = all.
        settings: most of each peer, spread over its sweep; None = all.

    Raises:
        UnsupportedError: a name is of no peer.
    """
    unknown = [name for name in names or () if name not in PEERS]
    if unknown:
        raise UnsupportedError(f"{unknown[0]!r} is no peer; there are {', '.join(PEERS)}")
    reasons = {name: PEERS[name].why_not(pipe) for name in (PEERS if names is None else names)}
    able = [PEERS[name] for name, reason in reasons.items() if reason is None]
    methods = [method for peer in able for method in spread(peer.methods(steps), settings)]
    return methods, {name: reason for name, reason in reasons.items() if reason is not None}


def spread(methods: list[Method], count: int | None) -> list[Method]:
    """``count`` of the methods, evenly from the first to the last; all where there are no more."""
    if count is None or len(methods) <= count:
        return methods
    if count == 1:
        return [methods[len(methods) // 2]]
    return [methods[round(i * (len(methods) - 1) / (count - 1))] for i in range(count)]
