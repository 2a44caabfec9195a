"""Every option of every command has its documented effect and no other; calls into the library are recorded."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
from PIL import Image

from dit_accel.cli import app
from dit_accel.presets import load_preset

REPOSITORY = Path(__file__).parents[2]
PICTURES, CLIPS = "some/pictures", "some/clips"


class Acts(NamedTuple):
    """Effect of an option: ``changes`` of a command's calls with what is ``given`` in place of what it ``replaces``."""

    given: tuple
    changes: dict
    model: str | None = PICTURES
    replaces: tuple[str, ...] = ()


def shared(call: str, preset: str = "preset") -> dict[str, Acts]:
    """Options of every command that runs a pipeline.

    Args:
        call: of names under which arguments of the pipeline's call are noted.
    """
    quality = load_preset("quality").schedule.target_error
    return {
        "--model": Acts(("--model", "other/pictures"), {"model": "other/pictures"}),
        "--call": Acts(("--call", "max_area=8"), {f"{call}max_area": 8, "inputs": ["max_area"]}),
        "--steps": Acts(("--steps", 7), {f"{call}num_inference_steps": 7}),
        "--height": Acts(("--height", 48), {f"{call}height": 48}),
        "--width": Acts(("--width", 80), {f"{call}width": 80}),
        "--num-frames": Acts(("--num-frames", 9), {f"{call}num_frames": 9}, CLIPS),
        "--image": Acts(("--image", "grey.png"), {f"{call}image": (99, 99, 99)}),
        "--preset": Acts(("--preset", "quality"), {preset: "quality", "target_error": quality}),
        "--set": Acts(("--set", "target_error=0.5"), {"target_error": 0.5}),
        "--seed": Acts(("--seed", 5), {"seed": 5}),
        "--dtype": Acts(("--dtype", "float16"), {"dtype": "float16"}),
        "--device": Acts(("--device", "cuda:1"), {"device": "cuda:1"}),
        "--offload": Acts(("--offload", "sequential"), {"offload": "sequential"}),
        "--lora": Acts(("--lora", "owner/name:0.5"), {"loras": {"owner/name": 0.5}}),
        "--quantize": Acts(("--quantize", "int8"), {"quantize": "int8"}),
        "--quiet": Acts(("--quiet",), {"prints": False}),
    }


