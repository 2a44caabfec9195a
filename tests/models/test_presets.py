"""Presets and families: a preset is for one that exists and that can run it, wherever it is loaded or used."""

import pytest

from dit_accel import accelerate_pipeline, accelerate_transformer, load_preset
from dit_accel import presets as unchecked
from dit_accel.cli.options import RunOptions
from dit_accel.errors import PresetError
from dit_accel.models.families import FAMILIES
from dit_accel.models.presets import fitting_presets, preset_schema
from dit_accel.presets import preset_names
from tests.models import tiny

LEVEL_HEAD = {"forecast.level": "head"}
ORDERED = {"blocks": {"size": 64, "token_order": "tiles"}, "skip": {"policy": "sparge", "steps": "all"}}
WRONG = {
    "unknown": (
        {"model": "mochii"},
        r"preset 'balanced' is not valid: model: Input should be 'any', 'flux', .* or "
        r"'minimax_h3', got 'mochii' \(did you mean 'mochi'\?\)",
    ),
    "head-of-any": (LEVEL_HEAD, "level 'head' needs hand-written blocks, and model is 'any'"),
    "head": (LEVEL_HEAD | {"model": "sd3"}, "to flux, flux2, hunyuan_video, krea2, qwen_image, wan or z_image"),
    "order": (ORDERED | {"model": "flux"}, "'tiles' orders the tokens of videos, and model is 'flux'"),
}
WAYS = {
    "load_preset": lambda **overrides: load_preset("balanced", **overrides),
    "accelerate_pipeline": lambda **overrides: accelerate_pipeline(tiny.pipeline("flux"), "balanced", **overrides),
    "accelerate_transformer": lambda **overrides: accelerate_transformer(
        tiny.pipeline("flux").transformer, unchecked.load_preset("balanced", **overrides), [1.0, 0.5]
    ),
    "command": lambda **overrides: RunOptions(
        preset="balanced", overrides=[f"{k}={v}" for k, v in overrides.items()]
    ).preset_and_loading(),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("overrides", "complaint"), WRONG.values(), ids=WRONG)
def test_what_no_family_can_run_is_refused(way, overrides, complaint):
    """Names that no family has, level head without fused blocks, and orders of tokens that have none."""
    with pytest.raises(PresetError, match=complaint):
        way(**overrides)


@pytest.mark.parametrize("name", preset_names())
def test_shipped_presets_are_for_a_family_that_can_run_them(name):
    assert load_preset(name) == unchecked.load_preset(name)


def test_the_schema_lists_the_families():
    """Editors offer their names and refuse others."""
    assert preset_schema()["properties"]["model"]["enum"] == ["any", *(family.name for family in FAMILIES)]


def test_fitting_presets_are_those_of_the_family_and_of_any():
    """At levels that it has."""
    assert {"balanced", "flux-flashomni"} <= {*fitting_presets("flux", ["output", "head"])}
    assert fitting_presets("sd3", ["output", "layer"]) == fitting_presets("any", ["output", "layer"])
