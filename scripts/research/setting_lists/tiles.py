"""Ways to skip tiles of attention, with every step computed, and those of the long-video presets with the loop's steps.

Settings: SpargeAttn's share (top_k) and mass (tau_kv) of tiles, the same for all layers and steps; skipped tiles that
count by their means; masks that are kept, with the residual of the skipped tiles; and FG-Attn's single keys.
"""

from collections.abc import Iterator
from typing import Any

from dit_accel import load_preset

from . import BALANCED, FAMILIES, Setting

WARMUP = 3  # dense steps, as in the video presets
LOOP = "loop: "  # prefix of series with the closed loop's steps
TILED = "residual, means, tokens in tiles"  # series of the presets for long videos
TARGETS = (0.07, 0.15, 0.3, 0.6, 0.9)  # of the loop
KEPT = ((4, 0.3), (8, 0.3), (8, 0.2), (8, 0.1), (16, 0.5), (16, 0.3), (16, 0.2), (16, 0.1), (32, 0.2))  # steps, share
ORDERS = {"raster": "", "tiles": ", tokens in tiles"}


def settings(model: str) -> Iterator[Setting]:
    """Yield the settings for a demo model; blocks have 64 tokens, and images no order of tokens in tiles."""
    ways = [way for way in _ways() if model != "demo-flux" or "tokens in tiles" not in way[0]]
    for series, name, keys in ways:
        yield Setting(series, name, load_preset("exact", model=FAMILIES[model], **keys))
    for series, name, keys in [("all tiles", "", {}), *(way for way in ways if way[0] == TILED)]:
        for target in TARGETS:
            changes = keys | {"schedule.target_error": target}
            preset = load_preset(load_preset(BALANCED[model], model=FAMILIES[model]), **changes)
            yield Setting(LOOP + series, f"{name}, target {target:g}".removeprefix(", "), preset)


def _ways() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield series, name, and a preset's keys."""
    for share in (0.85, 0.7, 0.6, 0.5, 0.4):
        yield "top_k", f"{share}", _keys(top_k=share)
    for mass in (0.003, 0.01, 0.03, 0.1, 0.2, 0.3):
        yield "tau_kv", f"{mass}", _keys(tau_kv=mass)
    for refresh, share in ((3, 0.3), (4, 0.3), (6, 0.3), (8, 0.2), (16, 0.3), (16, 0.2)):
        yield "residual", f"{share}, {refresh} steps", _keys(top_k=share, refresh=refresh, residual=True)
    for order, suffix in ORDERS.items():
        for share in (0.7, 0.5, 0.3):
            yield f"top_k, means{suffix}", f"{share}", _keys(order, top_k=share, means=True)
        for refresh, share in KEPT:
            keys = _keys(order, top_k=share, refresh=refresh, residual=True, means=True)
            yield f"residual, means{suffix}", f"{share}, {refresh} steps", keys
    for level in (0.2, 0.4, 0.7, 1.0):
        yield "single keys (FG-Attn)", f"{level} / N", _keys(policy="fg_attn", key_threshold=level)


def _keys(order: str = "raster", policy: str = "sparge", **skip: Any) -> dict[str, Any]:
    section = {"policy": policy, "steps": "all", **skip}
    return {"skip": section, "blocks.size": 64, "blocks.token_order": order, "schedule.warmup": WARMUP}
