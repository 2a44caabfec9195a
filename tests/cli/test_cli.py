"""The command line end to end, on tiny pipelines saved to disk: files, numbers, messages and exit codes."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from dit_accel.cli.presets import span
from dit_accel.presets import load_preset, measured, preset_names
from dit_accel.tools.measure.metrics import psnr, ssim
from tests.rounding import equal_up_to_rounding
from tests.tiny import tiny_pipeline

SMALL = ("--steps", "10", "--height", "64", "--width", "64")
ONCE = ("--compare", "--repeats", "1")
FORECASTS = ("--set", "schedule.target_error=0.9")  # random weights forecast badly; this lets them


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of saved tiny pipelines, by name."""
    root = tmp_path_factory.mktemp("models")
    for name in ("flux", "flux-schnell", "sd3"):
        tiny_pipeline(name).save_pretrained(root / name)
    return root


def test_compare_writes_pictures_and_agreeing_numbers(run, models, tmp_path):
    """The JSON's metrics are those of the written files, its times give the speed-up, and some steps were forecast."""
    result = run(
        *("generate", "-p", "a fox", "-m", models / "flux", *SMALL, *FORECASTS, "--compare"),
        *("--output", "fox.png", "--json", "fox.json", "--plot", "fox-run.png"),
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-2:] == ["wrote fox-run.png", "wrote fox.json"]
    names = {"fox.png", "fox-plain.png", "fox-compare.png", "fox.json", "fox-run.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    facts = json.loads((tmp_path / "fox.json").read_text())
    plain, fast = (Image.open(tmp_path / name) for name in ("fox-plain.png", "fox.png"))
    assert fast.size == (64, 64)
    assert facts["psnr_db"] == pytest.approx(psnr(plain, fast)) and facts["identical"] is False
    assert facts["ssim"] == pytest.approx(ssim(plain, fast))
    plain_each, fast_each = facts["plain_seconds_each"], facts["accelerated_seconds_each"]
    ratios = sorted(plain / fast for plain, fast in zip(plain_each, fast_each, strict=True))
    assert len(ratios) == 3 and facts["speedup"] == ratios[1] and facts["speedup_spread"] == [ratios[0], ratios[2]]
    assert facts["plain_seconds"] == sorted(plain_each)[1] and facts["accelerated_seconds"] == sorted(fast_each)[1]
    assert 0 < fast_each[0] < facts["accelerated_call_seconds"]
    for side in ("plain", "accelerated"):  # seconds of the first run by stage
        stages = facts[f"{side}_stages"]
        assert list(stages) == ["text encoding", "denoising", "decoding", "other"] and min(stages.values()) > 0
        assert sum(stages.values()) == pytest.approx(facts[f"{side}_call_seconds"])
        assert stages["denoising"] == facts[f"{side}_seconds_each"][0]
    assert re.search(r"whole call +\d.*\n(.*\n)+decoded by the autoencoder's own decoder", result.stdout)
    assert facts["report"]["steps_by_mode"]["dispatch"] > 0
    assert facts["computed_fraction"] == facts["report"]["computed_fraction"] < 1
    assert "speed-up" in result.stdout and "balanced" in result.stdout


def test_plain_run_equals_the_pipeline_called_from_python(run, models, tmp_path):
    """`--preset none` with a seed equals the user's own call with a CPU generator of that seed."""
    from diffusers import DiffusionPipeline

    assert run("generate", "-p", "a fox", "-m", models / "flux", *SMALL, "--seed", 7, "--preset", "none").exit_code == 0
    pipe = DiffusionPipeline.from_pretrained(models / "flux")
    generator = torch.Generator("cpu").manual_seed(7)
    expected = pipe("a fox", num_inference_steps=10, height=64, width=64, generator=generator).images[0]
    assert equal_up_to_rounding(np.asarray(Image.open(tmp_path / "output.png")), np.asarray(expected))


def test_several_images_are_numbered(run, models, tmp_path):
    """--num-images 2 writes NAME-0 and NAME-1, which differ, and compares each."""
    result = run("generate", "-p", "a", "-m", models / "flux", *SMALL, "--num-images", 2, *ONCE, "-o", "n.png")
    assert result.exit_code == 0, result.output
    expected = {f"n-{index}{suffix}.png" for index in (0, 1) for suffix in ("", "-plain", "-compare")}
    assert {path.name for path in tmp_path.iterdir()} == expected
    first, second = (np.asarray(Image.open(tmp_path / f"n-{index}.png")) for index in (0, 1))
    assert (first != second).any()


def test_quiet_prints_nothing(run, models):
    """--quiet leaves both streams empty."""
    result = run("generate", "-p", "a", "-m", models / "flux", *SMALL, "--quiet")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_negative_prompt_guides_flux_by_a_second_branch(run, models, tmp_path):
    """With --negative-prompt, --guidance is true_cfg_scale: a second branch runs, and the image changes."""
    common = ("generate", "-p", "a fox", "-m", models / "flux-schnell", *SMALL, "--preset", "exact")
    assert run(*common, "-o", "one.png").exit_code == 0
    assert run(*common, "--negative-prompt", "blue", "--guidance", 4, "-o", "two.png").exit_code == 0
    one, two = (np.asarray(Image.open(tmp_path / name)) for name in ("one.png", "two.png"))
    assert (one != two).any()


def test_call_passes_any_argument_of_the_pipeline(run, models, tmp_path):
    """--call passes arguments without an option to the pipeline's call, as YAML, and the JSON lists them."""
    from diffusers import DiffusionPipeline

    common = ("generate", "-p", "a fox", "-m", models / "flux", *SMALL, "--preset", "none", "--json", "o.json")
    assert run(*common, "--call", "sigmas=[1.0, 0.75, 0.25]", "--call", "max_sequence_length=8").exit_code == 0
    pipe = DiffusionPipeline.from_pretrained(models / "flux")
    call = {"num_inference_steps": 10, "height": 64, "width": 64, "max_sequence_length": 8}
    expected = pipe("a fox", sigmas=[1.0, 0.75, 0.25], generator=torch.Generator().manual_seed(0), **call).images[0]
    assert equal_up_to_rounding(np.asarray(Image.open(tmp_path / "output.png")), np.asarray(expected))
    given = {"sigmas": [1.0, 0.75, 0.25], "max_sequence_length": 8}
    assert json.loads((tmp_path / "o.json").read_text())["call"] == given


CALLS = {  # mistakes in --call
    "max_sequence_lenght=8": "no max_sequence_lenght (did you mean 'max_sequence_length'?)",
    "height=64": "height is already set by its own option",
    "generator=1": "generator is already set by the seed",
    "height": "--call: must be NAME=VALUE",
    "max_sequence_length=2.7": "max_sequence_length must be a whole number, got 2.7",
    "max_sequence_length=long": "max_sequence_length must be a number or a bool, such as",
}


@pytest.mark.parametrize(
    ("command", "calls"),
    [
        (("generate", "-p", "a"), [*CALLS]),
        (("inspect", "-p", "a", "-o", "folder"), ["height=64"]),
        (("compare", "-p", "a", "--peers", "none"), ["height=64"]),
        (("tune", "--target-psnr", "40"), ["height=64"]),
    ],
    ids=["generate", "inspect", "compare", "tune"],
)
def test_mistakes_of_call(run, models, command, calls):
    """Every command that runs a pipeline accepts --call, and names arguments that can't be passed."""
    for call in calls:
        result = run(*command, "-m", models / "flux", *SMALL, "--call", call)
        assert result.exit_code != 0 and CALLS[call] in " ".join(result.stderr.split()), call


MISTAKES = {
    "preset": (["--preset", "flux-balansed"], "did you mean 'balanced'"),
    "preset-of-another-family": (["--preset", "flux-fora", "-m", "{models}/sd3", "--compare"], "for flux models"),
    "preset-file": (["--preset", "missing.yaml"], "missing.yaml does not exist"),
    "set-keyword": (["--set", "ordr=2"], "unknown keyword 'ordr' (did you mean 'order'?)"),
    "call-of-scheduler": (["--call", "sigmas=far"], "FluxPipeline rejects its arguments: could not convert string"),
    "set-before-loading": (["--set", "ordr=2", "-m", "nowhere/at-all"], "unknown keyword 'ordr'"),
    "set-key": (["--set", "forecast.ordr=2"], "did you mean 'order'"),
    "set-value": (["--set", "forecast.order=many"], "forecast.order"),
    "set-syntax": (["--set", "forecast.order"], "--set: must be KEY=VALUE"),
    "set-no-key": (["--set", "=1"], "--set: must be KEY=VALUE"),
    "set-yaml": (["--set", "forecast.order=[1"], "is not valid YAML"),
    "model-path": (["-m", "./missing"], "--model: ./missing is not a pipeline's folder"),
    "model-name": (["-m", "missing"], "--model: missing is not a pipeline's folder"),
    "model-folder": (["-m", "."], "model_index.json is missing"),
    "device": (["--device", "cuda:99"], "--device: "),
    "device-name": (["--device", "gpu"], "'gpu' is not a device"),
    "offload-without-gpu": (["--device", "cpu", "--offload", "model"], "needs a CUDA device"),
    "image-missing": (["--image", "missing.png"], "--image: missing.png does not exist"),
    "image-unreadable": (["--image", "{models}/flux/model_index.json"], "can't be read as an image"),
    "output-folder": (["-o", "missing/o.png"], "missing does not exist"),
    "output-is-a-folder": (["-o", "."], ". has no name"),
    "output-format": (["-o", "o.txt"], "must end in .png"),
    "plain-is-a-folder": (["-o", "{models}/o.png", "--compare"], "o-plain.png is a folder"),
    "numbered-is-a-folder": (["-o", "{models}/n.png", "--num-images", "2"], "n-1.png is a folder"),
    "json-folder": (["--json", "missing/o.json"], "missing does not exist"),
    "image-not-taken": (["--image", "{models}/picture.png"], "FluxPipeline takes no image"),
    "negative-without-guidance": (["--negative-prompt", "blue"], "only with guidance above 1"),
    "guidance-without-embedding": (["-m", "{models}/flux-schnell", "--guidance", "3"], "no guidance embedding"),
    "compare-of-plain": (["--preset", "none", "--compare"], "--compare: needs an accelerated run"),
    "set-of-plain": (["--preset", "none", "--set", "order=2"], "--set: needs an accelerated run"),
    "plot-of-plain": (["--preset", "none", "--plot", "p.png"], "--plot: needs an accelerated run"),
    "size": (["-m", "{models}/sd3", "--height", "33"], "divisible by"),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_line_and_exit_code_2(run, models, tmp_path, arguments, message):
    """User errors give one line without a traceback, and nothing is written."""
    Image.new("RGB", (16, 16)).save(models / "picture.png")
    for folder in ("o-plain.png", "n-1.png"):
        (models / folder).mkdir(exist_ok=True)
    arguments = [argument.format(models=models) for argument in arguments]
    base = () if "-m" in arguments else ("-m", models / "flux")
    result = run("generate", "-p", "a", *base, *SMALL, *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.splitlines()[-1].startswith("error: ") and message in result.stderr
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to"),
        MemoryError(),
    ],
    ids=["cuda", "cpu", "host"],
)
@pytest.mark.parametrize("failing", ["__call__", "from_pretrained"])
def test_out_of_memory_is_a_failure_with_advice(run, models, monkeypatch, error, failing):
    """If memory does not suffice for the model or its run, the exit code is 1 and the message says what to try."""
    from diffusers import DiffusionPipeline, FluxPipeline

    def exhausted(self, *_, prompt=None, num_inference_steps=None, height=None, width=None, generator=None, **__):
        raise error

    monkeypatch.setattr(FluxPipeline if failing == "__call__" else DiffusionPipeline, failing, exhausted)
    result = run("generate", "-p", "a", "-m", models / "flux", *SMALL)
    assert result.exit_code == 1
    assert "--offload model" in result.stderr.splitlines()[-1] and "Traceback" not in result.output


def test_inspect_draws_the_run_and_its_symbols(run, models, tmp_path):
    """At level head every figure is written, one layer's symbols among them."""
    arguments = (
        "inspect",
        "-p",
        "a fox",
        "-m",
        models / "flux",
        "--preset",
        "flux-flashomni-paper",
        "--output",
        "deep/run",
    )
    result = run(*arguments, "--steps", 12, "--height", 128, "--width", 128, "--layer", "transformer_blocks.1")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "deep" / "run"
    names = {"picture.png", "timeline.png", "density.png", "report.json", "symbols-transformer_blocks.1.png"}
    assert {path.name for path in folder.iterdir()} == names
    report = json.loads((folder / "report.json").read_text())
    assert len(report["steps"]) == 12 and report["preset"] == "flux-flashomni-paper"


def listed(run, *options):
    """First columns of the rows of `presets list`."""
    result = run("presets", "list", *options)
    assert result.exit_code == 0, result.output
    return [line.split()[0] for line in result.stdout.splitlines()[1:] if not line.startswith(" ")]


@pytest.mark.parametrize("command", ["tune", "inspect"])
def test_help_offers_no_plain_run_where_there_is_none(run, command):
    """tune and inspect refuse the preset `none`, so their help does not have it; generate's has it."""
    words = [" ".join(run(each, "--help").stdout.split()) for each in (command, "generate")]
    assert ["`none` runs the plain" in each for each in words] == [False, True]


def test_presets_list_has_every_preset_with_its_figures(run):
    """With --all every shipped preset, above its description; without it about ten, all closed loops."""
    assert listed(run, "--all") == preset_names()
    short = listed(run)
    assert {"quality", "balanced", "turbo"} < set(short) < set(preset_names()) and len(short) <= 12
    assert {load_preset(name).schedule.control for name in short} == {"adaptive"}
    lines = run("presets", "list", "--all").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[lines.index(f"  {load_preset('turbo').description}") - 1].startswith("turbo  ")
    rows = {line.split()[0]: line for line in lines if not line.startswith(" ")}
    (run_of_50,) = (known for known in measured("balanced") if known.steps == 50)
    assert all(span(*figures) in rows["balanced"] for figures in ((run_of_50.computed, 2), (run_of_50.psnr, 0)))
    assert rows["exact"].count("not measured") == 2


@pytest.mark.parametrize(
    "model, there, missing",
    [
        ("black-forest-labs/FLUX.1-dev", {"balanced", "flux-sparge-balanced"}, {"video-balanced", "wan21-sparge"}),
        ("wan", {"video-turbo", "wan21-sparge-balanced"}, {"turbo", "flux-fora", "hunyuan-sparge"}),
        ("demo-hunyuan", {"video-balanced", "hunyuan-sparge"}, {"balanced", "wan21-sparge"}),
    ],
)
def test_presets_list_filters_by_model(run, model, there, missing):
    """An id, a family and a shipped model show the presets that they can run, videos the video forms."""
    names = set(listed(run, "--all", "--model", model))
    assert there <= names and not missing & names


def test_presets_show_prints_a_file_that_loads_to_the_preset(run, tmp_path):
    """Showing, saving and checking give the preset itself; the check prints it in full."""
    shown = run("presets", "show", "flux-flashomni-paper")
    assert shown.exit_code == 0
    (tmp_path / "mine.yaml").write_text(shown.stdout)
    checked = run("presets", "check", "mine.yaml")
    assert checked.exit_code == 0, checked.output
    printed = yaml.safe_load(checked.stdout)
    assert printed == load_preset("flux-flashomni-paper").effective()


def test_a_file_is_checked_and_a_shipped_preset_is_shown(run, tmp_path):
    """Each command's error names the other command; a file may have the name of a preset."""
    for name in ("mine.yaml", "mine.yml"):
        assert f"got the file {name}; see dit-accel presets check" in run("presets", "show", name).stderr
    assert "got the shipped preset balanced; see dit-accel presets show" in run("presets", "check", "balanced").stderr
    (tmp_path / "balanced").write_text("base: turbo\n")
    checked = run("presets", "check", "balanced")
    assert checked.exit_code == 0 and yaml.safe_load(checked.stdout) == load_preset(tmp_path / "balanced").effective()


@pytest.mark.parametrize(
    "action",
    [
        ("show", "nothing"),
        ("show", "bad.yaml"),
        ("check", "balanced"),
        ("check", "missing.yaml"),
        ("check", "bad.yaml"),
    ],
    ids=" ".join,
)
def test_presets_mistakes_exit_with_2(run, tmp_path, action):
    """Unknown names, missing files and invalid contents are the user's to mend."""
    (tmp_path / "bad.yaml").write_text("schedule: {control: adaptive, warm_up: 3}\n")
    result = run("presets", *action)
    assert result.exit_code == 2 and result.stderr.startswith("error: ")


def test_schema_is_json_and_can_be_written(run, tmp_path):
    """Printed and written schema agree, and know the preset's sections."""
    printed = json.loads(run("presets", "schema").stdout)
    assert run("presets", "schema", "--output", "schema.json").exit_code == 0
    assert json.loads((tmp_path / "schema.json").read_text()) == printed
    assert {"schedule", "forecast"} <= set(printed["properties"])


def test_env_checks_devices(run, monkeypatch):
    """Images by some presets on each device; a device that fails does not end it."""
    from dit_accel.cli import env

    monkeypatch.setattr(env, "CALL", env.CALL | {"height": 64, "width": 64, "num_inference_steps": 2})
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("hpu"))
    lines = [line for line in run("env", "--check").stdout.splitlines() if line.startswith(("cpu, ", "hpu, "))]
    assert [line.split()[2] for line in lines if line.startswith("cpu, float32: ")][:3] == [
        "plain",
        "exact",
        "balanced",
    ]
    assert "PSNR inf dB, computed 1.00" in lines[1]
    assert any(line.startswith("hpu, bfloat16: ") and "Error" in line for line in lines)


def test_import_is_quick_and_light():
    """Help needs neither torch nor diffusers: importing the commands takes well under 0.3 s on an idle machine."""
    code = "import sys, time, dit_accel.cli; print(time.process_time(), *sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, *loaded = ended.stdout.split()
    assert {"torch", "diffusers", "numpy", "pydantic"}.isdisjoint(loaded)
    assert float(seconds) < 1.5  # of the processor, for slower ones


def test_warnings_of_torchao_and_torchvision_are_hidden():
    """The libraries' warnings about themselves are hidden, by module or by file; others are shown."""
    script = """
import warnings
from dit_accel.serving.processes import silence_libraries

silence_libraries()
files = ("/lib/site-packages/torchao/quant.py", "/lib/torchvision/io/image.py", "/lib/torch/nn.py", "/lib/mytorchao.py")
for file in files:
    warnings.warn_explicit(file, SyntaxWarning, file, 1)
for module in ("torchao", "torchvision.io.image", "torchaudio"):
    warnings.warn_explicit(module, UserWarning, "x.py", 1, module=module)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert re.findall(r"Warning: (.*)", result.stderr) == ["/lib/torch/nn.py", "/lib/mytorchao.py", "torchaudio"]
