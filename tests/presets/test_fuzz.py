"""Mutated presets load or are refused with the package's own error, whatever was done to them.

The long run: ``FUZZED_PRESETS=100000 pytest tests/presets/test_fuzz.py``.
"""

import os
import random
import time
from copy import deepcopy

import pytest
import yaml

from dit_accel.errors import PresetError
from dit_accel.models.presets import load_preset, preset_schema
from dit_accel.presets import Preset, preset_names, preset_path

COUNT = int(os.environ.get("FUZZED_PRESETS", "200"))
BATCH = 100  # presets a test
SLOWEST = 5.0  # seconds for one preset; most take milliseconds

SCHEMA = preset_schema()
SECTIONS = [*SCHEMA["properties"], "name"]
FIELDS = [field for section in SCHEMA["$defs"].values() for field in section["properties"].items()]
KEYS = sorted({key for key, _ in FIELDS})
WORDS = sorted({word for _, rule in FIELDS for word in (*rule.get("enum", ()), rule.get("const", "none"))}, key=str)
VALUES = [*WORDS, *SECTIONS, 0, 1, -1, 0.5, 2.0, 10**30, float("nan"), None, True, [], {}]
NUMBERS = ["~", "yes", "-1", "0.5", "1e3", ".inf", "-.inf", ".nan", "9" * 400, "9" * 5000, "0b_", "1:99", "2001-99-99"]
STRINGS = ["", "'", '"', "\\0", "\0", "\t", "\ud800", "é", "a" * 300, "a" * 2000, "=", "%", "!!int x", "mine.yaml"]
SHAPES = ["&a", "*a", "{<<: *a}", "[1, [2, {a: b}]]", "[" * 50, "{a: " * 50 + "1" + "}" * 50, "- " * 30, "<<: {a: b}"]


def of_a_document(values, choose):
    """Nested values with one key taken out, renamed, given another value, or nested deeper."""
    places = [values]
    for place in places:
        places += [item for item in place.values() if isinstance(item, dict)]
    place = choose.choice(places)
    key = choose.choice([*place, choose.choice(KEYS)])
    match choose.randrange(6):
        case 0:
            place.pop(key, None)
        case 1:
            place[choose.choice([*KEYS, *SECTIONS, 5, None, True, 0.5])] = place.pop(key, None)
        case 2:
            place[key] = deepcopy(choose.choice(VALUES))
        case 3:
            place[key] = {choose.choice(KEYS): place.get(key)}
        case 4:
            place[key] = deepcopy(choose.choice(places))
        case 5:
            place["layers"] = {choose.choice(["a", "blocks.0", 7]): {key: deepcopy(choose.choice(VALUES))}}
    return values


def of_text(text, choose):
    """One stretch of the file taken out, doubled, or replaced by something odd."""
    start = choose.randrange(len(text) + 1)
    end = min(len(text), start + choose.choice([0, 1, 3, 10, 60]))
    odd = choose.choice([*NUMBERS, *STRINGS, *SHAPES])
    put = choose.choice(["", text[start:end] * 2, odd, f"\n{choose.choice([*KEYS, *SECTIONS])}: {odd}\n"])
    return text[:start] + put + text[end:]


def mutated(seed):
    """A shipped preset with up to six mutations, as text."""
    choose = random.Random(seed)
    text = preset_path(choose.choice(preset_names())).read_text(encoding="utf-8")
    if choose.random() < 0.6:
        values = yaml.safe_load(text)
        for _ in range(choose.randint(1, 4)):
            values = of_a_document(values, choose)
        text = yaml.safe_dump(values, sort_keys=False)
    for _ in range(choose.choice([0, 1, 2]) if choose.random() < 0.7 else 0):
        text = of_text(text, choose)
    return text


@pytest.mark.parametrize("first", range(0, COUNT, BATCH))
def test_a_mutated_preset_loads_or_is_refused(first, tmp_path):
    """Nothing but a PresetError is raised, with a short message and in time; what loads is shown and loads again."""
    file, loaded = tmp_path / "mine.yaml", 0
    for seed in range(first, first + BATCH):
        file.write_bytes(mutated(seed).encode("utf-8", "surrogatepass"))
        started = time.process_time()
        try:
            preset = load_preset(file)
        except PresetError as refusal:
            assert len(str(refusal)) < 20_000, seed
        except Exception as error:
            pytest.fail(f"seed {seed}: {type(error).__name__}: {error}")
        else:
            assert isinstance(preset, Preset)
            file.write_text(yaml.safe_dump(preset.effective()), encoding="utf-8")
            assert load_preset(file).effective() == preset.effective(), seed
            loaded += 1
        assert time.process_time() - started < SLOWEST, seed
    assert 0 < loaded < BATCH
