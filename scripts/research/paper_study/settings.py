"""Rows of the papers' tables as presets, with the papers' figures for their own models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dit_accel.presets import Preset, load_preset

MODELS = {"demo-flux": "flux", "demo-hunyuan": "hunyuan_video", "demo-wan": "wan"}
PRESETS = "Presets"  # source of rows that are in no paper
TRIO = ("flux-flashomni-quality", "flux-flashomni", "flux-flashomni-turbo")  # highest quality first
WARMUPS = (2, 3, 5, 8, 12)  # steps of figure 9, whose axis has no numbers in the text


@dataclass(frozen=True)
class Row:
    """One setting.

    Args:
        source: paper, and its table or figure.
        name: name in the paper.
        preset: preset to change.
        changes: changed keys of the preset.
        psnr, ssim, sparsity: the paper's figures, dB and shares; None = not in the paper.
    """

    source: str
    name: str
    preset: str
    changes: dict[str, Any] = field(default_factory=dict)
    psnr: float | None = None
    ssim: float | None = None
    sparsity: float | None = None

    def load(self, model: str) -> Preset:
        """Load the preset for a demo model."""
        return load_preset(self.preset, model=MODELS[model], **self.changes)


def rows(model: str) -> list[Row]:
    """All rows of a demo model."""
    return [*{"demo-flux": _flux, "demo-hunyuan": _hunyuan, "demo-wan": _wan}[model](), *_presets()]


def _flashomni(source: str, preset: str, values: tuple, *claimed: float | None, **more: Any) -> Row:
    """Row with FlashOmni's (tau_q, tau_kv, N, D, S_q), in percent where the paper has percents."""
    tau_q, tau_kv, interval, order, share = values
    changes = {
        "reuse": {"tau_q": tau_q / 100, "degrade_below": share / 100},
        "skip": {"tau_kv": tau_kv / 100},
        "schedule": {"interval": interval, **more},
        "forecast": {"order": order},
    }
    warmup = f", warm-up {more['warmup']}" if more else ""
    return Row(
        source, f"FlashOmni ({tau_q}%, {tau_kv}%, {interval}, {order}, {share}%){warmup}", preset, changes, *claimed
    )


def _taylorseer(source: str, interval: int, order: int, *claimed: float | None, **more: Any) -> Row:
    changes = {"schedule": {"interval": interval, **more}, "forecast": {"order": order}}
    warmup = f", warm-up {more['warmup']}" if more else ""
    return Row(source, f"TaylorSeer (N = {interval}, D = {order}){warmup}", "flux-taylorseer", changes, *claimed)


def _flux() -> Iterator[Row]:
    one, two, three, nine = (f"FlashOmni, {place}" for place in ("table 1", "table 2", "table 3", "figure 9"))
    preset = "flux-flashomni-paper"
    yield _flashomni(one, preset, (5, 15, 4, 0, 0), 24.563, 0.8716, 0.28)
    yield _flashomni(one, preset, (50, 15, 4, 1, 0), 25.159, 0.8838, 0.41)
    yield _flashomni(one, preset, (50, 15, 5, 1, 0), 23.994, 0.8618, 0.43)
    yield _flashomni(one, preset, (50, 15, 5, 2, 30), 23.859, 0.8575, 0.46)
    yield Row(two, "FORA (N = 5)", "flux-fora", {"schedule": {"interval": 5}}, 22.846, 0.825)
    yield _taylorseer(two, 5, 1, 22.852, 0.8361)
    yield _taylorseer(two, 5, 2, 23.177, 0.8395)
    yield _taylorseer(two, 6, 2, 22.245, 0.8199)
    yield _flashomni(two, preset, (50, 15, 6, 1, 30), 23.217, 0.8373)
    third = ((26.702, 0.9041), (25.217, 0.8837), (24.193, 0.8650), (23.454, 0.8506), (23.012, 0.8405))
    for interval, claimed in zip(range(3, 8), third, strict=True):
        yield _flashomni(three, preset, (5, 15, interval, 1, 0), *claimed)
    for order, claimed in enumerate(((23.355, 0.8452), (23.866, 0.8575), (23.859, 0.8575))):
        yield _flashomni(three, preset, (50, 15, 5, order, 30), *claimed)
    for warmup in WARMUPS:
        yield _flashomni(nine, preset, (50, 15, 5, 1, 0), warmup=warmup)
        yield _taylorseer(nine, 5, 1, warmup=warmup)
    yield from _fg_attn("FG-Attn, table 5", "flux-fgattn")


def _hunyuan() -> Iterator[Row]:
    source, preset = "FlashOmni, table 1", "hunyuan-flashomni-paper"
    yield _flashomni(source, preset, (40, 1, 3, 1, 0), 32.192, 0.9289, 0.34)
    yield _flashomni(source, preset, (40, 1, 6, 1, 0), 28.733, 0.8918, 0.39)
    yield _flashomni(source, preset, (50, 5, 6, 1, 30), 27.877, 0.8699, 0.47)
    taylorseer = {"schedule": {"interval": 6}, "forecast": {"order": 1}}
    yield Row("FlashOmni, table 2", "TaylorSeer (N = 6, D = 1)", "hunyuan-taylorseer", taylorseer, 26.483, 0.8621)


def _wan() -> Iterator[Row]:
    yield from _fg_attn("FG-Attn, table 3", "wan21-fgattn", 21.55, 0.77)


def _presets() -> Iterator[Row]:
    """Rows with FlashOmni's method and our settings."""
    for name in TRIO:
        yield Row(PRESETS, name, name)


def _fg_attn(source: str, preset: str, *claimed: float) -> Iterator[Row]:
    yield Row(source, "FG-Attn-cached", preset, {}, *claimed)
    yield Row(source, "FG-Attn-pooling", preset, {"skip": {"mask": "average_query"}})
    half = {"skip": {"mask": "average_query", "key_threshold": 0.5}}
    yield Row(source, "FG-Attn-pooling, the paper's threshold", preset, half)
