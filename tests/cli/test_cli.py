"""The command line end to end, on tiny pipelines saved to disk: files, numbers, messages and exit codes."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from diffusers import DiffusionPipeline, FluxPipeline
from PIL import Image

from dit_accel.cli import env
from dit_accel.cli.presets import span
from dit_accel.presets import load_preset, measured, preset_names
from dit_accel.tools.measure.metrics import clip_ssim, psnr
from dit_accel.tools.media.video import as_clip
from tests.clips import read_clip
from tests.rounding import equal_up_to_rounding

SMALL = ("--steps", "10", "--height", "64", "--width", "64")
FRAMES = 5
FORECASTS = ("--set", "schedule.target_error=0.9")  # random weights forecast badly; this lets them


def read(path):
    return read_clip(path) if path.is_dir() else np.asarray(Image.open(path))[None]


@pytest.mark.parametrize(
    ("model", "name", "shape", "others"),
    [
        ("flux", "fox{}.png", (1, 64, 64, 3), {"fox-compare.png"}),
        ("wan", "fox{}", (FRAMES, 64, 64, 3), {"fox-compare", "fox-strip.png"}),
    ],
    ids=["image", "video"],
)
def test_compare_writes_both_sides_and_agreeing_numbers(run, saved, tmp_path, model, name, shape, others):
    """The JSON's metrics are those of the written files, its times give the speed-up, and some steps were forecast."""
    frames = () if model == "flux" else ("--num-frames", FRAMES)
    result = run(
        *("generate", "-p", "a fox", "-m", saved(model), *SMALL, *frames, *FORECASTS, "--compare"),
        *("--output", name.format(""), "--json", "fox.json", "--plot", "fox-run.png"),
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-2:] == ["wrote fox-run.png", "wrote fox.json"]
    names = {name.format(""), name.format("-plain"), "fox.json", "fox-run.png"} | others
    assert {path.name for path in tmp_path.iterdir()} == names
    facts = json.loads((tmp_path / "fox.json").read_text())
    plain, fast = (read(tmp_path / name.format(kind)) for kind in ("-plain", ""))
    assert fast.shape == shape and read(tmp_path / name.format("-compare")).shape[2] > 2 * 64
    assert facts["psnr_db"] == pytest.approx(psnr(plain, fast)) and facts["identical"] is False
    assert facts["ssim"] == pytest.approx(clip_ssim(plain, fast))
    plain_each, fast_each = facts["plain_seconds_each"], facts["accelerated_seconds_each"]
    ratios = sorted(plain / fast for plain, fast in zip(plain_each, fast_each, strict=True))
    assert len(ratios) == 3 and facts["speedup"] == ratios[1] and facts["speedup_spread"] == [ratios[0], ratios[2]]
    assert facts["plain_seconds"] == sorted(plain_each)[1] and facts["accelerated_seconds"] == sorted(fast_each)[1]
    for side in ("plain", "accelerated"):  # seconds of the first run by stage
        stages = facts[f"{side}_stages"]
        assert list(stages) == ["text encoding", "denoising", "decoding", "other"] and min(stages.values()) > 0
        assert sum(stages.values()) == pytest.approx(facts[f"{side}_call_seconds"])
        assert stages["denoising"] == facts[f"{side}_seconds_each"][0]
    assert re.search(r"whole call +\d.*\n(.*\n)+decoded by the autoencoder's own decoder", result.stdout)
    assert facts["report"]["steps_by_mode"]["dispatch"] > 0
    assert facts["computed_fraction"] == facts["report"]["computed_fraction"] < 1
    assert "speed-up" in result.stdout and "balanced" in result.stdout


@pytest.mark.parametrize("model", ["flux", "wan"])
def test_plain_run_equals_the_pipeline_called_from_python(run, saved, tmp_path, model):
    """`--preset none` with a seed equals the user's own call with a CPU generator of that seed."""
    more = {"max_sequence_length": 8} if model == "flux" else {"num_frames": FRAMES, "guidance_scale": 3.0}
    options = ("--call", "max_sequence_length=8", "-o", "o.png")
    if model == "wan":
        options = ("--num-frames", FRAMES, "--guidance", 3, "-o", "frames/")
    result = run("generate", "-p", "a fox", "-m", saved(model), *SMALL, "--seed", 7, "--preset", "none", *options)
    assert result.exit_code == 0, result.output
    pipe = DiffusionPipeline.from_pretrained(saved(model))
    size = {"num_inference_steps": 10, "height": 64, "width": 64}
    (made,) = pipe("a fox", **size, **more, generator=torch.Generator("cpu").manual_seed(7), return_dict=False)
    expected = np.asarray(made[0])[None] if model == "flux" else as_clip(made[0])
    assert equal_up_to_rounding(read(tmp_path / options[-1]), expected)


def test_force_replaces_what_generate_wrote(run, saved, tmp_path):
    """Without --force a second run is refused, or chooses another name if it has no output name; files stay."""
    command = ("generate", "-p", "a", "-m", saved("flux"), *SMALL, "--json", "run.json")
    assert run(*command, "--seed", 1).exit_code == 0
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert "--json: run.json exists" in run(*command, "--seed", 2).stderr
    assert run(*command[:-2], "--seed", 2).exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {*first, "output-2.png"}
    assert {name: (tmp_path / name).read_bytes() for name in first} == first
    assert run(*command, "--seed", 2, "--force").exit_code == 0
    assert json.loads((tmp_path / "run.json").read_text())["seed"] == 2
    assert (tmp_path / "output.png").read_bytes() != first["output.png"]


