"""Mistaken and hostile arguments: one short line that names the option, exit code 2, and no file is written."""

import os
import shlex

import pytest
from PIL import Image

DIGITS, LONG, LONG_SHOWN = "9" * 5000, "a" * 5000, "a… (5,0"
LINES = "--prompts two.txt --output-dir out"
# By the beginning of a command: its other words, and a part of the message. The model does not exist.
AT_ONCE = {
    "generate -m nowhere/at-all": [
        ("", "--prompt: must be given"),
        ("-p a --prompts two.txt", "--prompts: can't be combined with --prompt"),
        ("--prompts two.txt", "--output-dir: must name a folder"),
        ("-p a --output-dir out", "--output-dir: needs --prompts"),
        ("-p a --batch-size 2", "--batch-size: needs --prompts"),
        (f"{LINES} --batch-size 2 --image picture.png", "--batch-size: can't be used with --image"),
        (f"{LINES} --compare", "--compare: needs --prompt;"),
        (f"{LINES} --output a.png", "--output: needs --prompt;"),
        (f"{LINES} --json a", "--json: needs --prompt;"),
        (f"{LINES} --plot a.png", "--plot: needs --prompt;"),
        (f"{LINES} --num-images 2", "--num-images: needs --prompt;"),
        ("--prompt caf\udce9", r"--prompt: must be UTF-8, got 'caf\udce9'"),
        ("-p a --output=caf\udce9.png", "--output: must be UTF-8"),
        ("-p a --engine ray", "--engine: ray needs --prompts"),
        (f"{LINES} --actors 2", "--actors: needs --engine ray"),
        (f"{LINES} --engine ray --device cuda:1", "--device: must be cuda or cpu with --engine ray"),
        (f"{LINES} --engine ray --parallel ulysses=2", "--parallel: can't be used with --engine ray"),
    ],
    "generate -p a -m nowhere/at-all": [
        ("--set order=[1", "is not valid YAML"),
        ("--preset balanced --set order=2001-99-99", "a valid integer, got '2001-99-99'"),
        (f"--set {LONG}", f"--set: must be KEY=VALUE, e.g. target_error=0.1, got '{'a' * 99}… (5,002"),
        ("--set =1", "--set: must be KEY=VALUE"),
        ("--set ordr=2", "unknown keyword 'ordr' (did you mean 'order'?)"),
        ("--call height", "--call: must be NAME=VALUE"),
        ("--preset flux-balansed", "did you mean 'balanced'"),
        ("--preset missing.yaml", "missing.yaml does not exist"),
        ("--preset none --compare", "--compare: needs an accelerated run"),
        ("--preset none --set order=2", "--set: needs an accelerated run"),
        ("--preset none --plot p.png", "--plot: needs an accelerated run"),
        ("--guidance nan", "--guidance: must be a finite number, got nan"),
        ("-m missing", "--model: missing is not a pipeline's folder"),
        ("-m ./missing", "--model: ./missing is not a pipeline's folder"),
        ("-m .", "model_index.json is missing"),
        (f"-m {LONG}", LONG_SHOWN),
        ("-m loop.yaml", "--model: loop.yaml is not a pipeline's folder"),
        ("-m '~nobody-of-that-name/x'", "is not a pipeline's folder"),
        ("--image missing.png", "--image: missing.png can't be read as an image: No such file"),
        ("--image broken.png", "--image: broken.png can't be read as an image"),
        ("--image .", "--image: . can't be read as an image: Is a directory"),
        ("-o o.txt", "--output: o.txt must end in .png"),
        ("-o o.wmf", "--output: o.wmf must end in .png"),
        ("-o missing/o.png", "missing does not exist"),
        ("-o loop.png", "--output: loop.png can't be written: Too many levels"),
        (f"-o {LONG}.png", "(5,004 characters) can't be written: File name too long"),
        (f"-o {'a' * 248}.png --compare", "can't be written: File name too long"),
        ("-o picture.png", "--output: picture.png exists; name another file, or replace it with"),
        ("-o n.png --num-images 2", "--output: n-1.png exists"),
        ("-o c.png --compare", "--output: c-compare.png exists"),
        ("-o clip.mp4 --compare", "clip-plain.mp4 is a folder"),
        ("-o . --num-images 2", "--output: . has no name"),
        ("--json picture.png", "--json: picture.png exists"),
        ("--plot picture.png", "--plot: picture.png exists"),
        ("--plot p.xyz", "--plot: p.xyz must end in one of .png, .jpg, .webp, .pdf, .svg"),
    ],
    "tune -m nowhere/at-all": [
        ("", "one target"),
        ("--target-psnr 30 --target-error 0.1", "one target"),
        ("--target-psnr inf", "target_psnr must be positive and finite, got inf"),
        ("--target-psnr 30 --preset none", "--preset: a plain run has no thresholds"),
        ("--target-psnr 30 --preset flux-balance", "did you mean 'balanced'"),
        ("--target-psnr 30 --preset balanced --set skip.tau=1", "unknown key 'skip.tau'"),
        ("--target-psnr 30 --prompts empty.txt", "--prompts: empty.txt holds no prompts"),
        ("--target-psnr 30 --prompts /dev/zero", "/dev/zero can't be read: it has more than"),
        ("--target-psnr 30 -o no/mine.yaml", "no does not exist"),
        ("--target-psnr 30 -o mine.txt", "--output: mine.txt must end in .yaml"),
        ("--target-psnr 30 -o mine.yaml", "--output: mine.yaml exists"),
        ("--target-psnr 30 --preset a.yaml -o ./b/../a.yaml", "is the preset to start from"),
        ("--target-psnr 30 --preset ./mine.yaml -o mine.yaml --force", "mine.yaml is the preset to start from"),
    ],
    "compare -m nowhere/at-all": [
        ("", "--prompt: or --prompts must be given, and not both"),
        ("-p a --prompts b.txt", "--prompt: or --prompts must be given, and not both"),
        ("-p a --presets ''", "--presets: is empty"),
        ("-p a --presets flux-balance", "did you mean 'balanced'"),
        ("-p a --peers magic", "--peers: 'magic' is unknown; methods are taylorseer, "),
        ("--prompts missing.txt", "--prompts: missing.txt can't be read"),
        ("-p a -o no/where", "no does not exist"),
        ("-p a -o mine", "--output: mine.md exists"),
        ("-p a -o .", "--output: . is a folder; give the stem of files in it"),
    ],
    "serve -m nowhere/at-all": [
        ("--allow-host http://here", "without scheme, port and *"),
        ("--allow-host here:80", "without scheme, port and *"),
        ("--batch-size 2 --call image=in.png", "--batch-size: must be 1 with --call image"),
        ("--api-key-file missing.txt", "--api-key-file: missing.txt can't be read: No such file"),
        ("--api-key-file empty.txt", "--api-key-file: empty.txt holds no keys; write one per line"),
        ("--api-key-file two.txt", "two.txt must hold one key per line, each of at least 16 characters"),
        ("--actors 2", "--actors: needs --engine ray"),
        ("--engine ray --gpus 2", "--gpus: can't be used with --engine ray"),
        ("--engine ray --device mps", "--device: must be cuda or cpu with --engine ray, got mps"),
    ],
    "recommend": [
        ("--model flux --gpu voodoo2", "gpu must be one of t4, v100, 2080-ti"),
    ],
    "presets": [
        ("schema -o mine.yaml", "--output: mine.yaml exists"),
        ("show nothing", "unknown preset 'nothing'"),
        ("show ../../pyproject", "unknown preset '../../pyproject'"),
        ("show bad.yml", "got the file bad.yml; see dit-accel presets check"),
        ("check balanced", "got the shipped preset balanced; see dit-accel presets show"),
        ("check bad.yml", "warm_up"),
    ],
}
# Of `generate` with a model that has loaded.
ONCE_LOADED = {
    "flux": [
        ("-o o.mp4", "o.mp4 must end in .png"),
        ("--num-frames 9", "--num-frames: FluxPipeline takes no"),
        ("--fps 8", "--fps: FluxPipeline makes images"),
        ("--image picture.png", "FluxPipeline takes no image"),
        ("--device cuda:99", "--device: "),
        ("--device gpu", "--device: 'gpu' can't run here"),
        ("--device meta", "--device: 'meta' can't run here"),
        ("-o a.png --json ./a.png", "--json: a.png is also the file of output"),
        ("-o a.png --json a-plain.png --compare", "--json: a-plain.png is also the file of output"),
        ("--json output.png", "--json: output.png is also the file of output"),
        ("--json a.png --plot a.png", "--json: a.png is also the file of plot"),
        ("--call sigmas=far", "FluxPipeline rejects its arguments: could not convert string"),
        ("--call max_sequence_lenght=8", "no max_sequence_lenght (did you mean 'max_sequence_length'?)"),
        ("--height 64 --call height=64", "height is already set by its own option"),
        ("--call generator=1", "generator is already set by the seed"),
        ("--call max_sequence_length=2.7", "max_sequence_length must be a whole number, got 2.7"),
        ("--call max_sequence_length=long", "max_sequence_length must be a number or a bool, such as"),
    ],
    "flux-schnell": [("--guidance 3", "no guidance embedding")],
    "sd3": [("--preset flux-fora --compare", "for flux models"), ("--height 33", "divisible by")],
    "wan": [
        ("-o picture-2.png", "--output: picture-2.png must end in .mp4 or .gif, or be a folder"),
        ("-o .", ". has no name"),
        ("-o run --compare", "run-plain has files that are no frames (0007.png)"),
        ("-o shot --compare", "shot-compare is a file, which"),
        ("-o tape.gif --compare", "tape-strip.png is a folder"),
        ("--num-images 2", "--num-images: WanPipeline makes one video per run"),
        ("--image picture.png", "WanPipeline takes no image"),
        ("--negative-prompt blue --guidance 1", "WanPipeline uses it only with guidance above 1"),
    ],
    "wan-i2v": [("", "--image: WanImageToVideoPipeline needs an input image")],
}


