"""Target and result of a tuning: a preset file with the measured values, and a plot."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dit_accel.errors import TuningError
from dit_accel.presets import Preset
from dit_accel.presets.keywords import nested
from dit_accel.tools.files import write_whole
from dit_accel.tools.measure.tune.axes import BOUND, Setting
from dit_accel.tools.measure.tune.calibration import Candidate, Curves
from dit_accel.tools.measure.tune.runs import Figures
from dit_accel.tools.media.figures import ERROR_COLOUR, GREY, SERIES_COLOURS, log_scale, new_figure, save, tidy_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_LABELS = 12  # layers in the plot's legend
PROMISED = 0.9  # share of the prompts in a preset's calibration


@dataclass(frozen=True)
class Target:
    """Required quality, as a mean over prompts or of a share of prompts that were not seen."""

    metric: str  # psnr (higher is better) or latent_error (lower is better)
    value: float
    coverage: float | None = None  # share of the prompts that must reach it; None = the mean must

    @classmethod
    def of(cls, psnr: float | None, latent_error: float | None, coverage: float | None = None) -> Target:
        """Make a target from two arguments, of which one is None, and the share of prompts that must reach it."""
        if coverage is not None and not 0 < coverage < 1:
            raise TuningError(f"coverage must be above 0 and below 1, e.g. 0.9, got {coverage:g}")
        if (psnr is None) == (latent_error is None):
            raise TuningError("tuning needs one target: target_psnr (dB), e.g. 40, or target_error, e.g. 0.05")
        metric, value = ("psnr", psnr) if psnr is not None else ("latent_error", latent_error)
        if not 0 < value < math.inf:
            name = "target_error" if psnr is None else "target_psnr"
            raise TuningError(f"{name} must be positive and finite, got {value}")
        return cls(metric, value, coverage)

    @property
    def least(self) -> float:
        return 0.25 if self.metric == "psnr" else 0.02

    @property
    def calibrates(self) -> bool:
        """Return True if a preset that meets it can promise its PSNR for ``target_psnr``."""
        return self.metric == "psnr" and (self.coverage or 0.0) >= PROMISED

    def require_prompts(self, tuning: int, held_out: int) -> None:
        """Raise a TuningError if there are too few prompts to say what an unseen one reaches."""
        least = 1 if self.coverage is None else math.ceil(round(self.coverage / (1 - self.coverage), 9))
        if min(tuning, held_out) < least:
            needs = f"{least} prompts for tuning and {least} held out, got {tuning} and {held_out}"
            fix = "list more prompts, and raise tuning_prompts and held_out_prompts"
            raise TuningError(f"coverage={self.coverage:g} needs {needs}: {fix}")

    def level(self, figures: Sequence[Figures]) -> float:
        """Return the mean, or the bound that an unseen prompt reaches with probability ``coverage``."""
        values = [getattr(run, self.metric) for run in figures]
        if self.coverage is None:
            return statistics.fmean(values)
        return conformal(values, self.coverage, is_lower=self.metric == "psnr")

    def slack(self, figures: Sequence[Figures], *, cautious: bool = False) -> float:
        """Return the margin, in dB or as a share of the allowed error; negative = the target is missed.

        ``cautious`` subtracts the standard error of a mean, so that other prompts are likely to meet the target too.
        """
        values = [getattr(run, self.metric) for run in figures]
        is_mean = self.coverage is None and len(values) > 1
        doubt = statistics.stdev(values) / len(values) ** 0.5 if cautious and is_mean else 0.0
        level = self.level(figures)
        return level - doubt - self.value if self.metric == "psnr" else 1 - (level + doubt) / self.value

    def __str__(self) -> str:
        bound = f"PSNR ≥ {self.value:g} dB" if self.metric == "psnr" else f"latent error ≤ {self.value:g}"
        return bound if self.coverage is None else f"{bound} for {self.coverage:.0%} of prompts"


def conformal(values: Sequence[float], coverage: float, *, is_lower: bool = True) -> float:
    """Return the bound of split conformal prediction: an exchangeable further value is on its good side with a
    probability of at least ``coverage`` (Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, 2005).

    Below coverage / (1 − coverage) values there is no such bound, and their worst is returned.
    """
    place = math.floor(round((len(values) + 1) * (1 - coverage), 9))
    return sorted(values, reverse=not is_lower)[max(0, place - 1)]


def computed_fraction(figures: Sequence[Figures]) -> float:
    return statistics.fmean(run.computed_fraction for run in figures)


@dataclass(frozen=True)
class TuneResult:
    """A tuned preset."""

    preset: Preset
    base: str | Path | None  # name or path of the tuned preset's base; None if it was an object
    changes: dict[str, Any]  # dotted keys that differ from the base
    target: Target
    met: bool  # whether the held-out prompts meet the target
    setting: Setting  # the run-level thresholds, with the bounds of the layers' errors
    held_out: list[Figures]
    evaluations: list[tuple[Setting, list[Figures]]]  # settings that the search tried, in order, and their runs
    curves: Curves  # empty if no tiles are skipped
    chosen: dict[str, Candidate | None]  # point on each block's curve; None = the block computes all tiles
    circumstances: dict[str, str]  # pipeline, device and versions of the measurement

    def figures(self) -> dict[str, str]:
        psnrs, errors = [run.psnr for run in self.held_out], [run.latent_error for run in self.held_out]
        return {
            "computed fraction": f"{computed_fraction(self.held_out):.3f}",
            "tile sparsity": f"{statistics.fmean(run.tile_sparsity for run in self.held_out):.2f}",
            "PSNR": f"{statistics.fmean(psnrs):.1f} dB mean, {min(psnrs):.1f} dB worst",
            "latent error": f"{statistics.fmean(errors):.4f} mean, {max(errors):.4f} worst",
            "held-out prompts": str(len(self.held_out)),
        }

    def write(self, path: str | Path) -> None:
        """Write the preset as YAML, with the measured values in its header; the write is atomic."""
        path = Path(path)
        facts = {**self.figures(), **self.circumstances}
        width = max(map(len, facts))
        verdict = f"Tuned for {self.target} by dit-accel tune; confirmed on prompts that the search did not use."
        if not self.met:
            verdict = f"MISSES its target, {self.target}: the closest setting that dit-accel tune found."
        lines = [f"# {verdict}", *(f"# {key:{width}}  {value}" for key, value in facts.items())]
        values = self.preset.effective()
        if self.base is not None:
            base = str(self.base)
            if isinstance(self.base, Path) or base.endswith((".yaml", ".yml")):
                base = os.path.relpath(self.base, path.resolve().parent)
            values = {"base": base, "description": self.changes["description"], **nested(self.changes)}
        write_whole(path, "\n".join(lines) + "\n" + yaml.safe_dump(values, sort_keys=False, allow_unicode=True))

    def plot(self, path: str | Path) -> None:
        """Plot all tried settings and, if layers have thresholds, each layer's error against its sparsity."""
        figure = new_figure(11.0 if self.curves else 6.0, 4.6)
        axes, *of_layers = figure.subplots(1, 2 if self.curves else 1, squeeze=False)[0]
        axes.axhline(self.target.value, color=GREY, linewidth=1, linestyle="--", label="target")
        runs, level = [figures for _, figures in self.evaluations], self.target.level
        tried = list(map(computed_fraction, runs)), list(map(level, runs))
        axes.plot(*tried, "o", color=SERIES_COLOURS[0], alpha=0.5, label="tried, tuning prompts")
        chosen = computed_fraction(self.held_out), level(self.held_out)
        axes.plot(*chosen, "*", color=ERROR_COLOUR, markersize=14, label="chosen, held-out prompts")
        quality = {"psnr": "PSNR (dB)", "latent_error": "relative error of the latents"}[self.target.metric]
        axes.set(xlabel="computed fraction of FLOPs (less is faster)", ylabel=quality)
        axes.legend(frameon=False, loc="best")
        axes.set_title("Settings", loc="left")
        for panel in of_layers:
            self._plot_layers(panel)
        for panel in (axes, *of_layers):
            tidy_axes(panel, grid="both")
        save(figure, path)

    def _plot_layers(self, axes: Axes) -> None:
        from matplotlib import colormaps

        for number, (block, candidates) in enumerate(self.curves.items()):
            colour = colormaps["viridis"](number / max(len(self.curves) - 1, 1))
            if points := sorted((item.sparsity, item.error) for item in candidates if not item.skips_values):
                axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.4, label=block)
            if (taken := self.chosen[block]) is not None:
                axes.plot(taken.sparsity, taken.error, "o", color=colour, markersize=6)
        axes.axhline(self.setting[BOUND], color=GREY, linewidth=1, linestyle="--")
        if any(item.error > 0 for candidates in self.curves.values() for item in candidates):
            log_scale(axes)
        axes.set(xlabel="sparsity", ylabel="relative L1 error of attention")
        skipping = sum(taken is not None for taken in self.chosen.values())
        axes.set_title(f"Layers: {skipping} of {len(self.curves)} leave tiles out", loc="left")
        if len(self.curves) <= MOST_LABELS:
            axes.legend(frameon=False, loc="best", fontsize=7)
