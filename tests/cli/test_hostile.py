"""Mistaken and hostile arguments: one line that names the option, exit code 2, and no work before it."""

import json
import os
import subprocess
import sys

import pytest
from PIL import Image

from dit_accel.errors import ComparisonError
from dit_accel.tools.measure.compare import Sweep
from tests.tiny import tiny_pipeline

SMALL = ("--steps", "2", "--height", "64", "--width", "64")
DIGITS = "9" * 5000
LONG = "a" * 5000
LONG_SHOWN = "a… (5,0"

TOLD_AT_ONCE = {
    "set-long-integer": (["--set", f"order={DIGITS}"], "is not valid YAML: a value has 5,000 characters"),
    "set-deep": (["--set", f"order={'[' * 3000}"], "is not valid YAML: more than 20 nested levels"),
    "set-alias": (["--set", "order=&a [*a]"], "is not valid YAML: more than 20 nested levels"),
    "set-twice": (["--set", "skip={policy: none, policy: sla}"], "is not valid YAML: key 'policy' occurs twice"),
    "set-date": (["--preset", "balanced", "--set", "order=2001-99-99"], "a valid integer, got '2001-99-99'"),
    "set-dots": (["--preset", "balanced", "--set", f"{'.' * 3000}=1"], "has 3,000 dots: write section.key=value"),
    "set-long-key": (["--set", LONG], f"--set: must be KEY=VALUE, e.g. target_error=0.1, got '{'a' * 99}… (5,002"),
    "preset-long": (["--preset", LONG], "unknown preset 'a"),
    "preset-loop": (["--preset", "loop.yaml"], "loop.yaml can't be read: Too many levels of symbolic links"),
    "prompt-bytes": (["--prompt", "caf\udce9"], r"--prompt: must be UTF-8, got 'caf\udce9'"),
    "output-bytes": (["--output=caf\udce9.png"], "--output: must be UTF-8"),
    "guidance-nan": (["--guidance", "nan"], "--guidance: must be a finite number, got nan"),
    "guidance-infinite": (["--guidance", "inf"], "--guidance: must be a finite number, got inf"),
    "model-empty": (["-m", ""], "--model: "),
    "model-long": (["-m", LONG], LONG_SHOWN),
    "model-long-path": (["-m", f"./{LONG}"], LONG_SHOWN),
    "model-loop": (["-m", "loop.yaml"], "--model: loop.yaml is not a pipeline's folder"),
    "model-no-home": (["-m", "~nobody-of-that-name/x"], "is not a pipeline's folder"),
    "image-long": (["--image", LONG], "--image: aaa"),
    "image-broken": (["--image", "broken.png"], "--image: broken.png can't be read as an image"),
    "image-folder": (["--image", "."], "--image: . can't be read as an image: Is a directory"),
    "output-not-installed": (["-o", "o.wmf"], "--output: o.wmf must end in .png"),
    "output-no-picture": (["-o", "o.h5"], "--output: o.h5 must end in .png"),
    "output-only-read": (["-o", "o.psd"], "--output: o.psd must end in .png"),
    "output-black-and-white": (["-o", "o.xbm"], "--output: o.xbm must end in .png"),
    "output-in-proc": (["-o", "/proc/o.png"], "--output: /proc/o.png can't be written: "),
    "output-loop": (["-o", "loop.png"], "--output: loop.png can't be written: Too many levels"),
    "output-long": (["-o", f"{LONG}.png"], "(5,004 characters) can't be written: File name too long"),
    "output-long-beside": (["-o", f"{'a' * 248}.png", "--compare"], "can't be written: File name too long"),
    "output-exists": (["-o", "picture.png"], "--output: picture.png exists; name another file, or replace it with"),
    "numbered-exists": (["-o", "n.png", "--num-images", "2"], "--output: n-1.png exists"),
    "compare-exists": (["-o", "c.png", "--compare"], "--output: c-compare.png exists"),
    "unnamed-numbered": (["-o", ".", "--num-images", "2"], "--output: . has no name"),
    "json-exists": (["--json", "picture.png"], "--json: picture.png exists"),
    "json-in-proc": (["--json", "/proc/o.json"], "--json: /proc/o.json can't be written: "),
    "plot-exists": (["--plot", "picture.png"], "--plot: picture.png exists"),
    "plot-suffix": (["--plot", "p.xyz"], "--plot: p.xyz must end in .png, .jpg, .webp, .pdf or .svg"),
    "plot-no-suffix": (["--plot", "p"], "--plot: p must end in .png"),
}


