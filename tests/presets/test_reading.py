"""YAML from any source: odd, endless or huge input is refused at once in one short line."""

import os
import time
from itertools import pairwise
from pathlib import Path

import pytest

from dit_accel.errors import PresetError
from dit_accel.presets import load_preset
from dit_accel.presets.reading import read_yaml

NAMES = "abcdefghijkl"
LAUGHS = "a: &a [x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}]\n" for a, b in pairwise(NAMES)
)
MERGES = "a: &a {x: 1}\n" + "".join(f"{b}: &{b} {{<<: [*{a}, *{a}, *{a}, *{a}], {b}: 2}}\n" for a, b in pairwise(NAMES))

REFUSED = {
    "billion-laughs": (LAUGHS, "more than 5,000 values, aliases written out"),
    "billion-merges": (MERGES, "more than 5,000 values, aliases written out"),
    "deep-mappings": ("{a: " * 3000, "more than 20 nested levels"),
    "deep-aliases": ("a: &a [[[[[[[[[[1]]]]]]]]]]\nb: [[[[[[[[[[*a]]]]]]]]]]", "more than 20 nested levels, aliases"),
    "long-integer": ("a: " + "9" * 5000, "a value has 5,000 characters, of 1,000 at most"),
    "digitless-integer": ("a: 0b_", "invalid literal for int()"),
    "tag": ("a: !!python/object:os.system x", "could not determine a constructor for the tag"),
    "tagged-date": ("a: !!timestamp 2001-99-99", "month must be in 1..12"),
    "tagged-set": ("a: &a !!omap [b: 1]\nc: !!omap [d: *a]", "tags are not allowed, got a tuple"),
    "merge-of-a-value": ("a: {<<: 5}", "<< must name mappings, got int"),
    "alias-of-itself": ("a: &a [*a]", "more than 20 nested levels, aliases written out"),
    "merge-of-itself": ("a: &a {<<: *a}", "more than 20 nested levels, aliases written out"),
    "key-twice": ("a: 1\nb: {c: 1, 'c': 2}", "key 'c' occurs twice in one mapping, line 2"),
    "merge-twice": ("a: &a {b: 1}\nc: {<<: *a, <<: *a}", "key '<<' occurs twice"),
    "nul": ("a: \0", "special characters are not allowed"),
    "list-as-key": ("{[1]: 2}", "unhashable key"),
    "long-unknown-alias": (f"a: *{'x' * 5000}", "found undefined alias"),
}


@pytest.mark.parametrize(("text", "complaint"), REFUSED.values(), ids=REFUSED)
def test_what_is_odd_is_refused_in_one_short_line(text, complaint):
    """At once, whatever aliases and merges would grow to."""
    started = time.process_time()
    with pytest.raises(PresetError) as caught:
        read_yaml(text)
    message = str(caught.value)
    assert message.startswith("not valid YAML: ") and complaint in message
    assert len(message) < 300 and message.isprintable()
    assert time.process_time() - started < 5  # generous: most take milliseconds


def test_aliases_and_merges_within_bounds_are_copies():
    """Copies change in one place alone, a key overrides a merged one, and even an impossible date is a string."""
    assert read_yaml("[2001-01-01, 2001-99-99]") == ["2001-01-01", "2001-99-99"]
    values = read_yaml("a: &a {x: [1]}\nb: *a\nc: {<<: *a, y: 2}\nd: {<<: *a, x: 3}\n")
    assert values == {"a": {"x": [1]}, "b": {"x": [1]}, "c": {"x": [1], "y": 2}, "d": {"x": 3}}
    values["a"]["x"].append(2)
    assert values["b"] == {"x": [1]} == {"x": values["c"]["x"]}


def link_to_itself(folder):
    os.symlink("mine.yaml", folder / "mine.yaml")
    return folder / "mine.yaml"


def chain(folder):
    for index in range(40):
        (folder / f"{index}.yaml").write_text(f"base: {index + 1}.yaml\n")
    return folder / "0.yaml"


def written(text):
    def write(folder):
        (folder / "mine.yaml").write_text(text)
        return folder / "mine.yaml"

    return write


UNUSABLE = {
    "symlink-loop": (link_to_itself, r"mine\.yaml can't be read: Too many levels of symbolic links"),
    "nul-in-name": (lambda _: "a\0b.yaml", r"preset file a\\x00b\.yaml can't be read: embedded null byte"),
    "long-name": (lambda _: "a" * 5000 + ".yaml", r"a… \(5,005 characters\) can't be read: File name too long"),
    "long-preset-name": (lambda _: "a" * 5000, r"unknown preset 'a+… \(5,002 characters\); available: balanced"),
    "path-as-name": (lambda _: "../configs/balanced", r"unknown preset '\.\./configs/balanced'"),
    "endless-file": (lambda _: Path("/dev/zero"), r"/dev/zero can't be read: it has more than 65,536 bytes"),
    "chain-of-bases": (chain, r"20\.yaml ends a chain of 20 bases: name an earlier preset of the chain as"),
    "base-with-nul": (written('base: "a\\0.yaml"\n'), r"a\\x00\.yaml can't be read: embedded null byte"),
    "many-mistakes": (written("".join(f"k{i}: 1\n" for i in range(2000))), r"unknown key 'k6'.*; and 1,99\d more$"),
    "long-value": (written(f"schedule: {{warmup: [{'1, ' * 1000}]}}\n"), r"got \[1, .*… \(3,000 characters\)"),
    "long-key": (written(f"{'k' * 500}: 1\n"), r"unknown key 'k+… \(500 characters\)'"),
    "long-block": (
        written(f"base: wan21-sparge\nskip: {{layers: {{{'b' * 500}: {{policy: [{'x, ' * 1000}]}}}}}}\n"),
        r"layers\.b+… \(500 characters\): policy must be one of .*, got \"\['x', .*characters\)$",
    ),
}


@pytest.mark.parametrize(("make", "complaint"), UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_file_is_named_shortly(make, complaint, tmp_path):
    """Names, keys and values that came are shortened in the message."""
    with pytest.raises(PresetError, match=complaint) as caught:
        load_preset(make(tmp_path))
    assert len(str(caught.value)) < 1500 and str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ({"order": 10**5000}, r"forecast\.order: .*, got a value too long to show \(int\)$"),
        ({"warmup": 10**30}, r"schedule\.warmup: Input should be less than or equal to 10000, got 10+$"),
        ({"." * 5000: 1}, r"has 5,000 dots: write section\.key=value$"),
        ({"x" * 5000: 1}, r"unknown keyword 'x+… \(5,002 characters\); valid are"),
    ],
    ids=["long-integer", "huge-integer", "dots", "long-keyword"],
)
def test_an_odd_override_is_named_shortly(overrides, complaint):
    """Long keys and values of callers' overrides are shortened in the message."""
    with pytest.raises(PresetError, match=complaint):
        load_preset("balanced", **overrides)
