"""Run of other projects' tests, on a checkout of one file, and its report."""

import json
import os
import subprocess
from contextlib import nullcontext
from types import SimpleNamespace

import diffusers
import pytest

from dit_accel.errors import UnsupportedError
from scripts.checks import conformance
from scripts.checks.conformance_study import stand_ins
from scripts.checks.conformance_study.kinds import found
from scripts.checks.conformance_study.report import markdown, read, summary

RUN = {"diffusers": "1", "torch": "2", "device": "CPU"}
TESTS = """
import pytest
import torch
from diffusers import LTXPipeline
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


AUTOENCODERS = """
import pytest
import torch
from diffusers import AutoencoderKL

@pytest.mark.parametrize("grad", [False, True])
def test_decode(grad):
    made = AutoencoderKL(norm_num_groups=8, block_out_channels=(8,))
    with torch.set_grad_enabled(grad):
        assert made.decode(torch.randn(1, 4, 4, 4)).sample.requires_grad is grad

def test_methods_are_its_own():
    assert "forward" not in vars(AutoencoderKL().decoder)
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder like diffusers' own, whose tests run in this process."""
    folder = tmp_path / "checkout" / "tests"
    (folder / "pipelines" / "toy").mkdir(parents=True)
    (folder / "pipelines" / "toy" / "test_toy_pipeline.py").write_text(TESTS)
    (folder / "models" / "autoencoders").mkdir(parents=True)
    (folder / "models" / "autoencoders" / "test_toy_autoencoder.py").write_text(AUTOENCODERS)

    def run(command, cwd, **_):
        monkeypatch.chdir(cwd)
        quick = ("-p", "no:unraisableexception")  # which collects garbage five times, a second each
        return subprocess.CompletedProcess(command, pytest.main([*command[3:], *quick]), stdout="", stderr="")

    monkeypatch.setattr(conformance.subprocess, "run", run)
    monkeypatch.setattr(conformance, "ThreadPoolExecutor", lambda jobs: nullcontext(SimpleNamespace(map=map)))
    monkeypatch.setattr(conformance.stand_ins, "write", lambda folder: None)
    monkeypatch.setattr(conformance, "describe_run", lambda device: RUN)
    return tmp_path / "checkout"


def test_tests_that_fail_only_when_accelerated_are_told(checkout, tmp_path):
    """One passes, one looks for hooks, and one fails plainly too; the pipeline's class is left as it was."""
    call = diffusers.LTXPipeline.__call__
    options = conformance.parse([str(checkout), "--output", str(tmp_path / "found")])
    toy = conformance.families_of(checkout, ["exact"])
    assert toy == {"toy": "tests/pipelines/toy"}
    plain, *kinds = (conformance.tests_of(toy, kind, options, tmp_path) for kind in ("plain", "exact", "flashomni"))
    told = summary(plain, dict(zip(("exact", "flashomni"), kinds, strict=True)))
    (counts,) = told["files"].values()
    assert counts == {"ran": 3, "passed": 2, "exact": 1, "flashomni": 2}
    assert [(each["kind"], each["class"]) for each in told["only"]] == [("exact", "inspects")]
    assert told["accelerated"]["exact"]["left_plain"] == {}
    assert list(told["accelerated"]["flashomni"]["left_plain"]) == ["LTXPipeline"]
    assert told["idle"] is None
    table = markdown({"run": RUN, "tests": "1", "families": {"toy": told}})
    assert "| toy/test_toy_pipeline.py | 3 | 2 | 1 | 2 |" in table
    assert "| `test_toy_pipeline.py::test_modules_are_bare` | exact | inspects |" in table
    assert diffusers.LTXPipeline.__call__ is call


SILENT = {  # families that say nothing: their only test file, and the reason
    "skipped": (
        "import pytest\n@pytest.mark.skip('needs a GPU')\ndef test_it(): pass",
        "no test of a pipeline passes plainly: Skipped: needs a GPU",
    ),
    "broken": (
        "import some_package",
        "no test of a pipeline passes plainly: ModuleNotFoundError: No module named 'some_package'",
    ),
    "empty": ("", "no test was collected"),
    "unet": (
        "from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel\n"
        "SIZE = {'block_out_channels': (32,), 'down_block_types': ['DownBlock2D'], 'up_block_types': ['UpBlock2D']}\n"
        "def test_it(): DDPMPipeline(UNet2DModel(8, **SIZE), DDPMScheduler())(num_inference_steps=1)",
        "pipelines that denoise with a UNet are not supported",
    ),
}