BATCH = "tests/cli/test_batch.py::test_"
COMMAND = "tests/cli/test_cli.py::test_"
FORCED = "tests/cli/test_written.py::test_force_is_what_replaces_files"
BASES = {
    "generate": ("generate", "--prompt", "a fox"),
    "inspect": ("inspect", "--prompt", "a fox", "--output", "run"),
    "tune": ("tune", "--target-psnr", 30),
    "compare": ("compare", "--prompt", "a fox"),
    "recommend": ("recommend",),
    "app": ("app",),
    "serve": ("serve",),
}
LORAS = "tests/serving/test_loras.py::test_loras_of_jobs_leave_the_plain_model"
GPUS_OF_RAY = "tests/serving/test_ray.py::test_actors_take_the_devices_that_there_are"
# By command and option: its changes, or the test that shows them.
OPTIONS: dict[str, dict[str, Acts | str]] = {
    "generate": shared("call.")
    | {
        "--prompt": Acts(("--prompt", "an owl"), {"call.prompt": "an owl"}),
        "--guidance": Acts(("--guidance", 2), {"call.guidance_scale": 2.0}),
        "--negative-prompt": Acts(
            ("--negative-prompt", "blue", "--guidance", 4), {"call.negative_prompt": "blue", "call.true_cfg_scale": 4.0}
        ),
        "--fps": Acts(("--fps", 12.5), {"fps": 12.5}, CLIPS),
        "--num-images": Acts(
            ("--num-images", 2), {"call.num_images_per_prompt": 2, "files": {"output-0.png", "output-1.png"}}
        ),
        "--output": Acts(("--output", "o.png"), {"files": {"o.png"}}),
        "--stream": "tests/cli/test_stream.py::test_the_file_is_that_of_a_run_without_it",
        "--compare": Acts(
            ("--compare",),
            {"files": {"output-2.png", "output-2-plain.png", "output-2-compare.png"}, "repeats": 3, "whole": False},
        ),
        "--plot": Acts(("--plot", "p.svg"), {"files": {"output-2.png", "p.svg"}}),
        "--json": Acts(("--json", "j.json"), {"files": {"output-2.png", "j.json"}}),
        "--force": Acts(("--force",), {"files": {"output.png"}}),
        "--repeats": Acts(
            ("--compare", "--repeats", 5),
            {"files": {"output-2.png", "output-2-plain.png", "output-2-compare.png"}, "repeats": 5, "whole": False},
        ),
        "--parallel": "tests/cli/test_parallel.py::test_the_pipeline_is_shared_as_asked",
        "--prompts": f"{BATCH}every_line_gets_a_file_and_a_line_of_the_manifest",
        "--output-dir": f"{BATCH}every_line_gets_a_file_and_a_line_of_the_manifest",
        "--batch-size": f"{BATCH}neighbours_share_a_call_and_get_what_they_get_alone",
        "--engine": "tests/serving/test_ray.py::test_a_line_that_fails_every_time_is_given_up",
        "--actors": GPUS_OF_RAY,
        "--loras": LORAS,
    },
    "inspect": shared("call.")
    | {
        "--prompt": Acts(("--prompt", "an owl"), {"call.prompt": "an owl"}),
        "--output": Acts(("--output", "other"), {"folder": "other"}),
        "--layer": Acts(("--layer", "transformer_blocks.1"), {"layer": "transformer_blocks.1"}),
        "--force": FORCED,
    },
    "tune": shared("arguments.")
    | {
        "--target-psnr": Acts(("--target-psnr", 31), {"target_psnr": 31.0}),
        "--target-error": Acts(
            ("--target-error", 0.1), {"target_error": 0.1, "target_psnr": None}, replaces=("--target-psnr",)
        ),
        "--coverage": Acts(("--coverage", 0.5), {"coverage": 0.5}),
        "--preset": Acts(("--preset", "quality"), {"base": "quality"}),
        "--set": Acts(("--set", "order=2"), {"forecast": {"order": 2}}),
        "--output": Acts(
            ("--output", "mine.yaml"), {"state": "mine-tuning", "written": "mine.yaml", "plotted": "mine.png"}
        ),
        "--prompts": Acts(("--prompts", "two.txt"), {"prompts": ["a cat", "a dog"]}),
        "--tuning-prompts": Acts(("--tuning-prompts", 3), {"tuning_prompts": 3}),
        "--held-out-prompts": Acts(("--held-out-prompts", 5), {"held_out_prompts": 5}),
        "--evaluations": Acts(("--evaluations", 6), {"evaluations": 6}),
        "--force": FORCED,
    },
    "compare": {name: acts for name, acts in shared("arguments.").items() if name not in ("--preset", "--set")}
    | {
        "--offload": Acts(("--offload", "model"), {"offload": "model", "whole": True}),  # a call's start uploads too
        "--prompt": Acts(("--prompt", "an owl"), {"prompts": [("an owl", 0)]}),
        "--prompts": Acts(("--prompts", "two.txt"), {"prompts": [("a cat", 0), ("a dog", 1)]}, replaces=("--prompt",)),
        "--seed": Acts(("--seed", 5), {"prompts": [("a fox", 5)], "tuning_seed": 5}),
        "--presets": Acts(("--presets", "turbo, exact"), {"presets": ["turbo", "exact"]}),
        "--peers": Acts(("--peers", "dbcache"), {"peers": ["dbcache"]}),
        "--settings": Acts(("--settings", 2), {"settings": 2}),
        "--output": Acts(("--output", "mine"), {"stem": "mine"}),
        "--images": "tests/cli/test_compare.py::test_a_comparison_is_written_and_goes_on",
        "--repeats": Acts(("--repeats", 5), {"repeats": 5}),
        "--force": FORCED,
    },
    "report": dict.fromkeys(  # all but its own options are handed to `compare` together
        [name for name in shared("") if name not in ("--call", "--preset", "--set", "--seed")]
        + ["--minutes", "--output", "--check"],
        "tests/cli/test_report.py::test_a_report_is_whole_until_something_is_changed",
    ),
    "recommend": {
        "--model": Acts(("--model", "wan"), {"model": "wan"}),
        "--gpu": Acts(("--gpu", "H100"), {"gpu": "H100"}),
        "--steps": Acts(("--steps", 7), {"steps": 7}),
        "--height": Acts(("--height", 48), {"height": 48}),
        "--width": Acts(("--width", 80), {"width": 80}),
        "--frames": Acts(("--frames", 9), {"frames": 9}),
        "--lora": Acts(("--lora", "owner/name:0.5"), {"loras": {"owner/name": 0.5}}),
        "--quantized": Acts(("--quantized",), {"quantized": True}),
        "--distilled": Acts(("--distilled",), {"distilled": True}),
        "--gpus": Acts(("--gpus", 2), {"gpus": 2}),
    },
    "app": {name: shared("")[name] for name in ("--dtype", "--device", "--offload", "--lora", "--quantize")}
    | {
        "--model": Acts(("--model", "other/pictures"), {"model": "other/pictures", "offered": "other/pictures"}),
        "--host": Acts(("--host", "0.0.0.0"), {"server_name": "0.0.0.0", "any_model": False}),
        "--port": Acts(("--port", 8123), {"server_port": 8123}),
        "--share": Acts(("--share",), {"share": True, "any_model": False, "opened": "http://public/"}),
    },
    "serve": {
        name: acts
        for name, acts in shared("").items()
        if name not in ("--steps", "--height", "--width", "--num-frames", "--image", "--seed")
    }
    | {
        "--model": "tests/cli/test_serve.py::test_models_have_the_names_that_clients_use",
        "--max-models": "tests/serving/test_models.py::test_the_models_used_last_stay",
        "--host": Acts(("--host", "0.0.0.0"), {"server_name": "0.0.0.0", "hosts": set()}),
        "--allow-host": Acts(("--allow-host", "Here"), {"hosts": {"127.0.0.1", "localhost", "::1", "here"}}),
        "--port": Acts(("--port", 8123), {"server_port": 8123}),
        "--gpus": "tests/cli/test_serve.py::test_each_gpu_has_a_process",
        "--engine": "tests/cli/test_serve.py::test_with_ray_each_gpu_of_the_cluster_has_an_actor",
        "--actors": GPUS_OF_RAY,
        "--loras": LORAS,
        "--api-key-file": Acts(("--api-key-file", "keys.txt"), {"keys": ["a-long-enough-key", "another-long-key"]}),
        "--batch-size": "tests/serving/test_sharing.py::test_images_equal_those_made_alone",
        "--queue": Acts(("--queue", 3), {"queue": 3}),
        "--max-side": Acts(("--max-side", 512), {"side": 512}),
        "--max-steps": Acts(("--max-steps", 30), {"steps": 30}),
        "--max-frames": Acts(("--max-frames", 49), {"frames": 49}),
        "--max-videos": Acts(("--max-videos", 9), {"videos": 9}),
        "--max-video-bytes": Acts(("--max-video-bytes", 2**24), {"video_bytes": 2**24}),
        "--max-images": Acts(("--max-images", 1), {"images": 1}),
        "--max-body": Acts(("--max-body", 2048), {"body": 2048}),
        "--max-upload": Acts(("--max-upload", 2048), {"upload": 2048}),
        "--max-seconds": Acts(("--max-seconds", 60), {"seconds": 60.0}),
        "--max-step-seconds": Acts(("--max-step-seconds", 60), {"patience": 60.0}),
        "--log-json": Acts(("--log-json",), {"log_json": True}),
    },
    "presets list": {
        "--model": f"{COMMAND}presets_list_filters_by_model",
        "--all": f"{COMMAND}presets_list_has_every_preset_with_its_figures",
    },
    "presets schema": {"--output": f"{COMMAND}schema_is_json_and_can_be_written", "--force": FORCED},
    "presets show": {},
    "presets check": {},
    "env": {"--check": f"{COMMAND}env_checks_devices"}
    | dict.fromkeys(("--tune", "--minutes"), f"{COMMAND}env_times_sizes"),
}
ACTING = {
    f"{command} {option}": (command, acts)
    for command, options in OPTIONS.items()
    for option, acts in options.items()
    if isinstance(acts, Acts)
}