@pytest.mark.parametrize(
    ("failing", "reason"),
    [
        ("__call__", "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you"),
        ("from_pretrained", "CUDA error: out of memory"),  # of a GPU without room for a context
    ],
)
def test_out_of_memory_is_a_failure_with_advice(run, saved, monkeypatch, failing, reason):
    """If memory does not suffice for the model or its run, the exit code is 1 and the message says what to try."""

    def exhausted(self, *_, prompt=None, num_inference_steps=None, height=None, width=None, generator=None, **__):
        raise RuntimeError(reason)

    monkeypatch.setattr(FluxPipeline if failing == "__call__" else DiffusionPipeline, failing, exhausted)
    result = run("generate", "-p", "a", "-m", saved("flux"), *SMALL)
    assert result.exit_code == 1
    assert "--offload model" in result.stderr.splitlines()[-1] and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("model", "options", "output", "layer"),
    [
        ("flux", ("flux-flashomni-paper", "--layer", "transformer_blocks.1"), "picture.png", "transformer_blocks.1"),
        (
            "wan",
            ("wan21-flashomni", "--num-frames", FRAMES, "--set", "schedule.warmup=2", "--set", "blocks.size=64"),
            *("clip.mp4", "transformer.blocks.1"),
        ),
    ],
    ids=["image", "video"],
)
def test_inspect_draws_the_run_and_its_symbols(run, saved, tmp_path, model, options, output, layer):
    """At level head every figure is written, one layer's symbols among them; of a video, over its middle frame."""
    command = ("inspect", "-p", "a fox", "-m", saved(model), "--output", "deep/run", "--preset", *options)
    result = run(*command, "--steps", 12, "--height", 128, "--width", 128)
    assert result.exit_code == 0, result.output
    folder = tmp_path / "deep" / "run"
    names = {output, "timeline.png", "density.png", "report.json", f"symbols-{layer}.png"}
    assert {path.name for path in folder.iterdir()} == names
    assert np.asarray(Image.open(folder / f"symbols-{layer}.png")).std() > 5
    report = json.loads((folder / "report.json").read_text())
    assert len(report["steps"]) == 12 and report["preset"] == options[0]


def test_a_terminal_shows_steps_and_what_is_left(run, saved, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    result = run("generate", "-p", "a", "-m", saved("flux"), *SMALL, "--compare", "--repeats", 1)
    assert result.exit_code == 0, result.output
    assert " runs " in result.stdout and "of 10" in result.stdout and " left" in result.stdout


def listed(run, *options):
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
    (run_of_50,) = (known for known in measured("balanced") if known["steps"] == 50)
    assert all(span(*figures) in rows["balanced"] for figures in ((run_of_50["computed"], 2), (run_of_50["psnr"], 0)))
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
    assert yaml.safe_load(checked.stdout) == load_preset("flux-flashomni-paper").effective()


def test_a_file_may_have_the_name_of_a_preset(run, tmp_path):
    (tmp_path / "balanced").write_text("base: turbo\n")
    checked = run("presets", "check", "balanced")
    assert checked.exit_code == 0 and yaml.safe_load(checked.stdout) == load_preset(tmp_path / "balanced").effective()


def test_schema_is_json_and_can_be_written(run, tmp_path):
    """Printed and written schema agree, and know the preset's sections."""
    printed = json.loads(run("presets", "schema").stdout)
    assert run("presets", "schema", "--output", "schema.json").exit_code == 0
    assert json.loads((tmp_path / "schema.json").read_text()) == printed
    assert {"schedule", "forecast"} <= set(printed["properties"])


def test_env_checks_devices(run, monkeypatch):
    """Images by some presets on each device; a device that fails does not end it."""
    monkeypatch.setattr(env, "CALL", env.CALL | {"height": 64, "width": 64, "num_inference_steps": 2})
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("hpu"))
    lines = [line for line in run("env", "--check").stdout.splitlines() if line.startswith(("cpu, ", "hpu, "))]
    of_cpu = [line.split()[2] for line in lines if line.startswith("cpu, float32: ")]
    assert of_cpu[:3] == ["plain", "exact", "balanced"]
    assert "PSNR inf dB, computed 1.00" in lines[1]
    assert any(line.startswith("hpu, bfloat16: ") and "Error" in line for line in lines)


def test_env_times_sizes(run, monkeypatch):
    """For so many minutes on the current GPU; without one it is an error."""
    refused = run("env", "--tune")
    assert refused.exit_code == 2 and "error: --tune needs a CUDA GPU and Triton: " in refused.stderr
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("dit_accel.kernels.backends.backend_status", lambda: {"triton": "ok"})
    monkeypatch.setattr(env, "tune_sizes", lambda *given: print(*given))
    assert run("env", "--tune", "--minutes", 2).stdout.splitlines()[-1] == "cuda:0 2.0"


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


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "dit_accel", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("dit-accel ")
