"""Pipeline runs of a tuning. Results are stored, so that an interrupted tuning repeats no run."""

import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from dit_accel.errors import TuningError
from dit_accel.kernels import lower
from dit_accel.kernels.symbols import AttentionPlan
from dit_accel.pipeline import accelerated
from dit_accel.presets import Preset
from dit_accel.tools.files import explained_writing, read_results, write_whole
from dit_accel.tools.measure.metrics import IDENTICAL, latent_error, psnr
from dit_accel.tools.measure.timing import run_pipeline


@dataclass(frozen=True)
class Figures:
    """Results of one accelerated run compared with the plain run."""

    psnr: float  # dB, over all values of the image or video in 8 bits; equal outputs count as `IDENTICAL`
    latent_error: float  # relative L2 error of the last latents
    computed_fraction: float  # FLOPs of the blocks over the FLOPs of the plain run
    tile_sparsity: float  # share of tiles that the latest masks skip in computed rows, over all blocks


class FigureStore:
    """Storage of a tuning: a folder with JSON values in ``state.json`` and tensors in other files; writes are atomic.

    The folder, None = nothing is stored, is created if missing. A folder of another request is a TuningError.
    """

    def __init__(self, folder: Path | None, request: dict[str, Any]) -> None:
        self._folder = folder
        self._values: dict[str, Any] = {"request": request}
        if folder is None:
            return
        self._file = folder / "state.json"
        with explained_writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        if self._file.is_file():
            kind = {"key": "request", "kind": "tuning", "remove": "the folder", "error": TuningError}
            self._values = read_results(self._file, request, **kind)
        self._save()

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return the stored value of a name; without one, measure and store it."""
        if name not in self._values:
            self._values[name] = measure()
            self._save()
        return self._values[name]

    def get_tensors(self, name: str) -> dict[str, torch.Tensor] | None:
        file = self._folder and self._folder / f"{name}.safetensors"
        return load_file(file) if file and file.is_file() else None

    def put_tensors(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        if self._folder is not None:
            contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
            write_whole(self._folder / f"{name}.safetensors", save(contiguous))

    def _save(self) -> None:
        if self._folder is not None:
            write_whole(self._file, json.dumps(self._values, indent=1) + "\n")


@dataclass
class MeasuredRuns:
    """Runs of one pipeline on fixed prompts, by their index."""

    pipe: Any  # plain
    arguments: dict[str, Any]  # of its call, without prompt and generator
    prompts: list[str]  # one per run
    seed: int  # of the first prompt's noise; the next prompt gets the next seed
    store: FigureStore
    begin: Callable[[], None]  # called before each run
    _plain: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict, init=False)

    def plain(self, index: int, tap: AbstractContextManager | None = None) -> dict[str, torch.Tensor]:
        """Return ``latents`` and uint8 ``frames`` ``[frames, 3, height, width]`` of the plain run; a tap repeats it."""
        name = f"plain-{index:02d}"
        known = None if tap else self._plain.get(index) or self.store.get_tensors(name)
        if known is None:
            with tap or nullcontext():
                known = self._call(index)
            self.store.put_tensors(name, known)
        self._plain[index] = known
        return known

    def figures(self, preset: Preset, indices: Iterable[int]) -> list[Figures]:
        values = preset.model_dump(mode="json", exclude={"description"})
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
        runs = {f"run {digest} {index}": partial(self._measured, preset, index) for index in indices}
        return [Figures(**self.store.once(name, run)) for name, run in runs.items()]

    def _measured(self, preset: Preset, index: int) -> dict[str, float]:
        plain = self.plain(index)
        with accelerated(self.pipe, preset):
            fast = self._call(index)
            report, symbols = self.pipe.dit_accel.report(), self.pipe.dit_accel.symbols()
        sparsity = sum(left_out(lower(plan)) for plan in symbols.values()) / len(report.layers)
        found = {"computed_fraction": report.computed_fraction, "tile_sparsity": sparsity}
        error = latent_error(fast["latents"], plain["latents"])
        return {"psnr": min(psnr(fast["frames"], plain["frames"]), IDENTICAL), "latent_error": error, **found}

    def _call(self, index: int) -> dict[str, torch.Tensor]:
        self.begin()
        output = run_pipeline(self.pipe, self.arguments, self.prompts[index], self.seed + index)
        values = output["frames"] if "frames" in output else (1 + output["sound"]) / 2  # amplitudes are in −1..1
        return {"latents": output["latents"], "frames": (255 * values.clamp(0, 1)).round().to(torch.uint8)}


def left_out(plan: AttentionPlan) -> float:
    """Return the share of computed rows that a plan skips: skipped tiles, minus their single kept keys."""
    rows = plan.work_count.sum().clamp(min=1)
    kept = plan.kv_count.sum() / (rows * plan.blocks)
    if plan.slices is not None:
        kept = kept + plan.slices.count.sum() / (rows * plan.tokens)
    return 1 - kept.item()
