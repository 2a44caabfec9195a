"""SpargeAttn with thresholds tuned per layer as in its section 3.6, against one value for all layers."""

from __future__ import annotations

from typing import Any

from dit_accel.presets import Preset, load_preset
from dit_accel.tools.tune.calibration import Curves, Recorder, choose, layers_of, measure

from .settings import MODELS

SOURCE = "SpargeAttn, section 3.6"
SAMPLES = 5  # prompts of the tuning split
BOUNDS = {  # l1 and l2: SpargeAttn's own (section 4.1), and FlashOmni's for it (table 1)
    "demo-flux": ((0.07, 0.08), (0.065, 0.07)),
    "demo-hunyuan": ((0.05, 0.06), (0.06, 0.065)),
    "demo-wan": ((0.05, 0.06),),
}
UNTUNED = (0.02, 0.05, 0.1, 0.15, 0.2)  # tau_kv for all layers
JUDGE = 0.3  # similarity threshold where it is not searched per layer


def base(model: str) -> Preset:
    """SpargeAttn on every step, with blocks of 64 like the paper's key blocks; λ is searched unless it is None."""
    skip = {"policy": "sparge", "steps": "all", "similarity": JUDGE, "pv_threshold": -9.0, "tau_kv": 0.05}
    return load_preset("exact", model=MODELS[model], skip=skip, blocks={"size": 64}, schedule={"warmup": 0})


def curves(pipe: Any, model: str, run: Any, prompts: list[Any], steps: int) -> Curves:
    """Measure sparsity and error of each layer over its thresholds, on plain runs of ``prompts``."""
    recorder = Recorder(base(model), steps, len(prompts))
    for place, prompt in enumerate(prompts):
        with recorder.tap(pipe, place):
            run(prompt)
    return dict(measure(recorder, base(model), pipe.device))


def presets(model: str, measured: Curves) -> list[tuple[str, Preset]]:
    """Tuned presets for the papers' bounds, with and without λ, and untuned presets."""
    found = []
    for l1, l2 in BOUNDS[model]:
        for name, kept in (("", measured), (", no λ", {block: _without(each) for block, each in measured.items()})):
            layers = layers_of(choose(kept, l1, l2 / l1))
            found.append((f"tuned, l1 = {l1}, l2 = {l2}{name}", load_preset(base(model), **{"skip.layers": layers})))
    plain = load_preset(base(model), **{"skip.pv_threshold": None})
    found += [(f"τ = {1 - mass:g}, θ = {JUDGE}", load_preset(plain, **{"skip.tau_kv": mass})) for mass in UNTUNED]
    return found


def _without(candidates: list[Any]) -> list[Any]:
    return [each for each in candidates if not each.skips_values]