def commands(group, path=()):
    for name, each in group.commands.items():
        if hasattr(each, "commands"):
            yield from commands(each, (*path, name))
        else:
            yield " ".join((*path, name)), each


def test_every_option_is_in_the_table():
    """Every new option must show its effect; tests named in the table exist."""
    there = {
        name: {param.opts[0] for param in command.params if param.param_type_name == "option"}
        for name, command in commands(typer.main.get_command(app))
    }
    assert {name: set(options) for name, options in OPTIONS.items()} == there
    for named in (each for options in OPTIONS.values() for each in options.values() if isinstance(each, str)):
        file, _, test = named.partition("::")
        assert re.search(rf"^def {test}\(", (REPOSITORY / file).read_text(), re.MULTILINE), named


@pytest.mark.parametrize(("command", "acts"), ACTING.values(), ids=ACTING)
def test_an_option_changes_what_it_says_and_nothing_else(handed_on, command, acts):
    """The option changes these parts of the command's calls, output and files, and no other part."""
    base = list(BASES[command])
    for option in acts.replaces:
        place = base.index(option)
        del base[place : place + 2]
    image = ("--image", "black.png") if acts.model == PICTURES and command not in ("recommend", "app", "serve") else ()
    without = handed_on(*BASES[command], "--model", acts.model, *image)
    given = handed_on(*base, "--model", acts.model, *image, *acts.given)
    without.pop("facts", None), given.pop("facts", None)
    changes = {name: given.get(name) for name in without | given if given.get(name) != without.get(name)}
    assert changes == acts.changes