def test_families_that_say_nothing_are_told_with_the_reason(checkout, tmp_path, capsys):
    """In the JSON, in the table and on the console; and so is one that the command leaves out."""
    for family, (text, _) in SILENT.items():
        (checkout / "tests" / "pipelines" / family).mkdir()
        (checkout / "tests" / "pipelines" / family / f"test_{family}.py").write_text(text)
    options = ("--families", *SILENT, "--kinds", "exact")
    conformance.main([str(checkout), "--output", str(tmp_path / "found"), *options])
    console, table = capsys.readouterr().out, (tmp_path / "found.md").read_text()
    document = json.loads((tmp_path / "found.json").read_text())
    assert document["not_run"] == ["toy"] and "| toy | not run |" in table and "\ntoy: not run\n" in console
    for family, (_, why) in SILENT.items():
        idle = document["families"][family]["idle"]
        assert why in idle and f"| {family} | {idle} |" in table and f"\n{family}: {idle}\n" in console


def test_decoders_are_fused_in_tests_of_autoencoders(checkout, tmp_path):
    """A test decodes fused without gradients and plainly with them, and one looks for the decoder's own method."""
    families = conformance.families_of(checkout, ["autoencoders"])
    assert families == {"AutoencoderKL": "tests/models/autoencoders/test_toy_autoencoder.py"}
    init = diffusers.AutoencoderKL.__init__
    options = conformance.parse([str(checkout), "--output", str(tmp_path / "found")])
    plain, fused = (conformance.tests_of(families, kind, options, tmp_path) for kind in ("plain", "autoencoders"))
    told = summary(plain, {"autoencoders": fused})
    assert list(told["files"].values()) == [{"ran": 3, "passed": 3, "autoencoders": 2}]
    assert [each["class"] for each in told["only"]] == ["assertion"]
    assert told["accelerated"]["autoencoders"]["tests"] == 1
    assert "gradients are on" in told["accelerated"]["autoencoders"]["left_plain"]["AutoencoderKL"]
    assert diffusers.AutoencoderKL.__init__ is init


def test_families_must_be_there(checkout, tmp_path):
    with pytest.raises(SystemExit, match="--families names other, and the checkout has toy"):
        conformance.main([str(checkout), "--output", str(tmp_path / "found"), "--families", "other"])
    with pytest.raises(SystemExit, match="checkout must hold tests/pipelines"):
        conformance.main([str(tmp_path), "--output", str(tmp_path / "found")])
    with pytest.raises(SystemExit, match="must be the only one"):
        conformance.main([str(checkout), "--output", str(tmp_path / "found"), "--kinds", "autoencoders", "exact"])


@pytest.mark.parametrize(
    "error, statement, classes",
    [
        (UnsupportedError("compiled whole"), "pipe(**inputs)", ("refused", "refused")),
        (TypeError("no"), "pipe(**inputs)", ("crash", "crash")),
        (AssertionError("assert (1, 2) == (1, 3)"), "assert image.shape == (1, 3)", ("shape", "shape")),
        (AssertionError("No hook attached: x"), "assert not found, message", ("inspects", "inspects")),
        (AssertionError("Tensors not close!"), "raise AssertionError(", ("assertion", "values")),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_what_a_test_failed_by(error, statement, classes):
    """Numbers may differ under a kind that changes outputs, and under exact they may not."""
    assert tuple(found(error, statement, kind) for kind in ("exact", "forecast")) == classes


def test_a_process_that_ends_early_loses_its_tests(tmp_path):
    record = tmp_path / "found.jsonl"
    record.write_text('{"collected": ["a::b", "a::c"]}\n{"test": "a::b", "outcome": "passed", "pipelines": {}}\n')
    assert [test.get("class") for test in read(record).values()] == [None, "lost"]
    assert read(tmp_path / "none.jsonl") == {}


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
