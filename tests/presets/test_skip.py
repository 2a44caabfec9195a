"""Section skip: keys of its policy, changes for single blocks, and combinations that kernels do not support."""

import pytest

from dit_accel.errors import PresetError
from dit_accel.presets import Forecast, Preset, Schedule, Skip, load_preset
from dit_accel.sparse.policies import policy_of

POLICY_KEYS = {  # that it alone has
    "none": (),
    "sparge": ("tau_kv", "top_k", "similarity", "sinks", "pv_threshold", "means", "probe_error"),
    "sla": ("critical", "negligible", "feature_map", "linear", "projection"),
    "fg_attn": ("mask", "key_threshold"),
    "static": ("pattern", "window"),
    "vsa": ("sparsity", "projection"),
}
TILES = {"top_k": 0.3, "similarity": 0.5, "sinks": True, "pv_threshold": -8.0, "means": True, "probe_error": 0.05}
VALUES = {  # valid ones, by policy
    "sparge": TILES,
    "sla": {"critical": 0.25, "negligible": 0.75, "projection": "p.safetensors", "feature_map": "elu"},
    "fg_attn": {"mask": "average_query", "key_threshold": 0.25},
    "static": {"pattern": "sliding", "window": 256},
}


def wan(**skip):
    """A closed-loop preset for Wan with this section."""
    return load_preset("video-balanced", model="wan", skip={"steps": "all", **skip})


def test_every_key_belongs_to_a_policy_or_to_all():
    """Each form of the section has its own keys, in addition to those that all policies have."""
    shared = {"policy", "steps", "refresh", "residual", "probe_blocks", "layers"}
    assert set(Skip.model_fields) == shared
    found = {policy: form.model_fields.keys() - shared for policy, form in Skip.forms.items()}
    assert found == {policy: set(keys) for policy, keys in POLICY_KEYS.items()}
    assert all(values.keys() <= {*POLICY_KEYS[policy]} for policy, values in VALUES.items())


@pytest.mark.parametrize("policy", VALUES)
def test_keys_of_a_policy_are_taken_and_kept(policy):
    """A preset with all keys of a policy loads, also its printed form; a key that is not read names its owner."""
    preset = wan(policy=policy, probe_blocks=3, **VALUES[policy])
    section = preset.effective()["skip"]
    assert VALUES[policy].items() <= section.items()
    assert load_preset(preset, skip=section).effective() == preset.effective()
    for other in VALUES.keys() - {policy}:
        assert section.keys().isdisjoint({*POLICY_KEYS[other]} - {"projection"})
        key, value = list(VALUES[other].items())[-1]
        with pytest.raises(PresetError, match=f"{key} belongs to policy '{other}', and policy is '{policy}'"):
            load_preset(preset, skip={key: value})


@pytest.mark.parametrize("section, key", [(Schedule, "control"), (Forecast, "level"), (Skip, "policy")])
def test_a_section_called_by_its_name_makes_the_form_that_is_said(section, key):
    """Validation does too; the result is a section that names its form; a missing form is an error."""
    needed = {"adaptive": {"target_error": 0.1}, "interval": {"interval": 5}, "static": {"window": 64}}
    for name, form in section.forms.items():
        values = {key: name, **needed.get(name, {})}
        formed = section(**values)
        assert type(formed) is form and getattr(formed, key) == name
        assert section.model_validate(values) == formed == form.model_validate(values) == form(**needed.get(name, {}))
    with pytest.raises(PresetError, match=f"^{key} must be one of .*, got 'other'$"):
        section(**{key: "other"})
    usual = section.model_fields[key].default
    assert getattr(section(**needed.get(usual, {})), key) == usual


def test_what_a_form_has_no_key_for_reads_as_without_effect():
    """Readers of a preset need not check the form or the policy first; dumps and files do not contain such keys."""
    sla = Skip(policy="sla")
    assert policy_of(sla).options(sla) == {}
    interval, adaptive = Schedule(control="interval", interval=3), Schedule(target_error=0.1)
    assert (interval.target_error, interval.per_prompt) == (None, False)
    assert adaptive.interval is None and "interval" not in adaptive.model_dump()
    layer = Forecast(level="layer")
    assert (layer.corrector, layer.beyond, layer.damping) == (False, 0.0, False)
    preset = Preset(model="wan", schedule=interval, forecast=layer)
    assert load_preset(preset) == preset and load_preset(preset, interval=4).schedule.interval == 4