@pytest.fixture
def home(tmp_path):
    """The folder of the test, with files to trip over."""
    Image.new("RGB", (16, 16)).save(tmp_path / "picture.png")
    for name in ("n-1.png", "c-compare.png"):
        (tmp_path / name).touch()
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(50))
    for name in ("loop.png", "loop.yaml"):
        os.symlink(name, tmp_path / name)
    return tmp_path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Folder of a saved tiny pipeline."""
    folder = tmp_path_factory.mktemp("models") / "flux"
    tiny_pipeline("flux").save_pretrained(folder)
    return folder


def assert_refused(result, complaint):
    """One short line on stderr, which has the complaint, and exit code 2."""
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and complaint in line
    assert len(line) < 1200 and line.isprintable()


@pytest.mark.parametrize(("arguments", "complaint"), TOLD_AT_ONCE.values(), ids=TOLD_AT_ONCE)
def test_it_is_told_before_a_model_is_looked_for(run, home, arguments, complaint):
    """The error is one short line; nothing is written or replaced."""
    before = {path.name: path.lstat().st_mtime_ns for path in home.iterdir()}
    base = () if "-m" in arguments else ("-m", "nowhere/at-all")
    prompt = () if "--prompt" in arguments else ("--prompt", "a")
    assert_refused(run("generate", *prompt, *base, *arguments), complaint)
    assert {path.name: path.lstat().st_mtime_ns for path in home.iterdir()} == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("--seed", 2**64),
        ("--seed", DIGITS),
        ("--steps", 10**9),
        ("--steps", "1e9"),
        ("--height", 10**8),
        ("--width", 10**8),
        ("--num-images", 10**12),
        ("--num-frames", 10**9),
        ("--repeats", 10**9),
        ("--fps", "nan"),
        ("--fps", "inf"),
    ],
    ids=lambda arguments: "-".join(str(each)[:12] for each in arguments).strip("-"),
)
def test_numbers_beyond_reason_are_refused_by_their_option(run, tmp_path, arguments):
    """The parser refuses them before any work."""
    result = run("generate", "-p", "a", "-m", "nowhere/at-all", *arguments)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert arguments[0] in result.stderr and len(result.stderr) < 2000


@pytest.mark.parametrize(
    ("device", "complaint"),
    [
        ("meta", "--device: meta can't run here"),
        ("xpu", "--device: xpu can't run here"),
        ("hpu", "--device: hpu can't run here"),
        ("cuda:99999999999999", "is not a device"),
        ("", "'' is not a device"),
        (LONG, "(5,002 characters) is not a device"),
    ],
    ids=["meta", "xpu", "hpu", "index", "empty", "long"],
)
def test_a_device_that_can_not_run_is_refused(run, model, device, complaint):
    """Before the model is loaded onto it."""
    assert_refused(run("generate", "-p", "a", "-m", model, "--device", device), complaint)


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        (
            '{"_class_name": "NoSuchPipeline"}',
            "can't be loaded: AttributeError: module diffusers has no attribute NoSuch",
        ),
        ('["FluxPipeline"]', "model_index.json must be a mapping with a _class_name"),
        ('{"_class_name": ["FluxPipeline"]}', "model_index.json must be a mapping with a _class_name"),
        ("[" * 100_000, "model_index.json is not JSON: "),
        ("{", "model_index.json is not JSON: "),
        ('{"_class_name": "FluxPipeline", "transformer": 5}', "can't be loaded: TypeError: "),
    ],
    ids=["unknown-class", "list", "list-of-classes", "deep", "broken", "number-as-part"],
)
def test_a_folder_that_is_no_pipeline_is_refused(run, tmp_path, index, complaint):
    """Any error of diffusers gives one line."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text(index)
    assert_refused(run("generate", "-p", "a", "-m", tmp_path / "model"), complaint)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("-o", "a.png", "--plot", "a.png"), "--plot: a.png is also the file of output; name another file"),
        (("-o", "a.png", "--json", "./a.png"), "--json: a.png is also the file of output"),
        (("-o", "a.png", "--json", "a-plain.png", "--compare"), "--json: a-plain.png is also the file of output"),
        (("--json", "output.png"), "--json: output.png is also the file of output"),
        (("--json", "a.png", "--plot", "a.png"), "--json: a.png is also the file of plot"),
    ],
    ids=["plot", "json", "plain", "default", "plot-and-json"],
)
def test_two_options_do_not_write_one_file(run, model, tmp_path, arguments, complaint):
    """Files derived from NAME, and the default file without --output, count too."""
    assert_refused(run("generate", "-p", "a", "-m", model, *SMALL, *arguments), complaint)
    assert list(tmp_path.iterdir()) == []


