"""What a tuning was to reach and what it found: a preset file with the measured figures, and a plot."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dit_accel.errors import TuningError
from dit_accel.presets import Preset
from dit_accel.presets.keywords import nested
from dit_accel.tools.files import write_whole
from dit_accel.tools.tune.axes import BOUND, Setting
from dit_accel.tools.tune.calibration import Candidate, Curves
from dit_accel.tools.tune.runs import Figures


@dataclass(frozen=True)
class Target:
    """The quality that a mean over prompts must have."""

    metric: str  # a figure of a run: psnr, of which more is better, or latent_error, of which less is
    value: float

    @classmethod
    def of(cls, psnr: float | None, latent_error: float | None) -> Target:
        """The target from two arguments, of which one is None.

        Raises:
            TuningError: both or none are given, or it is not a positive number.
        """
        if (psnr is None) == (latent_error is None):
            raise TuningError("tuning needs one target: target_psnr (dB), e.g. 40, or target_error, e.g. 0.05")
        target = cls("psnr", psnr) if psnr is not None else cls("latent_error", latent_error)
        if not 0 < target.value < math.inf:
            name = "target_error" if psnr is None else "target_psnr"
            raise TuningError(f"{name} must be positive and finite, got {target.value}")
        return target

    @property
    def least(self) -> float:
        """A noticeable slack."""
        return 0.25 if self.metric == "psnr" else 0.02

    def mean(self, figures: Sequence[Figures]) -> float:
        return statistics.fmean(getattr(each, self.metric) for each in figures)

    def slack(self, figures: Sequence[Figures], *, cautious: bool = False) -> float:
        """How far the mean is on the right side: in dB, or as a share of the error allowed; negative = it misses.

        Args:
            cautious: the mean is taken to be worse by its standard error: other prompts are then likely to do as well.
        """
        values = [getattr(each, self.metric) for each in figures]
        doubt = statistics.stdev(values) / len(values) ** 0.5 if cautious and len(values) > 1 else 0.0
        mean = statistics.fmean(values)
        return mean - doubt - self.value if self.metric == "psnr" else 1 - (mean + doubt) / self.value

    def __str__(self) -> str:
        return f"PSNR ≥ {self.value:g} dB" if self.metric == "psnr" else f"latent error ≤ {self.value:g}"


def computed_fraction(figures: Sequence[Figures]) -> float:
    """The mean over runs."""
    return statistics.fmean(each.computed_fraction for each in figures)


@dataclass(frozen=True)
class Evaluation:
    """One setting of the run-level thresholds, and its runs on the tuning prompts."""

    setting: Setting
    figures: list[Figures]


@dataclass(frozen=True)
class TuneResult:
    """A tuned preset.

    Args:
        preset: ready for ``accelerate_pipeline``.
        base: name or path of the preset that was tuned; None where it was an object.
        changes: dotted keys that the tuned preset has over its base.
        target: what was asked for.
        met: whether the held-out prompts meet it.
        setting: the run-level thresholds, with the bounds of the layers' errors.
        held_out: figures of the held-out prompts' runs.
        evaluations: what the search tried, in that order.
        curves: what single layers do over their thresholds; empty where no tiles are left out.
        chosen: the point on each block's curve that the preset takes; None = the block leaves nothing out.
        circumstances: what was measured on.
    """

    preset: Preset
    base: str | Path | None
    changes: dict[str, Any]
    target: Target
    met: bool
    setting: Setting
    held_out: list[Figures]
    evaluations: list[Evaluation]
    curves: Curves
    chosen: dict[str, Candidate | None]
    circumstances: dict[str, str]

    def figures(self) -> dict[str, str]:
        """What was measured on the held-out prompts, in words."""
        means = {
            key: statistics.fmean(getattr(each, key) for each in self.held_out) for key in Figures.__dataclass_fields__
        }
        psnrs, errors = [each.psnr for each in self.held_out], [each.latent_error for each in self.held_out]
        return {
            "computed fraction": f"{means['computed_fraction']:.3f}",
            "tile sparsity": f"{means['tile_sparsity']:.2f}",
            "PSNR": f"{means['psnr']:.1f} dB mean, {min(psnrs):.1f} dB worst",
            "latent error": f"{means['latent_error']:.4f} mean, {max(errors):.4f} worst",
            "held-out prompts": str(len(self.held_out)),
        }

    def write(self, path: str | Path) -> None:
        """Writes the preset as YAML, with what was measured in its header; the file appears whole or not at all."""
        path = Path(path)
        facts = {**self.figures(), **self.circumstances}
        width = max(map(len, facts))
        verdict = f"Tuned for {self.target} by dit-accel tune; confirmed on prompts that the search never saw."
        if not self.met:
            verdict = f"MISSES its target, {self.target}: the closest that dit-accel tune has found."
        lines = [f"# {verdict}", *(f"# {key:{width}}  {value}" for key, value in facts.items())]
        text = "\n".join(lines) + "\n" + yaml.safe_dump(self._values(path), sort_keys=False, allow_unicode=True)
        write_whole(path, text)

    def plot(self, path: str | Path) -> None:
        """Writes what the search tried and, where layers have thresholds, each layer's error against its sparsity."""
        from dit_accel.tools.figures import LayerCurve, tuning_figure

        def place(figures: list[Figures]) -> tuple[float, float]:
            return computed_fraction(figures), self.target.mean(figures)

        layers = [
            LayerCurve(
                block,
                [(each.sparsity, each.error) for each in candidates if not each.skips_values],
                taken and (taken.sparsity, taken.error),
            )
            for (block, candidates), taken in zip(self.curves.items(), self.chosen.values(), strict=True)
        ]
        tuning_figure(
            [place(each.figures) for each in self.evaluations],
            place(self.held_out),
            self.target.value,
            {"psnr": "PSNR (dB)", "latent_error": "relative error of the latents"}[self.target.metric],
            layers,
            self.setting.get(BOUND),
            path,
        )

    def _values(self, path: Path) -> dict[str, Any]:
        """What the file says."""
        if self.base is None:
            return self.preset.effective()
        base = str(self.base)
        if isinstance(self.base, Path) or base.endswith((".yaml", ".yml")):
            base = os.path.relpath(self.base, path.resolve().parent)
        return {"base": base, "description": self.changes["description"], **nested(self.changes)}