def rows(table):
    return [
        pytest.param(begin, words, complaint, id=f"{begin.split()[0]} {words[:60]}")
        for begin, cases in table.items()
        for words, complaint in cases
    ]


@pytest.fixture
def refuse(run, tmp_path):
    """Run a command among files to trip over, which refuses it in one short line and changes no file."""
    Image.new("RGB", (16, 16)).save(tmp_path / "picture.png")
    for folder in ("clip-plain.mp4", "tape-strip.png", "run-plain", "models"):
        (tmp_path / folder).mkdir()
    for name in ("n-1.png", "c-compare.png", "file", "shot-compare", "run-plain/0007.png", "models/index.json"):
        (tmp_path / name).touch()
    texts = {"two.txt": "a cat\na dog\n", "empty.txt": "", "mine.yaml": "base: balanced\n", "mine.md": ""}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bad.yml").write_text("schedule: {control: adaptive, warm_up: 3}\n")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(50))
    for name in ("loop.png", "loop.yaml"):
        os.symlink(name, tmp_path / name)

    def files():
        return {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*") if not path.is_dir()}

    def invoke(begin, words, complaint):
        before = files()
        result = run(*shlex.split(begin), *shlex.split(words))
        assert result.exit_code == 2, result.output
        line = result.stderr.splitlines()[-1]
        assert line.startswith("error: ") and complaint in line
        assert len(line) < 1200 and line.isprintable() and "Traceback" not in result.output
        assert files() == before
        return result.stderr

    return invoke


@pytest.mark.parametrize(("begin", "words", "complaint"), rows(AT_ONCE))
def test_it_is_told_before_a_model_is_looked_for(refuse, begin, words, complaint):
    assert len(refuse(begin, words, complaint).splitlines()) == 1


@pytest.mark.parametrize(("model", "words", "complaint"), rows(ONCE_LOADED))
def test_what_a_model_does_not_take_is_told(refuse, saved, model, words, complaint):
    refuse(f"generate -p a -m {saved(model)}", words, complaint)


@pytest.mark.parametrize(
    "command",
    ["inspect -p a -o folder", "compare -p a --peers none", "tune --target-psnr 40"],
    ids=lambda words: words[:7],
)
def test_every_command_names_arguments_that_can_not_be_passed(run, model, command):
    result = run(*command.split(), "-m", model, "--height", 64, "--call", "height=64")
    assert result.exit_code == 2 and "--call: height is already set by its own option" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        *(f"--seed {2**64}", f"--seed {DIGITS}", f"--steps {10**9}", "--steps 1e9", f"--height {10**8}"),
        *(f"--width {10**8}", f"--num-images {10**12}", f"--num-frames {10**9}", f"--repeats {10**9}"),
        *("--fps nan", "--fps inf"),
    ],
    ids=lambda words: words[:20],
)
def test_numbers_beyond_reason_are_refused_by_their_option(run, tmp_path, words):
    """The parser refuses them before any work."""
    result = run("generate", "-p", "a", "-m", "nowhere/at-all", *words.split())
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert words.split()[0] in result.stderr and len(result.stderr) < 2000


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        ('{"_class_name": "NoSuch"}', "can't be loaded: AttributeError: module diffusers has no attribute NoSuch"),
        ('["FluxPipeline"]', "model/model_index.json must hold a JSON object, got ['FluxPipeline']"),
        ('{"_class_name": ["FluxPipeline"]}', "model can't be loaded: "),
        ("[" * 100_000, "model/model_index.json can't be read: "),
        ("{", "model/model_index.json can't be read: "),
        ('{"_class_name": "FluxPipeline", "transformer": 5}', "can't be loaded: TypeError: "),
    ],
    ids=["unknown-class", "list", "list-of-classes", "deep", "broken", "number-as-part"],
)
def test_a_folder_that_is_no_pipeline_is_refused(refuse, tmp_path, index, complaint):
    """Any error of diffusers gives one line."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text(index)
    refuse("generate -p a -m model", "", complaint)


@pytest.mark.parametrize("content", ["", "[]", '{"request": 5}'], ids=["empty", "list", "other"])
def test_a_tuning_does_not_go_on_from_another_file(refuse, model, tmp_path, content):
    (tmp_path / "new-tuning").mkdir()
    (tmp_path / "new-tuning" / "state.json").write_text(content)
    complaint = "new-tuning/state.json holds no tuning: name another output, or remove the folder"
    refuse(f"tune --target-psnr 30 -m {model}", "--steps 2 --height 64 --width 64 -o new.yaml", complaint)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"settings": 5}'], ids=["empty", "list", "broken", "other"])
def test_a_comparison_does_not_go_on_from_another_file(refuse, model, tmp_path, content):
    (tmp_path / "new.json").write_text(content)
    complaint = "new.json holds no comparison: name another output, or remove"
    refuse(f"compare -p a -m {model}", "--peers none -o new", complaint)


def test_inspect_knows_its_layers_before_it_writes(run, model, tmp_path):
    """A layer without symbols gives an error that lists layers with symbols; the folder stays empty."""
    command = ("inspect", "-p", "a", "-m", model, "--preset", "flux-flashomni-paper", "--quiet", "--output")
    sized = ("--steps", 12, "--height", 64, "--width", 64)
    refused = run(*command, "run", *sized, "--layer", "nope")
    assert refused.exit_code == 2
    assert "--layer: no symbols for layer 'nope'; layers: transformer_" in refused.stderr
    assert list((tmp_path / "run").iterdir()) == []
    (tmp_path / "run" / "density.png").touch()
    assert "--output: run/density.png exists" in run(*command, "run").stderr
    assert "run/density.png can't be created: File exists" in run(*command, "run/density.png").stderr
