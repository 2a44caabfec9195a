"""Videos on the command line end to end, on tiny pipelines saved to disk: files, numbers, messages and exit codes."""

import json

import numpy as np
import pytest
from PIL import Image

from dit_accel.errors import UnsupportedError
from dit_accel.pipeline import preset_for
from dit_accel.serving.media import medium_of
from dit_accel.serving.pipelines import call_arguments
from dit_accel.tools import demo
from dit_accel.tools.measure.metrics import clip_ssim, psnr
from dit_accel.tools.media.video import as_clip
from tests.clips import read_clip
from tests.rounding import equal_up_to_rounding
from tests.tiny import tiny_pipeline

FRAMES = 5
SMALL = ("--steps", "10", "--height", "64", "--width", "48", "--num-frames", FRAMES)
FORECASTS = ("--set", "schedule.target_error=0.9")  # random weights forecast badly; this lets them


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of saved tiny pipelines, by name."""
    root = tmp_path_factory.mktemp("models")
    for name in ("flux", "wan", "wan-i2v", "hunyuan", "mochi"):
        tiny_pipeline(name).save_pretrained(root / name)
    return root


def test_compare_writes_clips_and_agreeing_numbers(run, models, tmp_path):
    """A folder of frames is lossless, so the JSON's metrics are those of the written videos."""
    result = run(
        *("generate", "-p", "a fox", "-m", models / "wan", *SMALL, *FORECASTS, "--compare"),
        *("--output", "fox", "--json", "fox.json", "--plot", "fox-run.png"),
    )
    assert result.exit_code == 0, result.output
    names = {"fox", "fox-plain", "fox-compare", "fox-strip.png", "fox.json", "fox-run.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    facts = json.loads((tmp_path / "fox.json").read_text())
    plain, fast = (read_clip(tmp_path / name) for name in ("fox-plain", "fox"))
    assert fast.shape == (FRAMES, 64, 48, 3)
    assert facts["psnr_db"] == pytest.approx(psnr(plain, fast)) and facts["identical"] is False
    assert facts["ssim"] == pytest.approx(clip_ssim(plain, fast))
    assert len(facts["plain_seconds_each"]) == len(facts["accelerated_seconds_each"]) == 3
    assert facts["report"]["steps_by_mode"]["dispatch"] > 0 and facts["computed_fraction"] < 1
    assert "speed-up" in result.stdout and "PSNR" in result.stdout
    beside = read_clip(tmp_path / "fox-compare")
    assert len(beside) == FRAMES and beside.shape[2] > 2 * 48
    assert Image.open(tmp_path / "fox-strip.png").width > 5 * 48


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_compare_writes_every_clip_in_the_format_asked_for(run, models, tmp_path, suffix):
    """NAME-plain and NAME-compare have NAME's format, and the strip is an image; the videos keep their length."""
    result = run(
        "generate", "-p", "a", "-m", models / "hunyuan", *SMALL, "--compare", "--repeats", 1, "-o", f"clip{suffix}"
    )
    assert result.exit_code == 0, result.output
    names = {f"clip{kind}{suffix}" for kind in ("", "-plain", "-compare")}
    assert {path.name for path in tmp_path.iterdir()} == names | {"clip-strip.png"}
    assert {len(read_clip(tmp_path / name)) for name in names} == {FRAMES}


def test_compare_serves_a_schedule_that_takes_two_steps_at_least(run, models, tmp_path):
    """Mochi's schedule divides by half the steps, also in the warm-up; balanced means its video form."""
    size = ("--repeats", 1, "--steps", 8, "--height", 112, "--width", 96, "--num-frames", 7)
    result = run("generate", "-p", "a", "-m", models / "mochi", *size, "--compare", "-o", "m", "--json", "m.json")
    assert result.exit_code == 0, result.output
    assert len(read_clip(tmp_path / "m")) == len(read_clip(tmp_path / "m-plain")) == 7
    assert json.loads((tmp_path / "m.json").read_text())["preset"] == "video-balanced"


def test_plain_run_equals_the_pipeline_called_from_python(run, models, tmp_path):
    """`--preset none` with a seed equals the user's own call with a CPU generator of that seed."""
    import torch
    from diffusers import DiffusionPipeline

    common = ("-m", models / "wan", *SMALL, "--seed", 7, "--preset", "none")
    result = run("generate", "-p", "a fox", *common, "--guidance", 3, "--negative-prompt", "blue", "-o", "frames/")
    assert result.exit_code == 0, result.output
    pipe = DiffusionPipeline.from_pretrained(models / "wan")
    generator = torch.Generator("cpu").manual_seed(7)
    size = {"num_inference_steps": 10, "height": 64, "width": 48, "num_frames": FRAMES}
    expected = pipe("a fox", "blue", **size, guidance_scale=3.0, generator=generator).frames[0]
    assert equal_up_to_rounding(read_clip(tmp_path / "frames"), as_clip(expected))


def test_image_is_the_first_frame_of_image_to_video(run, models, tmp_path):
    """Another --image, with all else equal, makes another video."""
    clips = []
    for level in (0, 255):
        Image.new("RGB", (48, 64), (level, 90, 90)).save(tmp_path / "first.png")
        result = run(
            "generate", "-p", "a", "-m", models / "wan-i2v", *SMALL, "--image", "first.png", "-o", "frames", "-f"
        )
        assert result.exit_code == 0, result.output
        clips.append(read_clip(tmp_path / "frames"))
    assert (clips[0] != clips[1]).any()


@pytest.mark.parametrize(
    ("model", "options", "scales"),
    [
        ("demo-hunyuan", {"guidance": 5.0}, {"true_cfg_scale": 5.0}),
        ("demo-hunyuan", {"guidance": 1.0}, {"true_cfg_scale": 1.0}),
        ("demo-hunyuan", {}, {"true_cfg_scale": 3.0}),
        ("model", {"guidance": 5.0}, {"guidance_scale": 5.0}),
        ("model", {"guidance": 5.0, "negative-prompt": "blue"}, {"true_cfg_scale": 5.0}),
    ],
)
def test_guidance_of_hunyuan_is_that_of_its_second_branch_where_it_has_one(model, options, scales):
    """A demo model that is guided by a second branch needs no --negative-prompt for that, and 1 switches it off."""
    arguments = call_arguments(tiny_pipeline("hunyuan"), model, options)
    assert {name: value for name, value in arguments.items() if name.endswith("_scale")} == scales


@pytest.mark.parametrize(
    ("model", "model_fps", "asked", "fps"),
    [
        ("wan", None, None, 16),
        ("wan22-5b", None, None, 24),
        ("hunyuan", None, None, 24),
        ("hunyuan", 8, None, 8),
        ("hunyuan", 8, 12.5, 12.5),
    ],
)
def test_frame_rate_is_the_users_else_the_models_else_the_familys(model, model_fps, asked, fps):
    """--fps overrides a demo model's rate, which overrides its family's training rate."""
    assert medium_of(tiny_pipeline(model), model_fps, asked).fps == fps


def test_demo_model_says_its_arguments_and_its_frame_rate(monkeypatch, tmp_path):
    """``fps`` and ``words`` of demo.json are no arguments of the pipeline's call."""
    (tmp_path / "demo-clip").mkdir()
    (tmp_path / "demo-clip" / "model_index.json").touch()
    (tmp_path / "demo-clip" / "demo.json").write_text('{"num_frames": 17, "fps": 8, "words": ["a", "fox"]}')
    monkeypatch.setattr(demo, "_ASSETS", tmp_path)
    assert demo.demo_arguments(demo.demo_path("demo-clip")) == {"num_frames": 17}
    assert demo.model_fps("demo-clip") == 8 and demo.model_fps("some/model") is None
    assert demo.unknown_words("demo-clip", "A red, red fox!") == (["red"], ["a", "fox"])
    assert demo.unknown_words("some/model", "a red fox") == ([], [])


def test_a_demo_model_that_is_not_installed_says_how(monkeypatch, tmp_path):
    """The error names the package to install; other names are treated as folders or Hub ids."""
    monkeypatch.setattr(demo, "_ASSETS", tmp_path)
    with pytest.raises(UnsupportedError, match=r"demo-wan is not installed: pip install 'dit-accel\[demos\]'"):
        demo.demo_path("demo-wan")
    assert demo.demo_path("owner/demo-wan") is None and demo.demo_names() == []


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("flux", "balanced"),
        ("sd3", "balanced"),
        ("hunyuan", "video-balanced"),
        ("wan", "video-balanced"),
        ("wan22", "video-balanced"),
        ("mochi", "video-balanced"),
        ("hunyuan15", "video-balanced"),
    ],
)
def test_plain_names_follow_what_the_pipeline_makes(name, preset):
    """The default is balanced, in its video form for videos; an explicit name stays unchanged."""
    pipe = tiny_pipeline(name)
    assert preset_for(pipe).name == preset_for(pipe, "balanced").name == preset
    assert preset_for(pipe, "turbo").name == preset.replace("balanced", "turbo")
    assert preset_for(pipe, "exact").name == "exact"