def test_choosing_a_policy_drops_the_bases_keys_and_no_others():
    """Nor does it keep changes for single blocks, or the lifetime of masks."""
    layers = {"transformer.blocks.0": {"tau_kv": 0.01}}
    base = wan(policy="sparge", tau_kv=0.05, similarity=0.4, refresh=3, residual=True, layers=layers)
    skip = load_preset(base, **{"skip.policy": "fg_attn", "skip.key_threshold": 0.25}).skip
    assert skip.model_fields_set == {"policy", "steps", "key_threshold"}
    with pytest.raises(PresetError, match="similarity belongs to policy 'sparge'"):
        load_preset(base, **{"skip.policy": "fg_attn", "skip.similarity": 0.3})


@pytest.mark.parametrize(
    "first, second", [({"tau_kv": 0.05}, {"top_k": 0.3}), ({"top_k": 0.3}, {"tau_kv": 0.05})], ids=["top_k", "tau_kv"]
)
def test_mass_and_number_of_tiles_stand_for_each_other(first, second):
    """Asking for one over a base with the other means the one; asking for both is an error. So does a pattern."""
    base = wan(policy="sparge", **first)
    assert load_preset(base, skip=second).skip.model_fields_set & {"tau_kv", "top_k"} == second.keys()
    with pytest.raises(PresetError, match="top_k replaces tau_kv"):
        load_preset(base, skip=first | second)
    sliding = load_preset("exact", skip={"policy": "static", "window": 64, "steps": "all"})
    assert load_preset(sliding, **{"skip.pattern": "causal"}).skip.window is None
    assert load_preset(sliding, skip={"layers": {"a": {"pattern": "causal"}}}).skip.at("a").window is None


@pytest.mark.parametrize(
    "skip, complaint",
    [
        ({"steps": "dispatch", "refresh": 2}, "skip: refresh says how long computed steps keep"),
        ({"steps": "dispatch", "probe_blocks": 2}, "skip: probe_blocks measures the error of com"),
        ({"residual": True}, "skip: residual corrects steps that keep their masks, and refresh"),
        ({"probe_error": 0.1}, "skip: probe_error bounds an error that is measured on probe_bl"),
        ({"probe_blocks": -1}, "skip.probe_blocks: .*got -1"),
        ({"policy": "sla", "critical": 0.7, "negligible": 0.4}, "skip: critical . negligible must be at most 1"),
        ({"policy": "static"}, "skip: pattern 'sliding' needs window"),
        ({"policy": "static", "pattern": "causal", "window": 64}, "skip: pattern 'causal' takes no window"),
        ({"top_k": 0.0}, "skip.top_k: .*got 0.0"),
        ({"similarity": 1.5}, "skip.similarity: .*got 1.5"),
        ({"pv_threshold": 0.0}, "skip.pv_threshold: .*got 0.0"),
        ({"refresh": 0}, "skip.refresh: .*got 0"),
        ({"policy": "none"}, "skip: steps 'all' has no effect with policy 'none'"),
        ({"layers": {"b.3": {"policy": "none", "tau_kv": 0.1}}}, r"layers\.b\.3: .*tau_kv belongs .* policy is 'none'"),
        ({"layers": {"b.3": {"critical": 0.1}}}, r"layers\.b\.3: .*critical belongs to policy 'sla'"),
        ({"layers": {"b.3": {"tau_kv": 2.0}}}, r"layers\.b\.3: .*tau_kv: .*got 2.0"),
        ({"layers": {"b.3": {"prob_error": 0.1}}}, r"layers\.b\.3: .*unknown key 'prob_error' .did you mean 'probe_er"),
        ({"layers": {"b.3": {"steps": "dispatch"}}}, r"layers\.b\.3: .*steps is the same for all blocks"),
        ({"layers": {"b.3": {"layers": {}}}}, r"layers\.b\.3: .*layers is the same for all blocks"),
    ],
)
def test_contradictions_are_named(skip, complaint):
    """Refusals of a single block name the block."""
    with pytest.raises(PresetError, match=complaint):
        wan(**{"policy": "sparge"} | skip)


def test_blocks_change_what_they_name():
    """A block takes the section's values but for its own; another policy brings no keys of the first along.

    It may skip alone, and memory of residuals is planned if any block keeps one.
    """
    layers = {
        "a": {"policy": "none"},
        "b": {"tau_kv": 0.01},
        "c": {"policy": "fg_attn", "key_threshold": 0.2},
        "d": {"top_k": 0.4},
    }
    skip = wan(policy="sparge", tau_kv=0.05, similarity=0.4, refresh=3, layers=layers).skip
    assert skip.at("elsewhere") is skip and skip.at("b") is skip.at("b")
    assert (skip.at("a").policy, skip.at("b").tau_kv, skip.at("b").similarity) == ("none", 0.01, 0.4)
    assert skip.at("c").model_fields_set == {"policy", "steps", "refresh", "key_threshold"}
    assert (skip.at("d").top_k, skip.at("d").refresh, skip.at("d").layers) == (0.4, 3, {})
    assert [variant.policy for variant in skip.variants] == ["sparge", "none", "sparge", "fg_attn", "sparge"]
    alone = wan(policy="none", layers={"a": {"policy": "sparge", "tau_kv": 0.1}}).skip
    assert (alone.policy, alone.at("a").policy, alone.at("a").steps) == ("none", "sparge", "all")
    assert skip.skips and alone.skips and not Skip().skips
    for whole, kept in ((False, {}), (True, {}), (False, {"b": {"residual": True}})):
        section = wan(policy="sparge", refresh=4, residual=whole, layers={"a": {"residual": False}, **kept}).skip
        assert section.keeps_residuals == bool(whole or kept)


def test_blocks_of_a_base_merge_and_switch_policy():
    base = wan(policy="sparge", layers={"a": {"tau_kv": 0.1}, "b": {"similarity": 0.3}})
    layers = {"a": {"policy": "fg_attn"}, "c": {"tau_kv": 0.2}}
    changed = load_preset(base, **{"skip.layers": layers})
    assert changed.skip.layers == {"a": {"policy": "fg_attn"}, "b": {"similarity": 0.3}, "c": {"tau_kv": 0.2}}
    assert layers == {"a": {"policy": "fg_attn"}, "c": {"tau_kv": 0.2}}
    assert base.skip.layers["a"] == {"tau_kv": 0.1} and load_preset(changed) == changed


def test_a_probe_serves_all_blocks_that_leave_something_out():
    """Blocks of policy none have no probe, other policies only measure, and a block may have its own target."""
    layers = {"a": {"policy": "none"}, "b": {"probe_error": 0.2}, "c": {"policy": "fg_attn"}}
    skip = wan(policy="sparge", probe_blocks=4, probe_error=0.1, layers=layers).skip
    assert [variant.probe_blocks for variant in map(skip.at, "abcd")] == [0, 4, 4, 4]
    assert [getattr(variant, "probe_error", None) for variant in map(skip.at, "abcd")] == [None, 0.2, None, 0.1]


STATIC = {"policy": "static", "window": 64}


@pytest.mark.parametrize(
    "skip, kernels, complaint",
    [
        (STATIC, {}, "multiplies whole tiles, and skip.policy 'static' has masks inside"),
        ({"policy": "none", "layers": {"a": STATIC}}, {}, "skip.policy 'static' has masks inside"),
        ({"policy": "sparge"}, {"attention": "cuda"}, "runs on triton: set kernels.attention to auto"),
    ],
    ids=["masks", "masks-of-a-block", "backend"],
)
def test_what_8_bits_can_not_be_combined_with_is_refused(skip, kernels, complaint):
    preset = wan(**skip)
    with pytest.raises(PresetError, match=complaint):
        load_preset(preset, kernels={"qk_dtype": "int8", **kernels})


def test_a_projections_path_begins_at_the_presets_folder(tmp_path):
    """In a file the path is relative to its folder; in an override it is the caller's own."""
    file = tmp_path / "mine.yaml"
    file.write_text("base: wan21-sla\nskip: {projection: sla.safetensors}\n", encoding="utf-8")
    assert load_preset(file).skip.projection == str(tmp_path / "sla.safetensors")
    assert load_preset("wan21-sla", **{"skip.projection": "sla.safetensors"}).skip.projection == "sla.safetensors"
