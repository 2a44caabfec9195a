"""Who we are compared with: what users of diffusers can run instead, where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from dit_accel.errors import UnsupportedError
from dit_accel.tools.compare import caches, dbcache, solvers
from dit_accel.tools.compare.methods import Method


class Peer(NamedTuple):
    """One way to make a pipeline faster.

    Args:
        methods: its settings for runs of so many steps.
        why_not: why it can't run on a pipeline here, or None.
    """

    methods: Callable[[int], list[Method]]
    why_not: Callable[[Any], str | None]


def _cache(methods: Callable[[int], list[Method]], config: str) -> Peer:
    return Peer(methods, partial(caches.why_not_cacheable, config))


PEERS = {
    "taylorseer": _cache(caches.taylorseer_attention, "TaylorSeerCacheConfig"),
    "taylorseer-layers": _cache(caches.taylorseer_layers, "TaylorSeerCacheConfig"),
    "taylorseer-lite": _cache(caches.taylorseer_lite, "TaylorSeerCacheConfig"),
    "first-block-cache": _cache(caches.first_block_cache, "FirstBlockCacheConfig"),
    "mag-cache": _cache(caches.mag_cache, "MagCacheConfig"),
    "sea-cache": _cache(caches.sea_cache, "SeaCacheConfig"),
    "pab": _cache(caches.pyramid_attention_broadcast, "PyramidAttentionBroadcastConfig"),
    "faster-cache": _cache(caches.faster_cache, "FasterCacheConfig"),
    "dbcache": Peer(dbcache.dbcache, dbcache.why_not_cached),
    "dbcache-taylorseer": Peer(dbcache.dbcache_taylorseer, dbcache.why_not_cached),
    "scm": Peer(dbcache.step_masks, dbcache.why_not_cached),
    "fewer-steps": Peer(solvers.fewer_steps, lambda pipe: None),
    "fewer-steps-dpm": Peer(partial(solvers.fewer_steps_solved, "DPM++ 2M"), solvers.why_not_solvable),
    "fewer-steps-unipc": Peer(partial(solvers.fewer_steps_solved, "UniPC"), solvers.why_not_solvable),
}


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
    methods, left_out = [], {}
    for name in PEERS if names is None else names:
        reason = PEERS[name].why_not(pipe)
        if reason is not None:
            left_out[name] = reason
        else:
            methods += spread(PEERS[name].methods(steps), settings)
    return methods, left_out


def spread(methods: list[Method], count: int | None) -> list[Method]:
    """``count`` of the methods, evenly from the first to the last; all where there are no more."""
    if count is None or len(methods) <= count:
        return methods
    if count == 1:
        return [methods[len(methods) // 2]]
    return [methods[round(i * (len(methods) - 1) / (count - 1))] for i in range(count)]