@pytest.mark.parametrize(
    "option", ["call", "steps", "height", "width", "num-frames", "image", "seed", "lora", "quantize", "model"]
)
def test_a_comparison_goes_on_with_the_same_settings_alone(run, reached, tmp_path, option):
    """The file holds every setting that affects the measurement, by option name, so another value is refused."""
    for index, name in enumerate(("black.png", "grey.png")):
        Image.new("RGB", (16, 16), (99 * index,) * 3).save(tmp_path / name)
    acts, facts = OPTIONS["compare"][f"--{option}"], []
    image = ("--image", "black.png") if acts.model == PICTURES else ()
    for given in ((), acts.given):
        result = run(*BASES["compare"], "--model", acts.model, *image, *given)
        assert result.exit_code == 0, result.output
        facts.append(reached["facts"])
    names = {name for name in facts[0] | facts[1] if facts[0].get(name) != facts[1].get(name)}
    assert names == {option}
    assert facts[0]["dtype"] == "torch.float32" and facts[0]["prompts"] == ["a fox"]


@pytest.mark.parametrize(
    ("command", "name", "value"),
    [
        (("generate", "-p", "a"), "target_error", 0.77),
        (("inspect", "-p", "a", "-o", "run"), "target_error", 0.77),
        (("tune", "--target-psnr", 30), "forecast", {"order": 2}),
    ],
    ids=["generate", "inspect", "tune"],
)
def test_commands_use_what_slas_fine_tuning_wrote_beside_a_lora(handed_on, monkeypatch, command, name, value):
    """A preset that runs SLA uses the files."""
    asked = []
    monkeypatch.setattr("dit_accel.cli.options.with_projections", lambda *given: asked.append(given) or {name: value})
    seen = handed_on(*command, "-m", "some/pictures", "--image", "black.png", "--lora", "owner/name:0.5")
    assert asked == [(None, {}, ["owner/name", "some/pictures"])] and seen[name] == value
