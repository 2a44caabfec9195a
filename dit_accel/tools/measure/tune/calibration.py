"""Thresholds of single layers: sparsity and error of attention on tensors of a plain run.

SpargeAttn (section 3.6) searches the thresholds of each layer on recorded inputs: first the sparsest thresholds with a
relative L1 error ``Σ|O − O'| / Σ|O|`` of at most l1, then λ with an error of at most l2. Here each layer's errors are
measured once over rows of values of every policy's thresholds, so that thresholds for any l1 and l2 follow from them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dit_accel.errors import TuningError
from dit_accel.kernels import attention
from dit_accel.presets import Preset, Skip
from dit_accel.sparse.policies import plan, policy_of
from dit_accel.sparse.projections import load_projections
from dit_accel.tools.measure.capture import AttentionTap, Site
from dit_accel.tools.measure.tune.axes import BOUND_RATIOS, BOUNDS, skips_values
from dit_accel.tools.measure.tune.runs import left_out

PV_THRESHOLDS = (-20.0, -15.0, -12.0, -9.0, -7.0, -5.0, -4.0, -3.0)
SAMPLES = 4  # recorded steps of each layer, across prompts and the run
LEAST_SPARSITY = 0.02  # below it a layer gains less than its masks cost
MEMORY = 4 * 2**30  # bytes of recorded tensors; the number of recorded heads is limited to fit


@dataclass(frozen=True)
class Candidate:
    """Thresholds for one layer, with its error and sparsity as means over the recorded steps."""

    changes: dict[str, Any]  # keys of section `skip`
    error: float  # relative L1 of the attention's output
    sparsity: float  # skipped share of the attention, without pv_threshold

    @property
    def skips_values(self) -> bool:
        return self.changes.get("pv_threshold") is not None

    def refines(self, other: Candidate) -> bool:
        return self.skips_values and {**self.changes, "pv_threshold": None} == other.changes


Curves = dict[str, list[Candidate]]  # by block, from the closest to the cheapest


@dataclass(frozen=True)
class _Sample:
    site: Site
    tensors: tuple[torch.Tensor, ...]  # q, k, v [B, S, some heads, D], in the preset's token order, on the CPU
    progress: float


class Recorder:
    """Records q, k and v at a few steps of plain runs, for every block with a sparse policy.

    The steps are spread over the runs of all ``prompts``; all records take at most ``memory`` bytes.
    """

    def __init__(self, preset: Preset, steps: int, prompts: int, memory: int = MEMORY) -> None:
        if any(policy_of(variant).needs_grid for variant in preset.skip.variants):
            raise TuningError("skip.policy 'vsa' has no thresholds to tune: run its preset as it is")
        self.samples: dict[str, list[_Sample]] = defaultdict(list)
        self._preset = preset
        self._steps = steps
        self._memory = memory
        warmup = min(preset.schedule.warmup, steps - 1)
        count = max(SAMPLES, prompts)
        places = [warmup + math.floor((place + 0.5) / count * (steps - warmup)) for place in range(count)]
        self._chosen = [set(places[prompt::prompts]) for prompt in range(prompts)]
        self._share = count  # samples of a block
        self._wanted: set[int] = set()
        self._blocks: list[str] = []

    def tap(self, pipe: Any, prompt: int) -> AttentionTap:
        tap = AttentionTap(pipe, self._visit, block=self._preset.blocks.size)
        self._wanted, self._blocks = set(self._chosen[prompt]), tap.blocks
        self._seen: set[tuple[str, int]] = set()
        return tap

    def require_every_block(self) -> None:
        """Raise a TuningError unless every block with a sparse policy ran in a recorded step."""
        skipping = [block for block in self._blocks if self._preset.skip.at(block).policy != "none"]
        if missing := [block for block in skipping if block not in self.samples]:
            steps = sorted(set().union(*self._chosen))
            fix = "set num_inference_steps to the real number of steps, or skip.layers to policy none for these blocks"
            ran = f"none of the recorded steps, {steps} of {self._steps}, ran block {', '.join(missing)}"
            raise TuningError(f"{ran}: {fix}")

    def _visit(self, site: Site, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        is_seen = (site.block, site.step) in self._seen  # only the first branch is recorded
        if is_seen or site.step not in self._wanted or self._preset.skip.at(site.block).policy == "none":
            return
        self._seen.add((site.block, site.step))
        heads = q.shape[2]
        size = 3 * q[:, :, 0].numel() * q.element_size() * self._share * len(self._blocks)  # of one head everywhere
        kept = max(1, min(heads, self._memory // size))
        taken = len(self.samples[site.block])
        chosen = (torch.arange(kept) + taken * kept) % heads  # others in the next sample
        places = site.places(self._preset.blocks.token_order)
        tensors = tuple(x[:, :, chosen.to(x.device)][:, places.to(x.device)].cpu() for x in (q, k, v))
        self.samples[site.block].append(_Sample(site, tensors, site.step / self._steps))


def measure(recorder: Recorder, preset: Preset, device: torch.device) -> Iterator[tuple[str, list[Candidate]]]:
    for block, samples in recorder.samples.items():
        yield block, _candidates(block, samples, preset, device)


def choose(curves: Curves, bound: float, ratio: float) -> dict[str, Candidate | None]:
    """Choose each block's sparsest candidate under l1 and l2 = ratio · l1; None if it gains less than masks cost."""
    chosen: dict[str, Candidate | None] = {}
    for block, candidates in curves.items():
        best = _sparsest([item for item in candidates if not item.skips_values], bound)
        if best is not None:
            further = [item for item in candidates if item.refines(best) and item.error <= ratio * bound]
            best = max(further, key=lambda item: item.changes["pv_threshold"], default=best)
            if best.sparsity < LEAST_SPARSITY and not best.skips_values:
                best = None
        chosen[block] = best
    return chosen