def test_inspect_draws_a_clip_and_its_symbols(run, models, tmp_path):
    """The video replaces the image among the files, and the map shows its middle frame."""
    arguments = ("inspect", "-p", "a", "-m", models / "wan", *SMALL, "--preset", "wan21-flashomni")
    result = run(*arguments, "--set", "schedule.warmup=2", "--set", "blocks.size=64", "--output", "run")
    assert result.exit_code == 0, result.output
    names = {path.name for path in (tmp_path / "run").iterdir()}
    symbols = "symbols-transformer.blocks.1.png"
    assert names == {"clip.mp4", "timeline.png", "density.png", "report.json", symbols}
    assert len(read_clip(tmp_path / "run" / "clip.mp4")) == FRAMES
    assert np.asarray(Image.open(tmp_path / "run" / symbols)).std() > 5


MISTAKES = {
    "picture-suffix": (
        ["-m", "{models}/wan", "-o", "o.png"],
        "--output: o.png must end in .mp4 or .gif, or be a folder",
    ),
    "unknown-suffix": (["-m", "{models}/wan", "-o", "o.avi"], "--output: o.avi must end in"),
    "clip-of-an-image-model": (["-m", "{models}/flux", "-o", "o.mp4"], "o.mp4 must end in .png"),
    "folder-of-an-image-model": (["-m", "{models}/flux", "-o", "frames"], "frames must end in .png"),
    "frames-of-an-image-model": (["-m", "{models}/flux", "--num-frames", "9"], "--num-frames: FluxPipeline takes no"),
    "fps-of-an-image-model": (["-m", "{models}/flux", "--fps", "8"], "--fps: FluxPipeline makes images"),
    "output-folder": (["-m", "{models}/wan", "-o", "missing/o.mp4"], "missing does not exist"),
    "output-holds-other-files": (
        ["-m", "{models}/wan", "-o", "{models}/wan"],
        "holds files that are not frames of one video (model_index.json)",
    ),
    "output-is-a-file": (["-m", "{models}/wan", "-o", "{models}/file"], "file is a file, so frames"),
    "output-without-name": (["-m", "{models}/wan", "-o", "."], ". has no name"),
    "plain-folder-holds-other-files": (
        ["-m", "{models}/wan", "-o", "{models}/run", "--compare"],
        "run-plain holds files that are not frames of one video (0007.png)",
    ),
    "compare-is-a-file": (["-m", "{models}/wan", "-o", "{models}/shot", "--compare"], "shot-compare is a file, so"),
    "plain-is-a-folder": (["-m", "{models}/wan", "-o", "{models}/clip.mp4", "--compare"], "clip-plain.mp4 is a folder"),
    "strip-is-a-folder": (["-m", "{models}/wan", "-o", "{models}/tape.gif", "--compare"], "tape-strip.png is a folder"),
    "several-clips": (["-m", "{models}/wan", "--num-images", "2"], "--num-images: WanPipeline makes one video per run"),
    "image-missing": (["-m", "{models}/wan-i2v"], "--image: WanImageToVideoPipeline needs an input image"),
    "image-not-taken": (["-m", "{models}/wan", "--image", "{models}/picture.png"], "WanPipeline takes no image"),
    "negative-unguided": (
        ["-m", "{models}/wan", "--negative-prompt", "blue", "--guidance", "1"],
        "--negative-prompt: WanPipeline uses it only with guidance above 1",
    ),
    "size": (["-m", "{models}/wan", "--height", "60"], "divisible by 16"),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_line_and_exit_code_2(run, models, tmp_path, arguments, message):
    """User errors give one line without a traceback, and nothing is written."""
    for folder in ("run-plain", "clip-plain.mp4", "tape-strip.png"):
        (models / folder).mkdir(exist_ok=True)
    for file in ("file", "shot-compare", "run-plain/0007.png"):
        (models / file).touch()
    Image.new("RGB", (16, 16)).save(models / "picture.png")
    result = run("generate", "-p", "a", *(argument.format(models=models) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert result.stderr.splitlines()[-1].startswith("error: ") and message in result.stderr
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []
