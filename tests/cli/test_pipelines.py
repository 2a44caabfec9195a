"""Arguments of a command's pipeline calls, reports of pipeline errors, and jobs of a file's lines."""

import inspect
import logging
import re
import sys
from types import SimpleNamespace

import diffusers
import httpx
import pytest
import torch
import typer
from huggingface_hub import errors as hub

from dit_accel import cli, errors, load_preset, restore_pipeline
from dit_accel.cli import env, options
from dit_accel.cli.options import RunOptions, parse_call
from dit_accel.errors import ArgumentError, DitAccelError, UnsupportedError
from dit_accel.pipeline import preset_for
from dit_accel.serving.failures import OutOfMemoryError, explained_failures, explained_loading
from dit_accel.serving.media import medium_of
from dit_accel.serving.pipelines import call_arguments, start_pipeline, timed_call
from dit_accel.serving.processes import TALKATIVE
from dit_accel.serving.prompts import Job, batches, read_jobs, read_prompts
from dit_accel.tools import demo
from dit_accel.tools.advise.identify import TABLE
from dit_accel.tools.demo import demo_arguments, demo_path
from tests.models.tiny import built
from tests.tiny import tiny_pipeline


def pipe_that_takes(signature):
    scope = {}
    exec(f"def call({signature}): pass", scope)
    return SimpleNamespace(__call__=scope["call"])  # commands read the signature of the attribute


def test_what_is_given_replaces_a_demo_models_own_arguments():
    """Options override the model's own arguments, and --call overrides both; other arguments stay the model's own."""
    pipe, own = tiny_pipeline("flux"), demo_arguments(demo_path("demo-flux"))
    assert call_arguments(pipe, "demo-flux", {"steps": None}) == own
    assert call_arguments(pipe, "demo-flux", {"steps": 3}) == own | {"num_inference_steps": 3}
    assert call_arguments(pipe, "demo-flux", {"steps": 3}, {next(iter(own)): 7}).items() >= {next(iter(own)): 7}.items()
    assert call_arguments(pipe, "some/model", {"guidance": 0, "height": None}) == {"guidance_scale": 0}
    assert call_arguments(tiny_pipeline("sd3"), "some/model", {"guidance": 4.0}) == {"guidance_scale": 4.0}


def test_the_frame_rate_reaches_pipelines_with_sound():
    """Their sound then lasts as long as the video; --call overrides it, and silent pipelines ignore it."""
    for name, key in (("ltx2", "frame_rate"), ("cosmos3", "fps")):
        pipe, _ = built(name)
        assert call_arguments(pipe, "some/model", {"fps": 12.0}) == {key: 12.0}
        assert call_arguments(pipe, "some/model", {"fps": 12.0}, {key: 30}) == {key: 30}
        assert call_arguments(pipe, "some/model", {"fps": None}) == {}
    assert call_arguments(tiny_pipeline("ltx"), "some/model", {"fps": 12.0}) == {}


def test_call_takes_whatever_a_pipeline_takes():
    """Names that its signature has, or any where it takes any; numbers where it has one by default."""
    strict, open_to_all = (
        pipe_that_takes(f"prompt=None, num_inference_steps=9, guidance_rescale=0.0, sigmas=None{more}")
        for more in ("", ", **kwargs")
    )
    assert call_arguments(open_to_all, "some/model", {}, {"anything": 1}) == {"anything": 1}
    with pytest.raises(ArgumentError, match="no anything; it takes guidance_rescale, num_inference_steps, sigmas"):
        call_arguments(strict, "some/model", {}, {"anything": 1})
    for value in ("much", {"a": 1}):
        with pytest.raises(ArgumentError, match=r"guidance_rescale must be a number or a bool, such as 0\.0"):
            call_arguments(strict, "some/model", {}, {"guidance_rescale": value})
    assert call_arguments(strict, "some/model", {}, {"sigmas": {"a": 1}}) == {"sigmas": {"a": 1}}


@pytest.mark.parametrize("preset, told", [("exact", "accelerated"), (None, "plain")])
@pytest.mark.parametrize("quiet", [False, True])
def test_the_bar_of_a_pipeline_says_which_run_it_is_of(pipe, preset, told, quiet):
    start_pipeline(pipe, preset and load_preset(preset), quiet)
    assert pipe._progress_bar_config == {"disable": quiet, "desc": told} and hasattr(pipe, "dit_accel") == bool(preset)
    restore_pipeline(pipe) if preset else None