def _sparsest(candidates: Sequence[Candidate], bound: float) -> Candidate | None:
    allowed = [item for item in candidates if item.error <= bound]
    return max(allowed, key=lambda item: (item.sparsity, -item.error), default=None)


def layers_of(chosen: dict[str, Candidate | None]) -> dict[str, dict[str, Any]]:
    return {block: {"policy": "none"} if best is None else dict(best.changes) for block, best in chosen.items()}


def _candidates(block: str, samples: Sequence[_Sample], preset: Preset, device: torch.device) -> list[Candidate]:
    """Measure rows of values, each until no bound allows the error; and λ for candidates that some bound chooses."""
    config, measured = preset.skip.at(block), _Measured(block, samples, preset, device)
    found: list[Candidate] = []
    for row in _rows(config):
        for changes in row:
            candidate = measured.candidate(config, changes)
            if candidate.error > BOUNDS[-1]:
                break
            found.append(candidate)
    if not skips_values(config):
        return found
    winners = {id(best): (best, bound) for bound in BOUNDS if (best := _sparsest(found, bound)) is not None}
    for best, bound in winners.values():  # with the largest bound that chooses it
        for threshold in PV_THRESHOLDS:
            further = measured.candidate(config, {**best.changes, "pv_threshold": threshold})
            if further.error > BOUND_RATIOS[-1] * bound:
                break
            found.append(further)
    return found


def _rows(config: Skip) -> Iterator[list[dict[str, Any]]]:
    thresholds = policy_of(config).thresholds(config)
    *slow, (key, row) = thresholds.items() if thresholds else [(None, (None,))]
    for values in itertools.product(*(values for _, values in slow)):
        fixed = dict(zip((key for key, _ in slow), values, strict=True))
        if skips_values(config):
            fixed["pv_threshold"] = None
        yield [{**fixed, key: value} if key else fixed for value in row]


class _Measured:
    def __init__(self, block: str, samples: Sequence[_Sample], preset: Preset, device: torch.device) -> None:
        self._preset = preset
        projections = getattr(preset.skip.at(block), "projection", None)
        held = {} if projections is None else load_projections(projections)
        self._projection = held.get(block, held.get(block.partition(".")[2]))  # a checkpoint names no transformer
        self._samples = []
        for sample in samples:
            q, k, v = (x.to(device) for x in sample.tensors)
            dense = attention(q, k, v, plan(q, k, Skip(), layout=sample.site.layout), kv_len=sample.site.kv_len)
            self._samples.append((sample, q, k, v, dense.float()))

    def candidate(self, config: Skip, changes: dict[str, Any]) -> Candidate:
        changed = Skip.model_validate({**config.model_dump(exclude_unset=True, exclude={"layers"}), **changes})
        errors, sparsities, policy = [], [], policy_of(changed)
        preset, section = self._preset, changed
        for sample, q, k, v, dense in self._samples:
            site = sample.site
            if preset.forecast.level == "head":  # where thresholds grow over the run
                section = policy.ramped(changed, sample.progress**preset.reuse.ramp)
            tiles = plan(q, k, section, layout=site.layout, kv_len=site.kv_len)
            options = {"pv_threshold": policy.options(changed).get("pv_threshold"), "qk_dtype": preset.kernels.qk_dtype}
            output = attention(q, k, v, tiles, kv_len=site.kv_len, backend=preset.kernels.attention, **options)
            projection = None if self._projection is None else self._projection.to(q)
            policy.add(output, (q, k, v), tiles, changed, projection, kv_len=site.kv_len)
            errors.append(((output.float() - dense).abs().sum() / dense.abs().sum()).item())
            sparsities.append(left_out(tiles))
        return Candidate(changes, statistics.fmean(errors), statistics.fmean(sparsities))
