"""Every key of a preset has an effect: changing it alone changes a tiny pipeline's output or its report."""

import functools
import json
from typing import Literal, get_args, get_origin

import pytest
import torch
from safetensors.torch import save_file

from dit_accel import accelerated
from dit_accel.presets import Preset
from dit_accel.presets.preset import FORMED
from tests.models.tiny import pipeline
from tests.tiny import tiny_output

STEPS = 8
ARGUMENTS = {
    "flux": {"prompt": ["a red fox", "two blue whales asleep"], "height": 112, "width": 112},
    "wan": {"guidance_scale": 1.0, "height": 96, "width": 96},
}
BLOCKS = ("transformer.blocks.0", "transformer.blocks.1")  # of Wan
PROJECTION = "projection of a file that the test writes"
TIMES = ("preset", "seconds", "parts")  # of a report, which differ from run to run

ADAPTIVE = {"control": "adaptive", "target_error": 0.3, "warmup": 2, "max_interval": 3}
INTERVAL = {"control": "interval", "interval": 3, "warmup": 2, "cooldown": 1}
OUTPUT = {"level": "output", "method": "newton", "order": 2, "coordinate": "step"}
HEAD = {"level": "head", "method": "newton", "order": 2}
TILES = {"policy": "sparge", "steps": "all", "top_k": 0.3}
ROWS = {"tau_q": 0.6, "ramp": 0.5}


def flux(**sections):
    return "flux", {"model": "flux", "blocks": {"size": 64}, **sections}


def wan(**sections):
    return "wan", {"model": "wan", "schedule": INTERVAL, "blocks": {"size": 64}, **sections}


BASES = {  # by section, and by form where it has several: a pipeline and a preset
    "schedule.adaptive": ("flux", {"schedule": ADAPTIVE, "forecast": OUTPUT}),
    "schedule.interval": ("flux", {"schedule": INTERVAL, "forecast": OUTPUT}),
    "forecast.output": ("flux", {"schedule": ADAPTIVE, "forecast": OUTPUT}),
    "forecast.layer": ("flux", {"schedule": ADAPTIVE, "forecast": {"level": "layer", "order": 2}}),
    "forecast.head": flux(schedule=ADAPTIVE, forecast=HEAD, reuse=ROWS),
    "skip.none": wan(
        skip={"policy": "none", "steps": "all", "refresh": 3, "layers": {BLOCKS[0]: {"policy": "sparge", "top_k": 0.3}}}
    ),
    "skip.sparge": wan(skip=TILES),
    "skip.sla": wan(skip={"policy": "sla", "steps": "all", "critical": 0.3, "projection": PROJECTION}),
    "skip.fg_attn": wan(skip={"policy": "fg_attn", "steps": "all", "key_threshold": 1.5}),
    "skip.static": wan(skip={"policy": "static", "steps": "all", "window": 96}),
    "skip.vsa": wan(skip={"policy": "vsa", "sparsity": 0.7, "projection": PROJECTION + ".gates"}),
    "reuse": flux(schedule=INTERVAL, forecast=HEAD, reuse=ROWS, skip={"policy": "sparge", "top_k": 0.5}),
    "blocks": wan(skip=TILES),
    "kernels": wan(skip=TILES),
    "linear": ("flux", {"schedule": INTERVAL, "linear": {"dtype": "int8"}}),
    "memory": flux(schedule=INTERVAL, forecast=HEAD),
    "stages": ("flux", {"schedule": INTERVAL, "forecast": OUTPUT}),
}


def beside(value, *, instead_of=None, **sections):
    """A value that acts together with other keys, section by section, and replaces a key; None removes a key."""
    return value, instead_of, sections


COMPUTED = {  # keys that all policies have
    "steps": beside("dispatch", forecast=HEAD),
    "refresh": 3,
    "residual": beside(True, skip={"refresh": 3}),
    "probe_blocks": 1,
}
CHANGES = {  # by key: another value
    "schedule.adaptive": {
        "target_error": 0.001,
        "computed_steps": 3,
        "max_seconds": 1e-3,
        "target_psnr": beside(40.0, schedule={"calibration": [[0.001, 40.0]]}),
        "calibration": beside([[0.001, 40.0]], schedule={"calibration": [[0.3, 40.0]], "target_psnr": 40.0}),
        "warmup": 4,
        "cooldown": 4,
        "max_interval": 1,
        "per_prompt": True,
    },
    "schedule.interval": {"interval": 2, "warmup": 3, "cooldown": 3},
    "forecast.output": {
        "method": beside("taylor", schedule=INTERVAL),
        "order": 1,
        "coordinate": "sigma",
        "corrector": True,
        "beyond": beside(0.5, schedule={"warmup": 3, "target_error": 1.0}),
        "damping": True,
    },
    "forecast.layer": {"method": beside("taylor", schedule=INTERVAL), "order": 1, "coordinate": "sigma"},
    "forecast.head": {"method": beside("taylor", schedule=INTERVAL), "order": 1, "coordinate": "sigma"},
    "skip.none": {
        "steps": beside("dispatch", forecast=HEAD, skip={"refresh": None}),
        "refresh": 1,
        "residual": True,
        "probe_blocks": 1,
        "layers": {BLOCKS[1]: {"policy": "sparge", "top_k": 0.3}},
    },
    "skip.sparge": {
        **COMPUTED,
        "layers": {BLOCKS[1]: {"top_k": 0.8}},
        "tau_kv": beside(0.5, skip={"top_k": None}),
        "top_k": 0.6,
        "similarity": 0.9,
        "sinks": True,
        "pv_threshold": -0.1,
        "means": True,
        "probe_error": beside(0.001, skip={"probe_blocks": 1}),
    },
    "skip.sla": {
        **COMPUTED,
        "layers": {BLOCKS[1]: {"critical": 0.8}},
        "critical": 0.6,
        "negligible": 0.5,
        "feature_map": "relu",
        "linear": "all",
        "projection": None,
    },
    "skip.fg_attn": {
        **COMPUTED,
        "layers": {BLOCKS[1]: {"key_threshold": 0.5}},
        "mask": "average_query",
        "key_threshold": 0.5,
    },
    "skip.static": {
        **COMPUTED,
        "refresh": beside(3, skip={"probe_blocks": 1}),
        "layers": {BLOCKS[1]: {"window": 300}},
        "pattern": beside("causal", instead_of="window"),
        "window": 300,
    },
    "skip.vsa": {"refresh": 3, "layers": {BLOCKS[1]: {"sparsity": 0.3}}, "sparsity": 0.3, "projection": None},
    "reuse": {"tau_q": 0.2, "ramp": 0.01, "degrade_below": 1.0},
    "blocks": {"size": 128, "token_order": "hilbert"},
    "kernels": {
        "attention": beside("triton", schedule={"warmup": STEPS - 1, "cooldown": 0}),  # the interpreter is slow
        "gemm": beside(
            "triton", forecast=HEAD, skip={"steps": "dispatch"}, schedule={"warmup": STEPS - 2, "cooldown": 0}
        ),
        "qk_dtype": "int8",
        "graphs": "always",
    },
    "linear": {"dtype": "float8", "exclude": ["*.to_out.0"], "weights": "host"},
    "memory": {"budget_gib": 0.0005, "history_dtype": "float8", "offload": True},
    "stages": {"decode": False, "share": True, "prompts": False, "prompts_mib": 0.001},
}
SAME = {
    "skip.static.refresh",  # masks that do not depend on queries or keys are the same, made again or kept
    "stages.decode",  # of a call that returns images
    "stages.share",  # of several processes
}


def variable(form):
    """Keys of a section's form that may have more than one value."""
    kinds = {key: field.annotation for key, field in form.model_fields.items()}
    return {key for key, kind in kinds.items() if get_origin(kind) is not Literal or len(get_args(kind)) > 1}


def sections():
    """The forms of every section, by name."""
    for name, field in Preset.model_fields.items():
        if name in FORMED:
            yield from ((f"{name}.{form}", kind) for form, kind in FORMED[name].forms.items())
        elif name not in ("name", "description", "model"):
            yield name, field.annotation


@pytest.fixture(scope="module")
def projection(tmp_path_factory):
    """A file of SLA's projections for tiny Wan, and one of VSA's gates."""
    with accelerated(pipeline("wan"), "exact") as pipe:
        blocks = pipe.dit_accel.report().layers
    config = pipeline("wan").transformer.config
    file = tmp_path_factory.mktemp("sla") / "sla.safetensors"
    generator = torch.Generator().manual_seed(0)
    size = config.attention_head_dim
    for path, side in ((file, size), (f"{file}.gates", size * config.num_attention_heads)):
        save_file({block: torch.randn(side, side, generator=generator) for block in blocks}, path)
    return file


@pytest.fixture(scope="module")
def shown(projection):
    """Observable results of a preset: latents, bit by bit, and the whole report except times."""

    @functools.cache
    def run(name, values):
        with accelerated(pipeline(name), Preset.model_validate(json.loads(values))) as pipe:
            latents = tiny_output(pipe, name, steps=STEPS, **ARGUMENTS[name])
            report = pipe.dit_accel.report().to_json()
        steps = [{key: value for key, value in step.items() if key != "seconds"} for step in report["steps"]]
        kept = {key: value for key, value in report.items() if key not in TIMES}
        return latents.numpy().tobytes(), kept | {"steps": steps}

    return lambda name, values: run(name, json.dumps(values).replace(PROJECTION, str(projection)))


def with_keys(values, **sections):
    """A preset's values with some keys changed, and those taken out that are None."""
    changed = dict(values)
    for name, keys in sections.items():
        joined = {} if "control" in keys or "level" in keys else dict(values.get(name, {}))
        joined |= keys
        changed[name] = {key: value for key, value in joined.items() if value is not None and key is not None}
    return changed


def test_the_table_holds_every_key():
    """A new key of the schema needs a line here that shows its effect."""
    assert {name: set(keys) for name, keys in CHANGES.items()} == {name: variable(form) for name, form in sections()}
    assert BASES.keys() == CHANGES.keys()


@pytest.mark.parametrize("place", [f"{name}.{key}" for name, keys in CHANGES.items() for key in keys])
def test_a_changed_key_shows(shown, place):
    """The result, or the decisions, densities, errors, memory or notes of the report, must differ."""
    section, key = place.rsplit(".", 1)
    (name, values), change = BASES[section], CHANGES[section][key]
    value, instead_of, needed = change if isinstance(change, tuple) else beside(change)
    before = with_keys(values, **needed)
    after = with_keys(before, **{section.split(".")[0]: {instead_of: None, key: value}})
    assert (shown(name, before) == shown(name, after)) == (place in SAME)


@pytest.mark.parametrize("section", FORMED)
def test_every_form_of_a_section_shows(shown, section):
    """The key that chooses a section's form has an effect too."""
    forms = [base for name, base in BASES.items() if name.startswith(f"{section}.")]
    seen = [shown(*base) for base in forms]
    assert len(seen) == len(FORMED[section].forms)
    assert all(one != other for place, one in enumerate(seen) for other in seen[:place])


def test_the_same_preset_shows_the_same(shown):
    """Nothing differs that no key has changed."""
    for name, values in (BASES["schedule.adaptive"], BASES["skip.sparge"], BASES["forecast.head"]):
        described = {**values, "description": "the same in other words"}
        assert shown(name, values) == shown(name, described)