def check_inputs(error):
    raise error


def test_a_refusal_is_told_and_a_defect_keeps_its_traceback():
    """Errors of a pipeline's own checks are the user's; the same error from elsewhere is a bug."""
    for kind in (ValueError, TypeError):
        with pytest.raises(UnsupportedError, match="dict rejects its arguments: not so"), explained_failures(dict):
            check_inputs(kind("not so"))
        with pytest.raises(kind, match=r"^not so$"), explained_failures(dict):
            raise kind("not so")
    with pytest.raises(RuntimeError, match="device-side assert"), explained_failures(dict):
        raise RuntimeError("device-side assert")
    with pytest.raises(KeyError), explained_failures(dict):
        check_inputs(KeyError("a"))


class Strict:
    """A pipeline with a check in its call, as diffusers' image-to-image pipelines check `strength`."""

    @torch.no_grad()
    def __call__(self, value=None):
        if value is None:
            raise ValueError("not so")
        return int(value)


def test_a_check_in_the_call_itself_is_a_refusal():
    """An error from a function that the call runs is a bug."""
    with pytest.raises(UnsupportedError, match="Strict rejects its arguments: not so"), explained_failures(Strict):
        Strict()()
    with pytest.raises(TypeError, match="int"), explained_failures(Strict):
        Strict()([])


def test_a_size_beyond_the_models_positions_is_refused():
    """Stable Diffusion 3 has a table of positions, and checks the size within its transformer."""
    pipe = tiny_pipeline("sd3")
    side = 16 * (pipe.transformer.config.pos_embed_max_size + 1)
    with pytest.raises(UnsupportedError, match="cannot be greater than `pos_embed_max_size`"):
        timed_call(pipe, {"prompt": "a fox", "height": 32, "width": side, "num_inference_steps": 1}, 0)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), MemoryError("9 GiB")])
def test_memory_that_does_not_suffice_is_no_mistake_in_a_name(error):
    """The error keeps its type while a model is loaded, and in its own checks."""
    with pytest.raises(type(error)), explained_loading("model", "some/model"):
        raise error
    told = rf"try --offload model.* \({str(error) or 'MemoryError'}\)$"
    with pytest.raises(OutOfMemoryError, match=told), explained_failures(dict):
        check_inputs(error)


def of_hub(kind, said):
    """An error of the Hub, as diffusers hides it behind a reference to the stack trace."""
    answer = httpx.Response(401, headers={"X-Error-Message": said}, request=httpx.Request("GET", "https://hub/m"))
    hidden = OSError("Cannot load model: check out the root cause in the stacktrace above. " + "and more " * 60)
    hidden.__cause__ = kind(said, response=answer) if issubclass(kind, hub.HfHubHTTPError) else kind(said)
    return hidden


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (of_hub(hub.GatedRepoError, "await a review"), "await a review; .*licence on https://.*/model, .*HF_TOKEN"),
        (of_hub(hub.RepositoryNotFoundError, "none"), "none; check the name .* https://.*/some/model, .* login`"),
        (of_hub(hub.HfHubHTTPError, "429 Too Many Requests"), "the Hub answers: 429 Too Many Requests"),
        (of_hub(httpx.ConnectError, "no route"), r"the Hub can't be reached \(ConnectError: no route\), and there is"),
        (of_hub(hub.OfflineModeIsEnabled, "offline"), r"can't be reached \(OfflineModeIsEnabled: offline\)"),
        (ValueError(f"{'long ' * 50}reason\nand more"), "can't be loaded: ValueError: long .* reason$"),
    ],
    ids=["gated", "missing", "busy", "unreachable", "offline", "long"],
)
def test_the_hubs_reason_is_told(error, told):
    """The reason itself, in a line that is not cut before it, and what to do about it."""
    with pytest.raises(ArgumentError, match=told) as failure, explained_loading("model", "some/model"):
        raise error
    assert "\n" not in str(failure.value) and "stacktrace" not in str(failure.value)


MISTAKES = ("ArgumentError", "PresetError", "UnsupportedError", "BackendError", "TuningError", "ComparisonError")