def test_force_replaces_what_generate_wrote(run, model, tmp_path):
    """Without --force a second run is refused, or chooses another name if it has no output name; files stay."""
    asked = ("generate", "-p", "a", "-m", model, *SMALL, "--json", "run.json")
    assert run(*asked, "--seed", 1).exit_code == 0
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert_refused(run(*asked, "--seed", 2), "--json: run.json exists")
    assert run(*asked[:-2], "--seed", 2).exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {*first, "output-2.png"}
    assert {name: (tmp_path / name).read_bytes() for name in first} == first
    assert run(*asked, "--seed", 2, "--force").exit_code == 0
    assert json.loads((tmp_path / "run.json").read_text())["seed"] == 2
    assert (tmp_path / "output.png").read_bytes() != first["output.png"]


def test_inspect_replaces_nothing_and_knows_its_layers_before_it_writes(run, model, tmp_path):
    """A layer without symbols gives an error that lists layers with symbols; the folder stays empty."""
    asked = ("inspect", "-p", "a", "-m", model, "--preset", "flux-flashomni-paper", "--quiet", "--output", "run")
    sized = ("--steps", 12, "--height", 64, "--width", 64)
    assert_refused(run(*asked, *sized, "--layer", "nope"), "--layer: no symbols for layer 'nope'; layers: transformer_")
    assert list((tmp_path / "run").iterdir()) == []
    (tmp_path / "run" / "density.png").touch()
    assert_refused(run(*asked), "--output: run/density.png exists")
    assert_refused(run(*asked[:-1], "run/density.png"), "--output: run/density.png can't be created: File exists")


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (("tune", "--target-psnr", "inf"), "target_psnr must be positive and finite, got inf"),
        (("tune", "--target-psnr", "nan"), "target_psnr must be positive and finite, got nan"),
        (("tune", "--target-error", "inf"), "target_error must be positive and finite, got inf"),
        (("tune", "--target-psnr", "30", "-o", "mine.yaml"), "--output: mine.yaml exists"),
        (("tune", "--target-psnr", "30", "-o", "/proc/x.yaml"), "--output: /proc/x.yaml can't be written"),
        (("tune", "--target-psnr", "30", "--prompts", "empty.txt"), "--prompts: empty.txt holds no prompts"),
        (("tune", "--target-psnr", "30", "--prompts", "/dev/zero"), "/dev/zero can't be read: it has more than"),
        (("compare", "-p", "a", "-o", "mine"), "--output: mine.md exists"),
        (("compare", "-p", "a", "-o", "."), "--output: . is a folder; give the stem of files in it"),
        (("compare", "-p", "a", "-o", LONG), "(5,005 characters) can't be written: File name too long"),
        (("compare", "--prompts", "empty.txt"), "--prompts: empty.txt holds no prompts"),
        (("presets", "schema", "-o", "mine.yaml"), "--output: mine.yaml exists"),
        (("presets", "check", LONG), "can't be read: File name too long"),
        (("presets", "show", "../../pyproject"), "unknown preset '../../pyproject'"),
    ],
    ids=lambda given: " ".join(given)[:50] if isinstance(given, tuple) else "",
)
def test_other_commands_refuse_likewise(run, tmp_path, command, complaint):
    """Before a model is looked for; files stay as they are."""
    for name in ("mine.yaml", "mine.md", "empty.txt"):
        (tmp_path / name).touch()
    model = ("-m", "nowhere/at-all") if command[0] in ("tune", "compare") else ()
    assert_refused(run(*command, *model), complaint)
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == {
        "mine.yaml": 0,
        "mine.md": 0,
        "empty.txt": 0,
    }


@pytest.mark.parametrize("content", ["", "[]", "{", '{"settings": 5}'], ids=["empty", "list", "broken", "other"])
def test_a_comparison_does_not_go_on_from_another_file(tmp_path, content):
    """A JSON file without a comparison is refused and stays."""
    (tmp_path / "mine.json").write_text(content)
    with pytest.raises(ComparisonError, match=r"mine\.json holds no comparison: name another output, or remove"):
        Sweep(tmp_path / "mine", {})
    assert (tmp_path / "mine.json").read_text() == content


@pytest.mark.parametrize("content", ["", "[]", '{"request": 5}'], ids=["empty", "list", "other"])
def test_a_tuning_does_not_go_on_from_another_file(run, model, tmp_path, content):
    """A file without a tuning's state is refused and stays."""
    (tmp_path / "mine-tuning").mkdir()
    (tmp_path / "mine-tuning" / "state.json").write_text(content)
    result = run("tune", "--target-psnr", 30, "-m", model, *SMALL, "-o", "mine.yaml", "--quiet")
    assert_refused(result, "mine-tuning/state.json holds no tuning: name another output, or remove the folder")
    assert (tmp_path / "mine-tuning" / "state.json").read_text() == content


def test_the_package_runs_as_a_module():
    """``python -m dit_accel`` is the command."""
    command = [sys.executable, "-m", "dit_accel", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("dit-accel ")
