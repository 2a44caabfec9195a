"""Presets: shipped ones are valid and commented, mistakes are named, and overrides and bases merge as written."""

import json
from pathlib import Path

import pytest
import yaml

from dit_accel.errors import PresetError
from dit_accel.presets import default_preset, load_preset, preset_names, preset_path, preset_schema

every_preset = pytest.mark.parametrize("name", preset_names())
INTERVAL = {"schedule.control": "interval", "schedule.interval": 5}
TILES_ON_ALL_STEPS = {"policy": "sparge", "steps": "all"}


@pytest.fixture
def write(tmp_path):
    """Writes a YAML file into the test's folder and returns its path."""

    def write(text: str, name: str = "mine.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


@every_preset
def test_a_shipped_preset_explains_itself_and_loads_again(name, write):
    """It has one line for the listing, a comment at each key, and the printed form loads as an equivalent preset."""
    preset, lines = load_preset(name), preset_path(name).read_text(encoding="utf-8").splitlines()
    assert preset.name == name
    assert preset.description and "\n" not in preset.description
    assert lines[0].startswith("# ")
    assert [line for line in lines if line.startswith(" ") and "#" not in line] == []
    assert load_preset(write(yaml.safe_dump(preset.effective()))).effective() == preset.effective()


@every_preset
def test_shipped_preset_fits_the_schema(name):
    """The JSON schema that editors check against accepts every shipped file as it is written."""
    schema = preset_schema()

    def fits(value: object, rule: dict) -> bool:
        if "$ref" in rule:
            return fits(value, schema["$defs"][rule["$ref"].rsplit("/", 1)[-1]])
        if "anyOf" in rule:
            return any(fits(value, form) for form in rule["anyOf"])
        if "properties" not in rule:
            return value in rule.get("enum", [rule.get("const", value)])
        assert rule["additionalProperties"] is False and not rule.get("required")  # a base may have the others
        rules = rule["properties"]
        return value.keys() <= rules.keys() and all(fits(item, rules[key]) for key, item in value.items())

    assert fits(yaml.safe_load(preset_path(name).read_text(encoding="utf-8")), schema)
    assert not fits({"skip": {"policy": "sla", "tau_kv": 0.1}}, schema)
    assert fits({"skip": {"tau_kv": 0.1}, "schedule": {"warmup": 2}}, schema)


@pytest.mark.parametrize("media", ["", "video-"], ids=["images", "videos"])
def test_qualities_are_ordered(media):
    """quality, balanced and turbo are one closed loop that differs in its target error only, and serve any model."""
    quality, balanced, turbo = (load_preset(f"{media}{level}") for level in ("quality", "balanced", "turbo"))
    assert quality.model == balanced.model == turbo.model == "any"
    assert quality.schedule.target_error < balanced.schedule.target_error < turbo.schedule.target_error
    same = {"schedule.target_error": 0.05, "description": ""}
    methods = [load_preset(preset, **same).model_dump() for preset in (quality, balanced, turbo)]
    assert methods[0] == methods[1] == methods[2]


def test_presets_keep_their_values():
    """Nothing but description and model differs from the values on file, which are those of the papers."""
    for name, values in json.loads(Path(__file__).with_name("values_by_name.json").read_text()).items():
        effective = load_preset(name).effective()
        for blocks in (sections["blocks"] for sections in (effective, values) if "blocks" in sections):
            blocks.setdefault("token_order", "raster")  # which is not shown, as it orders nothing
        assert {key: effective[key] for key in effective if key not in ("description", "model")} == values, name


UNKNOWN = {  # by name: a near one
    "any-balanced": "balanced",
    "wan21-turbo": "turbo",
    "flux-quality": "quality",
    "any-video-turbo": "video-turbo",
    "hunyuan-flashomni-balanced": "hunyuan-flashomni-paper",
    "flux-flashomny": "flux-flashomni",
    "flux-balnced": "balanced",
}


def test_an_unknown_preset_is_an_error_that_suggests_a_near_one():
    for unknown, near in UNKNOWN.items():
        message = rf"^unknown preset '{unknown}' \(did you mean '{near}'\?\); available: .*exact"
        with pytest.raises(PresetError, match=message):
            load_preset(unknown)


def test_a_plain_name_means_the_video_form_for_videos():
    """A missing name too; other names, files and presets keep their meaning."""
    mine = load_preset("balanced")
    assert [default_preset(name, is_video=False) for name in (None, "turbo")] == ["balanced", "turbo"]
    of_videos = [default_preset(name, is_video=True) for name in (None, "turbo-8bit")]
    assert of_videos == ["video-balanced", "video-turbo-8bit"]
    for same in ("exact", "flux-fora", "video-turbo", Path("balanced"), mine):
        assert default_preset(same, is_video=True) is same


def test_keys_are_plain_keywords():
    """A key that one section has alone needs no section; dotted keys and sections mean the same, and merge."""
    plain = load_preset("turbo", warmup=3, order=1, target_error=0.1, budget_gib=4.0)
    dotted = {"schedule.warmup": 3, "forecast.order": 1, "schedule.target_error": 0.1, "memory.budget_gib": 4.0}
    assert plain == load_preset("turbo", **dotted)
    assert plain == load_preset("turbo", schedule={"warmup": 3}, target_error=0.1, order=1, memory={"budget_gib": 4.0})
    assert (plain.schedule.cooldown, plain.forecast.level) == (load_preset("turbo").schedule.cooldown, "output")
    assert load_preset("wan21-sparge", layers={"a": {"tau_kv": 0.1}}).skip.at("a").tau_kv == 0.1


MISTAKES = {  # by preset: keys over it, and the error
    "flux-flashomni-paper": [
        ({"schedul.interval": 1}, "unknown key .*did you mean 'schedule'.*valid keys here: .*forecast"),
        ({"schedule.intervall": 1}, "unknown key .*did you mean 'interval'.*valid keys here: .*cooldown"),
        ({"reuse.tau": 1}, "unknown key .*did you mean 'tau_q'.*valid keys here: .*degrade_below"),
        ({"reuse.tau_q": 1.5}, r"reuse\.tau_q: .*got 1\.5"),
        ({"reuse.ramp": 0.0}, r"reuse\.ramp: .*got 0\.0"),
        ({"reuse.degrade_below": 2.0}, r"reuse\.degrade_below: .*got 2\.0"),
        ({"skip.tau_kv": float("nan")}, r"skip\.tau_kv: .*got nan"),
        ({"schedule.warmup": -1}, r"schedule\.warmup: .*got -1"),
        ({"schedule.interval": 2.5}, r"schedule\.interval: .*got 2\.5"),
        ({"forecast.order": 5}, r"forecast\.order: .*got 5"),
        ({"forecast.level": "block"}, r"forecast\.level: .*got 'block'"),
        ({"blocks.size": 96}, r"blocks\.size: .*got 96"),
        ({"linear.dtype": "int8"}, "level 'head' multiplies parts of them"),
        ({"kernels.attention": "cudnn"}, r"kernels\.attention: .*got 'cudnn'"),
        ({"kernels.graphs": "auto"}, r"kernels\.graphs has no effect"),
        ({"memory.offload": True, "forecast.order": 0}, "offload has no effect.*order 0"),
        ({"memory.budget_gib": 0.0}, "memory.budget_gib: .*greater than 0"),
        ({"memory.history_dtype": "fp8"}, "memory.history_dtype: .*'float8'"),
        ({"memory.budget": 4}, "unknown key 'memory.budget'.*did you mean 'budget_gib'"),
        ({"reuse.tau_q": 2, "reuse.ram": 1}, r"reuse\.tau_q: .*reuse\.ram'|reuse\.ram'.*reuse\.tau_q: "),
    ],
    "balanced": [
        ({"target_eror": 0.1}, r"^unknown keyword 'target_eror' \(did you mean 'target_error'\?\); valid are descript"),
        ({"shedule": {"warmup": 2}}, r"^unknown keyword 'shedule' \(did you mean 'schedule'\?\)"),
        ({"zzz": 1, "warmupp": 2}, "^unknown keyword 'zzz'; valid .*unknown keyword 'warmupp' .did you mean 'warmup'"),
        (
            {"policy": "sparge"},
            "^keyword 'policy' may mean reuse.policy or skip.policy: write e.g. skip={'policy': …}$",
        ),
        ({"order": 9}, r"forecast.order: .* got 9"),
        ({"interval": 5}, "interval belongs to control 'interval', and control is 'adaptive'"),
        ({**INTERVAL, "schedule.target_error": 0.1}, "target_error belongs to control 'adaptive'"),
        ({"schedule.target_error": 0.1, **INTERVAL}, "target_error belongs to control 'adaptive'"),
        ({"base": "exact"}, "unknown keyword 'base'"),
        ({"name": "other"}, "unknown key 'name'"),
        ({"max_interval": 0}, r"schedule\.max_interval: .*got 0$"),
        ({"control": "never"}, r"schedule\.control: Input should be 'adaptive' or 'interval', got 'never'$"),
        ({"schedule": 5}, r"schedule: must be a mapping of keys, got 5$"),
        *(({"target_error": value}, rf"schedule\.target_error: .*got {value}") for value in (0, float("inf"))),
        ({"schedule.control": "interval"}, "schedule: control 'interval' needs interval"),
        ({"forecast.method": "reuse"}, "forecast: method 'reuse' .*set order to 0"),
        ({"reuse.tau_q": 0.5}, "section 'reuse' has no effect at level 'output'"),
        ({"model": "flux", "forecast.level": "layer", "skip.policy": "sparge"}, "section 'skip' .* level 'layer'"),
        ({"model": "flux", "skip.policy": "sparge"}, "section 'skip' .* level 'output'.* or skip.steps to all"),
        ({"model": "flux", "skip.steps": "all"}, "skip: steps 'all' has no effect with policy 'none'"),
        (
            {"model": "wan", "skip": TILES_ON_ALL_STEPS, "reuse.tau_q": 0.5},
            "section 'reuse' has no effect at level 'output', .* set forecast.level to head$",
        ),
        ({"kernels.gemm": "auto"}, "kernels.gemm has no effect at level 'output': remove it, or set forecast.level"),
        ({"linear.exclude": ["*"]}, "linear.exclude has no effect without a dtype"),
        ({"linear.weights": "host"}, "linear.weights has no effect without a dtype: remove it, or set linear.dtype"),
        ({"prompts": False, "prompts_mib": 512.0}, "stages.prompts_mib has no effect without prompts: remove it, or"),
        ({"decode": False, "share": True}, "stages.share has no effect without decode: remove it, or set stages.dec"),
        ({"schedule.control": ["adaptive"]}, "schedule.control: "),
        ({"schedule": None}, "schedule: "),
        ({"memory.history_dtype": "float8"}, "memory.history_dtype has no effect.*'output'"),
        ({"memory.offload": True}, "memory.offload has no effect.*level 'head' only"),
        ({"target_psnr": 50}, r"target_psnr must be at most 34\.2 dB.*got 50: calibrate .* tune --target-psnr 50"),
        ({"target_psnr": 30, "target_error": 0.1}, "give one of them, not both"),
        ({"target_psnr": 0}, "schedule.target_psnr: Input should be greater than 0"),
        ({"target_psnr": 30, "calibration": []}, "must be null, as the preset has no calibration, got 30"),
        ({"target_psnr": 30, "order": 1}, "must be null, as the preset has no calibration"),
        ({"calibration": [[0.1]]}, "schedule.calibration.0"),
        ({"calibration": [[float("inf"), 30]]}, r"schedule.calibration.0.0: .* finite"),
        ({"control": "interval", "interval": 3, "target_psnr": 30}, "target_psnr belongs to control 'adaptive'"),
        ({"computed_steps": 5, "target_error": 0.1}, "target_error and computed_steps both choose"),
        ({"target_error": 0.1, "max_seconds": 1.0}, "target_error and max_seconds both choose"),
        ({"computed_steps": 5, "target_psnr": 20.0, "max_seconds": 1.0}, "target_psnr and computed_steps both choose"),
        ({"computed_steps": 0}, "computed_steps"),
        ({"max_seconds": 0.0}, "max_seconds"),
        ({"max_seconds": 1.0, "per_prompt": True}, "remove per_prompt"),
        ({"per_prompt": True, "forecast.level": "layer"}, "per_prompt needs .*'layer'"),
    ],
    "flux-taylorseer": [
        ({"memory.offload": True}, "memory.offload has no effect.*level 'head' only"),
        ({"per_prompt": True}, "per_prompt belongs to control 'adaptive'"),
        ({"corrector": True}, "corrector belongs to level 'output', and level is 'layer'"),
        ({"damping": True}, "damping belongs to level 'output', and level is 'layer'"),
        ({"beyond": 0.5}, "beyond belongs to level 'output', and level is 'layer'"),
    ],
    "exact": [({"damping": True}, "damping has no effect with control 'interval', which measures no error")],
    "wan21-sparge-balanced": [({"per_prompt": True, "refresh": 2}, "set skip.refresh to 1")],
}


@pytest.mark.parametrize(
    "name, overrides, complaint",
    [(name, *row) for name, rows in MISTAKES.items() for row in rows],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_an_override_that_means_nothing_is_an_error_with_its_remedy(name, overrides, complaint):
    """Misspelt, ambiguous, out of range, of another control, or without effect: one error lists all.

    An unknown key comes with the nearest valid one, a bad value with its dotted key. A target error may pass 1.
    """
    assert load_preset("balanced", target_error=2.0).schedule.target_error == 2.0
    with pytest.raises(PresetError, match=complaint):
        load_preset(name, **overrides)


def test_overrides_leave_their_arguments_alone():
    """Neither the preset nor the dictionaries that a caller passes in are changed; unset keys stay unset."""
    preset, section = load_preset("exact"), {"order": 0}
    assert load_preset(preset, **{"forecast": section, "forecast.order": 2}).forecast.order == 2
    assert section == {"order": 0} and preset == load_preset("exact") == load_preset(preset)
    assert load_preset(preset).model_fields_set == preset.model_fields_set


@pytest.mark.parametrize("level", ["output", "layer"])
def test_nothing_to_skip_may_be_said_where_nothing_skips(level):
    """Like ``memory.offload: false``: the value is the default and asks for nothing."""
    said = load_preset("balanced", skip={"policy": "none", "refresh": 1}, **{"model": "flux", "forecast.level": level})
    assert said.effective() == load_preset("balanced", **{"model": "flux", "forecast.level": level}).effective()
    assert not said.works_inside or level == "layer"


def test_base_chain_merges_nearest_last(write):
    """A preset takes its base's values, its base's base's, and its own before both.

    A file that chooses the other control drops its base's key of the first.
    """
    write("base: balanced\nschedule: {warmup: 7, max_interval: 9}\n", "middle.yaml")
    preset = load_preset(write("base: middle.yaml\nschedule: {warmup: 8}\n"))
    assert preset.name == "mine" and (preset.schedule.warmup, preset.schedule.max_interval) == (8, 9)
    assert preset.forecast == load_preset("balanced").forecast
    preset = load_preset(write("base: middle.yaml\nschedule: {control: interval, interval: 4}\n"))
    assert (preset.schedule.interval, preset.schedule.target_error) == (4, None)


UNUSABLE = {  # by content of a file
    "base: nowhere.yaml\n": r"nowhere\.yaml does not exist",
    "base: any-balnced\n": "did you mean 'balanced'.*available: balanced",
    "base: 5\n": "unknown preset '5'",
    "base: mine.yaml\n": r"mine\.yaml -> mine\.yaml",
    "base: other.yaml\n": r"mine\.yaml -> other\.yaml -> mine\.yaml",
    "- schedule\n": "must hold a mapping of sections, got list",
    "": "must hold a mapping of sections, got NoneType",
    "description: nothing else\n": "schedule is required",
    "base: exact\nname: other\n": "unknown key 'name'",
    "5: 6\n": "5",
}


def test_unusable_file_is_refused(write):
    """The error says why a file can't be read as a preset; presets that start from each other are a cycle."""
    write("base: mine.yaml\n", "other.yaml")
    for text, complaint in UNUSABLE.items():
        with pytest.raises(PresetError, match=complaint):
            load_preset(write(text))


@pytest.mark.parametrize(
    ("preset", "complaint"),
    [
        ("latin.yaml", r"latin\.yaml can't be read: 'utf-8' codec"),
        (Path("missing"), "missing does not exist"),
        (Path(), "can't be read"),
        (5, "must be a name, a path or a Preset, got int"),
    ],
    ids=str,
)
def test_what_is_no_preset_is_refused(preset, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("latin.yaml").write_bytes(b"description: caf\xe9\n")
    with pytest.raises(PresetError, match=complaint):
        load_preset(preset)


@pytest.mark.parametrize(
    "changes, kept",
    [
        ({"model": "wan", "forecast.level": "layer"}, set()),
        ({"schedule.control": "interval", "schedule.interval": 4}, {"corrector"}),
        ({}, {"corrector", "beyond", "damping"}),
    ],
    ids=["layer", "interval", "as-it-is"],
)
def test_choosing_a_level_or_a_control_drops_what_the_base_said_for_others(changes, kept, tmp_path):
    """The base extrapolates, damps, corrects and decides per prompt; unused values are not shown."""
    base = {"base": "video-balanced", "schedule": {"per_prompt": True}, "forecast": {"beyond": 0.5}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base), encoding="utf-8")
    values = load_preset(tmp_path / "base.yaml", **changes).effective()
    assert {"corrector", "beyond", "damping"} & set(values["forecast"]) == kept
    assert values["schedule"].get("per_prompt", False) == (not changes)
