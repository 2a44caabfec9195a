"""Run of diffusers' own tests, on a checkout of one file, and its report."""

import json
import os

import pytest

from dit_accel.errors import UnsupportedError
from scripts.checks import conformance, conformance_plugin, stand_ins
from scripts.checks.conformance import class_of, compared
from tests.tiny import tiny_pipeline

TESTS = """
import pytest
import torch
from tests.tiny import tiny_output, tiny_pipeline

@pytest.fixture(scope="module")
def outputs():
    pipe = tiny_pipeline("ltx")
    return [pipe, *(tiny_output(pipe, "ltx", steps=2) for _ in range(2))]

def test_runs_are_alike(outputs):
    assert torch.equal(*outputs[1:])

def test_modules_are_bare(outputs):
    assert not outputs[0].transformer._diffusers_hook.hooks

def test_never_passes():
    assert False
"""


@pytest.fixture
def checkout(tmp_path):
    """A folder like diffusers' own."""
    folder = tmp_path / "checkout" / "tests" / "pipelines" / "toy"
    folder.mkdir(parents=True)
    (folder / "test_toy_pipeline.py").write_text(TESTS)
    return tmp_path / "checkout"


def test_tests_that_fail_only_when_accelerated_are_told(checkout, tmp_path):
    """One passes, one looks for hooks, and one fails plainly too."""
    conformance.main([str(checkout), "--output", str(tmp_path / "found"), "--kinds", "exact"])
    found = json.loads((tmp_path / "found.json").read_text())["families"]["toy"]
    only = found.pop("only")
    assert found == {"ran": 3, "passed": 2, "exact": 1}
    assert [(item["test"].split("::")[1], item["kind"], item["class"]) for item in only] == [
        ("test_modules_are_bare", "exact", "failure")
    ]
    table = (tmp_path / "found.md").read_text()
    assert "| toy | 3 | 2 | 1 |" in table and "test_modules_are_bare` | exact | failure |" in table


def test_a_kind_without_a_preset_is_refused():
    with pytest.raises(UnsupportedError, match="no FlashOmni preset fits"):
        conformance_plugin.preset_of(tiny_pipeline("ltx"), "flashomni")


def test_a_process_that_ends_early_loses_its_tests():
    (lost,) = compared({"a": ("passed", ""), "b": ("skipped", "")}, {"exact": {}})["only"]
    assert (lost["class"], lost["reason"]) == ("failure", "the process ended without a result")


def test_families_must_be_there(checkout, tmp_path):
    with pytest.raises(SystemExit, match="--families names other, and the checkout has toy"):
        conformance.main([str(checkout), "--output", str(tmp_path / "found"), "--families", "other"])
    with pytest.raises(SystemExit, match="checkout must hold tests/pipelines"):
        conformance.main([str(tmp_path), "--output", str(tmp_path / "found")])


@pytest.mark.parametrize(
    "error, classes",
    [
        ("dit_accel.errors.UnsupportedError: compiled whole", ("refused", "refused")),
        ("TypeError: no", ("failure", "failure")),
        ("AssertionError: Tensors not close!", ("failure", "values")),
    ],
    ids=["refused", "crash", "values"],
)
def test_what_a_test_failed_by(error, classes):
    """Numbers may differ under a kind that changes outputs, and under exact they may not."""
    assert tuple(class_of(error, kind) for kind in ("exact", "forecast")) == classes


def test_stand_ins_are_loaded_by_their_names_on_the_hub(tmp_path, monkeypatch):
    """The working directory has them, as for tests that run there."""
    from transformers import AutoConfig, AutoTokenizer, LlamaTokenizer

    stand_ins.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert AutoConfig.from_pretrained("hf-internal-testing/tiny-random-t5").d_model == 32
    for name in ("tiny-random-clip", "tiny-random-t5", "dummy-gemma", "tiny-random-Qwen2VLForConditionalGeneration"):
        assert AutoTokenizer.from_pretrained(f"hf-internal-testing/{name}")("a fox")["input_ids"]
    assert LlamaTokenizer.from_pretrained("finetrainers/dummy-hunyaunvideo", subfolder="tokenizer")("a fox")
    assert not os.path.exists("tiny-random-t5")