@pytest.mark.parametrize("name", [*MISTAKES, "ShapeError", "OutOfMemoryError", "BatchError"])
def test_exit_codes_tell_mistakes_from_failures(capsys, name):
    """2 if the request must change, 1 if another attempt may succeed; one line in both cases."""
    kind = getattr(errors, name)
    error = kind("--option", "no") if kind is ArgumentError else kind("no")
    with pytest.raises(typer.Exit) as end, cli._reported():
        raise error
    assert issubclass(kind, DitAccelError) and end.value.exit_code == (2 if name in MISTAKES else 1)
    assert capsys.readouterr().err.startswith("error: ")


def test_talkative_packages_are_quiet_under_the_command(monkeypatch):
    """Their warnings are of nothing that a user of the command can change; Python's own users hear them."""
    levels = {name: logging.getLogger(name).level for name in TALKATIVE}
    monkeypatch.setattr(cli, "run_to_end", lambda app: None)
    try:
        cli.main()
        assert {logging.getLogger(name).level for name in TALKATIVE} == {logging.ERROR}
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def test_env_tells_what_a_bug_report_needs(run, monkeypatch):
    """It lists each GPU with its capability and memory, missing packages, and every extra."""
    properties = SimpleNamespace(name="NVIDIA Any", major=9, minor=0, total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(env, "PACKAGES", (*env.PACKAGES, "no-such-package"))
    lines = (line.partition("  ") for line in run("env").stdout.splitlines())
    rows = {name.strip(): rest.strip() for name, _, rest in lines}
    assert rows["cuda:0"] == rows["cuda:1"] == "NVIDIA Any, sm_90, 80 GiB" and rows["CUDA"] == "12.9"
    assert rows["no-such-package"] == "not installed" and rows.keys() >= {"gradio", "ray", "peft", "matplotlib"}


def test_values_of_pairs_may_hold_anything():
    """The first `=` ends the key, and spaces around it are no part of it."""
    found = parse_call([" order = 2", "name=a=b", "skip.layers={a: 1}", "x="])
    assert found == {"order": 2, "name": "a=b", "skip.layers": {"a": 1}, "x": None}


def test_a_demo_models_own_preset_is_the_default():
    """A name that is given wins, and both are checked before anything is loaded."""

    def named(preset, model="some/model", overrides=None, refusal=""):
        return RunOptions(preset=preset, model=model, overrides=overrides).preset_and_loading(refusal)[:2]

    own = named(None, "demo-wan")[0]
    assert own == options.model_preset("demo-wan") is not None and named("turbo", "demo-wan")[0] == "turbo"
    assert named(None, overrides=["order=2"]) == (None, {"order": 2})
    for name, settings in (("turbp", None), (None, ["ordr=2"])):
        with pytest.raises(errors.PresetError, match="did you mean"):
            named(name, overrides=settings)
    with pytest.raises(ArgumentError, match="preset: nothing to see"):
        named("none", refusal="nothing to see")
    assert named("none")[0] == "none"


def test_a_file_of_prompts_has_one_a_line(tmp_path):
    """Spaces around them and empty lines are none."""
    (tmp_path / "prompts.txt").write_text("  a red fox \n\n\t\ntwo whales\n")
    assert read_prompts(tmp_path / "prompts.txt") == ["a red fox", "two whales"]


def test_a_lines_own_settings_win(tmp_path):
    """Settings in a line override the command's; an integer guidance scale and null are valid values."""
    file = tmp_path / "prompts.jsonl"
    lines = '{"prompt": "a", "steps": 2, "guidance": 3}', '{"prompt": "b", "guidance": 0.0, "negative-prompt": ""}'
    file.write_text("\n".join(lines))
    first, second = read_jobs(file, {"steps": 9, "guidance": 7.0, "seed": 0, "height": None})
    assert first.settings == {"prompt": "a", "steps": 2, "guidance": 3, "seed": 0}
    assert second.settings == {"prompt": "b", "steps": 9, "guidance": 0.0, "seed": 0, "negative-prompt": ""}
    assert (first.name(".png"), second.name(".mp4")) == ("0000.png", "0001.mp4")


def test_neighbours_of_one_kind_share_a_call():
    """Prompt, negative prompt and seed may differ, but all or none have a negative prompt; no call is too large."""
    kinds = [{}, {}, {}, {"steps": 2}, {"negative-prompt": "a"}, {"negative-prompt": "b"}, {"negative-prompt": "b"}, {}]
    jobs = [Job(index, {"prompt": str(index), "seed": index, **kind}) for index, kind in enumerate(kinds)]
    assert [[job.index for job in batch] for batch in batches(jobs, 2)] == [[0, 1], [2], [3], [4, 5], [6], [7]]


@pytest.mark.parametrize("guidance, is_guided", [(0, False), (1, False), (1.0, False), (1.001, True), (None, True)])
@pytest.mark.parametrize("scale", ["guidance_scale", "true_cfg_scale"])
def test_a_negative_prompt_needs_guidance_above_1(scale, guidance, is_guided):
    """At 1 the second branch has no weight; the pipeline's default counts where none is given."""
    pipe = pipe_that_takes(f"prompt, negative_prompt=None, {scale}=4.0")
    given = {"negative-prompt": "red", "guidance": guidance}
    if is_guided:
        expected = {"negative_prompt": "red"} | ({} if guidance is None else {scale: guidance})
        assert call_arguments(pipe, "some/model", given) == expected
    else:
        with pytest.raises(ArgumentError, match="only with guidance above 1"):
            call_arguments(pipe, "some/model", given)


@pytest.mark.parametrize("guidance", [0, 1.5])
def test_a_guider_takes_any_guidance(guidance):
    """Guidance of 0 too, which is not the same as none; without guidance the guider stays."""
    pipe = pipe_that_takes("prompt")
    pipe.guider = own = SimpleNamespace(new=lambda guidance_scale: f"of {guidance_scale}")
    assert call_arguments(pipe, "some/model", {"guidance": None}) == {} and pipe.guider is own
    assert call_arguments(pipe, "some/model", {"guidance": guidance}) == {} and pipe.guider == f"of {guidance}"


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


@pytest.mark.parametrize("demo, asked, fps", [(None, None, 24), (8, None, 8), (8, 12.5, 12.5)])
def test_frame_rate_is_the_users_else_the_models_else_the_familys(demo, asked, fps):
    """--fps overrides a demo model's rate, which overrides its family's training rate."""
    assert medium_of(tiny_pipeline("hunyuan"), demo, asked).fps == fps
    assert medium_of(tiny_pipeline("framepack")).fps == 30, "has the transformer's family, and a rate of its own"


@pytest.mark.parametrize("part, rate", TABLE["frames_per_second"].items())
def test_frame_rates_by_name_are_those_of_diffusers_examples(part, rate):
    kinds = [getattr(diffusers, name) for name in dir(diffusers) if part in name and name.endswith("Pipeline")]
    sources = "".join(inspect.getsource(sys.modules[kind.__module__]) for kind in kinds)
    rates = {float(found) for found in re.findall(r"fps(?:: int)? ?= ?(\d+)", sources)}
    assert rates == {rate} or (part, rates) == ("ConsisID", set()), "which is a placeholder without OpenCV"


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
    with pytest.raises(UnsupportedError, match=r"demo-wan is not installed: pip install -e \. in a checkout"):
        demo.demo_path("demo-wan")
    assert demo.demo_path("owner/demo-wan") is None and demo.demo_names() == []


@pytest.mark.parametrize(
    ("name", "preset"), [("flux", "balanced"), ("wan22", "video-balanced"), ("hunyuan15", "video-balanced")]
)
def test_plain_names_follow_what_the_pipeline_makes(name, preset):
    """The default is balanced, in its video form for videos; an explicit name stays unchanged."""
    pipe = tiny_pipeline(name)
    assert preset_for(pipe).name == preset_for(pipe, "balanced").name == preset
    assert preset_for(pipe, "turbo").name == preset.replace("balanced", "turbo")
    assert preset_for(pipe, "exact").name == "exact" and preset_for(pipe, target_error=0.5).schedule.target_error == 0.5


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 1 is not JSON"),
        pytest.param(200_000 * "[", "line 1 is not JSON", id="nested"),
        ('{"seed": 1}', "line 1 must be an object with a prompt"),
        ('{"prompt": "a", "step": 2}', "line 1: unknown key 'step'; keys are prompt"),
        ('{"prompt": "a", "steps": "2"}', "line 1: steps must be int, got '2'"),
        ('{"prompt": "a", "seed": true}', "line 1: seed must be int, got True"),
    ],
)
def test_lines_that_say_nothing_useful_are_refused(tmp_path, line, told):
    (tmp_path / "prompts.jsonl").write_text(line)
    with pytest.raises(ArgumentError, match=f"^prompts: {told}"):
        read_jobs(tmp_path / "prompts.jsonl", {})
