"""Linear layers and attention in 8 bits, for `exact` and the closed loop's preset."""

from __future__ import annotations

from collections.abc import Iterator

from dit_accel import load_preset
from dit_accel.kernels.attention.quantize import QK_DTYPES
from dit_accel.kernels.blocks.quantized_linear import LINEAR_DTYPES

from .setting import BALANCED, Setting

ALL_TILES = {"policy": "sparge", "tau_kv": 0.0, "steps": "all"}
IN_8_BITS = {
    "nothing": {},
    **{f"layers, {dtype}": {"linear": {"dtype": dtype}} for dtype in LINEAR_DTYPES},
    **{f"attention, {dtype}": {"skip": ALL_TILES, "kernels": {"qk_dtype": dtype}} for dtype in QK_DTYPES},
}


def settings(model: str) -> Iterator[Setting]:
    """Yield each preset with each part in 8 bits."""
    for preset in ("exact", BALANCED[model]):
        for name, changes in IN_8_BITS.items():
            yield Setting(preset, name, load_preset(preset, **changes))
