"""Report of a run: steps by mode, computed fraction, densities, fallbacks, time and memory."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

logger = logging.getLogger(__name__)
TOGETHER = "prompts of a batch computed together"  # beginning of a note


@dataclass
class StepRecord:
    """Record of one denoising step.

    Args:
        index: step in the run, from 0.
        timestep: the scheduler's timestep.
        mode: of the branch that computed most: full or update (a computed step), dispatch (a forecast step).
        error: largest measured ‖F − F̂‖/‖F‖ over samples and branches; None = no forecast was possible.
        seconds: time inside the transformer, all branches together.
        attended: share of the query-key pairs that attention computed, mean over branches; None = not known.
        decided_by: output that decided the next computed step, "first output" or "audio"; None = one schedule for all.
    """

    index: int
    timestep: float
    mode: str
    error: float | None = None
    seconds: float = 0.0
    attended: float | None = None
    decided_by: str | None = None


@dataclass
class PromptRecord:
    """Record of one prompt, in a batch whose steps are decided for each prompt (``schedule.per_prompt``).

    Args:
        modes: the prompt's mode in each step; see :class:`StepRecord`.
        errors: the prompt's measured error in each step.
        computed_fraction: FLOPs of the blocks for this prompt over the FLOPs of a plain run.
    """

    modes: list[str] = field(default_factory=list)
    errors: list[float | None] = field(default_factory=list)
    computed_fraction: float = 1.0


@dataclass
class AttentionRecord:
    """Record of one block's sparse attention in a computed step, for one branch.

    Args:
        layer: the block's name.
        step: index of the step in the run.
        density: share of the scores that it computes, without the probe; above 1 if it computes dense attention in
            addition to the sparse one, to keep a residual.
        error: ‖O' − O‖/‖O‖ of its output on the probe's rows, O the dense output; None without a probe, or if dense.
    """

    layer: str
    step: int
    density: float
    error: float | None = None


@dataclass
class RunReport:
    """Report of the last (or current) run of an accelerated transformer or pipeline.

    Args:
        preset: name of the preset.
        family: model family of the adapter.
        layers: names of the transformer's blocks; name of the transformer if its blocks are not known.
        steps: one record a step.
        density: ``density[layer][step]`` = computed share of that block's FLOPs, mean over branches; None = its
            transformer was not called in the step. An UPDATE that also refreshes cached biases is slightly above 1.
        computed_fraction: FLOPs of the blocks, the probe included, over the FLOPs of a plain run; None = no call yet.
        attentions: density and probe error of the sparse attentions in computed steps, in order of calls.
        fallbacks: ``{"site", "reason"}`` of each site that used dense attention although the preset asks for sparse.
        seconds: time inside the transformer.
        parts: seconds of the pipeline's whole call by component, in order; autoencoders by encoder and decoder. Once
            the call is over, ``rest`` has the remaining time. Empty if no pipeline is accelerated.
        cache_bytes: peak device memory of histories, symbols and cached biases.
        host_bytes: peak host memory of offloaded histories.
        estimated_bytes: estimate of ``cache_bytes``, made before the blocks of each branch first ran.
        memory_measures: measures that make the caches smaller, from the preset or to meet its budget.
        prompts: one record a prompt, if the steps of a batch are decided for each prompt; otherwise empty.
        earlier: runs that the call made before, for other chunks, segments or stages of a video; None = none.
        replayed: transformer calls that ran as CUDA graphs.
        encoding: how many calls of encoders were saved by kept outputs; None = there was none.
        decoding: how the call's latents were decoded; None = they were not.
        not_captured: why some calls were not captured, if graphs are ``auto`` on a GPU; None = only first ones, or off.
        notes: remarks on the run as a whole.
    """

    preset: str
    family: str
    layers: list[str]
    steps: list[StepRecord] = field(default_factory=list)
    density: list[list[float | None]] = field(default_factory=list)
    computed_fraction: float | None = None
    attentions: list[AttentionRecord] = field(default_factory=list)
    fallbacks: list[dict[str, str]] = field(default_factory=list)
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    cache_bytes: int = 0
    host_bytes: int = 0
    estimated_bytes: int = 0
    memory_measures: list[str] = field(default_factory=list)
    prompts: list[PromptRecord] = field(default_factory=list)
    earlier: str | None = None
    replayed: int = 0
    encoding: str | None = None
    decoding: str | None = None
    not_captured: str | None = None
    notes: list[str] = field(default_factory=list)

    def note(self, remark: str) -> None:
        """Add a remark on the run as a whole, once."""
        if remark not in self.notes:
            self.notes.append(remark)
            logger.info("%s", remark)

    def warn(self, remark: str) -> None:
        """Add a remark and warn: something is not accelerated at all."""
        self.note(remark)
        warnings.warn(f"dit-accel: {remark}", stacklevel=2)

    def fall_back(self, site: str, reason: str) -> None:
        """Note that a site fell back to dense computation although the preset asks for less."""
        entry = {"site": site, "reason": reason}
        if entry not in self.fallbacks:
            self.fallbacks.append(entry)
            logger.info("%s falls back to dense: %s", site, reason)

    @property
    def steps_by_mode(self) -> dict[str, int]:
        """Number of steps in each mode that occurred."""
        return dict(Counter(step.mode for step in self.steps))

    @property
    def left_out(self) -> float:
        """Share of the scores that attention left out of computed steps after the warm-up, mean over attentions."""
        return 1 - fmean(attention.density for attention in self.attentions) if self.attentions else 0.0

    @property
    def attention_sparsity(self) -> float | None:
        """Share of all query-key pairs that the run left out, forecast steps included (FlashOmni, section 4.1).

        None = the model's attentions are not known.
        """
        shares = [step.attended for step in self.steps if step.attended is not None]
        return 1 - fmean(shares) if shares else None

    def of_prompt(self, place: int) -> RunReport:
        """Return the report for one prompt: steps and computed fraction are the prompt's, the rest is the batch's.

        If the batch was decided together, return the report itself.
        """
        if not self.prompts:
            return self
        record = self.prompts[place]
        steps = [
            replace(step, mode=mode, error=error)
            for step, mode, error in zip(self.steps, record.modes, record.errors, strict=True)
        ]
        return replace(self, steps=steps, computed_fraction=record.computed_fraction, prompts=[])

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values, ready for ``json.dump``."""
        return {**asdict(self), "steps_by_mode": self.steps_by_mode}

    def __str__(self) -> str:
        lines = [f"dit-accel {self.preset} on {self.family}"]
        lines += self._figures() if self.steps else ["  no accelerated call yet"]
        if self.earlier is not None:
            lines.append(f"  earlier runs       {self.earlier}")
        lines += [f"  to save memory     {measure}" for measure in self.memory_measures]
        if self.encoding is not None:
            lines.append(f"  encoding           {self.encoding}")
        if self.decoding is not None:
            lines.append(f"  decoding           {self.decoding}")
        if self.replayed:
            lines.append(f"  CUDA graphs        replayed for {self.replayed} transformer calls")
        if self.not_captured is not None:
            others = " for others" if self.replayed else ""
            lines.append(f"  no CUDA graphs{others or '    '} {self.not_captured}")
        if errors := [step.error for step in self.steps if step.error is not None]:
            lines.append(f"  forecast error     {errors[-1]:.4f} at the last step measured, {max(errors):.4f} at most")
        deciders = Counter(step.decided_by for step in self.steps if step.decided_by is not None)
        if deciders:
            shown = ", ".join(f"{name} {count} times" for name, count in deciders.most_common())
            lines.append(f"  steps decided by   {shown}")
        if self.attentions:
            lines.append(f"  tiles left out     {self.left_out:.0%} on computed steps after the warm-up")
        if probed := [(item.error, item.layer, item.step) for item in self.attentions if item.error is not None]:
            error, layer, step = max(probed, key=lambda item: item[0])
            mean = fmean(item[0] for item in probed)
            where = f"{layer}, step {step}"
            lines.append(f"  attention error    {mean:.4f} on the probe's rows, {error:.4f} at most ({where})")
        lines += [f"  note               {note}" for note in self.notes]
        by_reason: dict[str, list[str]] = {}
        for fallback in self.fallbacks:
            by_reason.setdefault(fallback["reason"], []).append(fallback["site"])
        for reason, sites in by_reason.items():
            shown = ", ".join(sites[:3]) + (f" and {len(sites) - 3} more" if len(sites) > 3 else "")
            lines.append(f"  dense fallback     {shown}: {reason}")
        return "\n".join(lines)

    def _figures(self) -> list[str]:
        """Return lines on the steps, FLOPs, time and memory of a run with steps."""
        sparsity, pairs = self.attention_sparsity, "of the run's pairs of queries and keys"
        forecast = self.steps_by_mode.get("dispatch", 0)
        return [
            f"  steps              {len(self.steps)} ({len(self.steps) - forecast} computed, {forecast} forecast)",
            f"  computed fraction  {self.computed_fraction:.3f} of the blocks' FLOPs",
            *([] if sparsity is None else [f"  attention sparsity {sparsity:.3f} {pairs}"]),
            f"  transformer time   {self.seconds:.2f} s{self._seconds_by_kind()}",
            *([f"  whole call         {self._seconds_by_part()}"] if self.parts else []),
            f"  cache memory       {_mebibytes(self.cache_bytes)}, {_mebibytes(self.estimated_bytes)} expected"
            + (f", and {_mebibytes(self.host_bytes)} of the host's" if self.host_bytes else ""),
        ]

    def _seconds_by_kind(self) -> str:
        """Return the seconds of computed and of forecast steps; empty unless the run has both."""
        forecast = [step.seconds for step in self.steps if step.mode == "dispatch"]
        computed = [step.seconds for step in self.steps if step.mode != "dispatch"]
        if not forecast or not computed:
            return ""
        times = f"{len(computed)} computed steps {sum(computed):.2f} s, {len(forecast)} forecast {sum(forecast):.2f} s"
        return f" ({times})"

    def _seconds_by_part(self) -> str:
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.parts.items())
        return f"{sum(self.parts.values()):.2f} s: {parts}"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
