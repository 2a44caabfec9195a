"""Modular pipelines through the commands, the server and the app, with the inputs of their blocks."""

import functools
import json

import diffusers
import pytest
import torch
from PIL import Image
from rich.console import Console

from dit_accel.errors import ArgumentError
from dit_accel.serving import loading
from dit_accel.serving.loading import Loading, load_pipeline
from dit_accel.serving.pipelines import Setup, call_arguments
from dit_accel.serving.playground import Playground, Wish
from dit_accel.serving.prompts import Job
from dit_accel.serving.worker import Worker
from dit_accel.tools.advise.identify import identify
from dit_accel.tools.measure.timing import denoise, run_pipeline, timed_output, transformer_clock
from tests.clips import read_clip, read_sound
from tests.models.tiny import videos
from tests.serving.http.test_server import GOOD, send
from tests.serving.http.test_server import running as serving
from tests.serving.http.test_videos import ask, ended
from tests.tiny import encoders, redraw, tiny_pipeline

SMALL = {"height": 64, "width": 64, "num_inference_steps": 6}
OPTIONS = ("-p", "a fox", "--steps", 6, "--height", 64, "--width", 64)


def cosmos3():
    """A video with sound; its sound lasts 160 samples a latent."""
    pipe, _ = videos.cosmos3()
    parts = {name: pipe.components[name] for name in ("vae", "scheduler")}
    transformer = pipe.transformer
    parts["transformer"] = type(transformer).from_config(transformer.config, vocab_size=encoders.VOCABULARY)
    sizes = {"vocoder_input_dim": 8, "dec_dim": 8, "dec_c_mults": (1, 1), "dec_strides": (4, 40)}
    sizes |= {"enc_dim": 8, "enc_latent_dim": 16, "enc_c_mults": (1, 1), "enc_strides": (2, 5)}
    parts["sound_tokenizer"] = diffusers.Cosmos3AVAEAudioTokenizer(sampling_rate=16000, **sizes)
    return parts | {"text_tokenizer": encoders.qwen()["tokenizer"]}


def ltx2():
    """Its text encoder's four hidden states are projected together."""
    parts = videos.ltx2()[0].components
    connectors = type(parts["connectors"]).from_config(parts["connectors"].config, text_proj_in_factor=4)
    return {name: part for name, part in parts.items() if part} | encoders.llama() | {"connectors": connectors}


BLOCKS = {
    "flux": (diffusers.FluxAutoBlocks, lambda: tiny_pipeline("flux").components),
    "wan-i2v-clip": (diffusers.WanImage2VideoAutoBlocks, lambda: tiny_pipeline("wan-i2v-clip").components),
    "qwen-image": (diffusers.QwenImageAutoBlocks, lambda: tiny_pipeline("qwen-image").components),
    "cosmos3": (diffusers.Cosmos3OmniBlocks, cosmos3),
    "ltx2": (diffusers.LTX2AutoBlocks, ltx2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("modular")

    @functools.cache
    def save(name):
        blocks, build = BLOCKS[name]
        pipe, parts = blocks().init_pipeline(), {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for part, item in build().items():
                is_new = name in ("cosmos3", "ltx2") and isinstance(item, torch.nn.Module)
                parts[part] = redraw(item.eval()) or item if is_new else item
        configs = {"enable_safety_checker": False} if name == "cosmos3" else {}
        parts = {part: item for part, item in parts.items() if part in pipe._component_specs}
        pipe.update_components(**parts, **configs)
        pipe.save_pretrained(str(root / name), overwrite_modular_index=True)
        return root / name

    return save


def loaded(place):
    return load_pipeline(str(place), Loading("cpu"), Console(quiet=True))


def test_an_image_is_that_of_the_standard_pipeline(run, folder, saved, tmp_path):
    result = run("generate", "-m", folder("flux"), *OPTIONS, "-o", "a.png")
    assert result.exit_code == 0, result.output
    job = Job(0, {"prompt": "a fox", "seed": 0, "steps": 6, "height": 64, "width": 64})
    (made,) = Worker(Setup(str(saved("flux")))).make([job])
    assert made.data == (tmp_path / "a.png").read_bytes()


@pytest.mark.parametrize(
    ("name", "options", "rate"),
    [
        ("cosmos3", ("--num-frames", 5, "--call", "enable_sound=true"), 16_000),
        ("ltx2", ("--num-frames", 9, "--call", "max_sequence_length=32"), 24_000),
    ],
)
def test_a_video_has_its_sound(run, folder, tmp_path, name, options, rate):
    """The preset is one for videos."""
    result = run("generate", "-m", folder(name), *OPTIONS, *options, "-o", "a.mp4", "--json", "a.json")
    assert result.exit_code == 0, result.output
    assert read_clip(tmp_path / "a.mp4").shape == (options[1], 64, 64, 3)
    assert read_sound(tmp_path / "a.mp4")[1] == rate
    assert json.loads((tmp_path / "a.json").read_text())["preset"] == "video-balanced"


def test_lines_of_a_file_share_calls(run, folder, tmp_path):
    (tmp_path / "two.txt").write_text("a cat\na dog\n")
    options = ("--prompts", "two.txt", "--output-dir", "many", "--batch-size", 2, *OPTIONS[2:])
    result = run("generate", "-m", folder("flux"), *options)
    assert result.exit_code == 0 and "one at a time" not in result.output, result.output
    rows = [json.loads(line) for line in (tmp_path / "many/manifest.jsonl").read_text().splitlines()]
    assert [row["batch"] for row in rows] == [[0, 1], [0, 1]]


def test_tuning_reads_the_results_of_the_standard_pipeline(folder, saved):
    """Final latents and frames are equal, and a call may stop after a step."""
    pipe, standard = loaded(folder("flux")), loaded(saved("flux"))
    found, expected = (run_pipeline(item, SMALL, "a fox", 3) for item in (pipe, standard))
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
    for steps in (2, None):
        with transformer_clock(pipe) as clock:
            latents = denoise(pipe, {**SMALL, "prompt": "a fox"}, 3, steps)
        assert clock.calls == (steps or 6) and (steps or torch.equal(latents.float(), expected["latents"]))


def test_a_server_sends_images_and_videos(folder):
    """The image of a request for an edit goes to the blocks."""
    pytest.importorskip("imageio_ffmpeg")
    with serving(Worker(Setup(str(folder("flux"))))) as (app, _):
        answer = send(app, "POST", "/v1/images/generations", json=GOOD)
    assert answer.status_code == 200 and answer.json()["data"][0]["computed_fraction"] <= 1
    worker = Worker(Setup(str(folder("cosmos3")), call={"enable_sound": True}))
    wanted = {"prompt": "a fox", "size": "64x64", "steps": 4, "num_frames": 5}

    async def conversation(http, _):
        job = await ended(http, (await http.post("/v1/videos", json=wanted)).json()["id"])
        return job, (await http.get(f"/v1/videos/{job['id']}/content")).content

    job, data = ask(worker, conversation, form=worker.video_form)
    assert (job["status"], job["num_frames"], job["preset"]) == ("completed", 5, "video-balanced") and b"mp4a" in data


def test_the_app_compares_both_sides(folder):
    """The plain side shows each step."""
    place = str(folder("flux"))
    wish = Wish("a fox", place, "balanced", target_error=0.9, steps=6, height=64, width=64)
    *_, last = Playground(lambda model: Worker(Setup(model, "none"))).compare(wish)
    assert last.comparison.report.steps_by_mode["dispatch"] and len(last.steps["plain"]) == 6
    assert last.outputs["plain"].results[0].size == (64, 64)


def test_inputs_are_those_of_the_blocks(folder, tmp_path):
    """Images, masks and videos come from files; an image that the blocks need is asked for."""
    for name, level in (("a.png", 40), ("mask.png", 255)):
        Image.new("RGB", (64, 64), (level,) * 3).save(tmp_path / name)
    pipe, image = loaded(folder("qwen-image")), Image.new("RGB", (64, 64))
    others = {"mask_image": str(tmp_path / "mask.png"), "max_sequence_length": 32}
    arguments = call_arguments(pipe, "m", {"prompt": "a fox", "image": image, "steps": 4}, others)
    assert arguments["mask_image"].getextrema() == (255, 255)
    assert timed_output(pipe, arguments | SMALL, 3).results[0].size == (64, 64)
    with pytest.raises(ArgumentError, match="image: WanImage2VideoModularPipeline needs an input image"):
        call_arguments(loaded(folder("wan-i2v-clip")), "m", {"prompt": "a fox"})
    with pytest.raises(ArgumentError, match=r"call: .*no\.png does not exist"):
        call_arguments(pipe, "m", {}, {"control_image": str(tmp_path / "no.png")})
    with pytest.raises(ArgumentError, match="call: QwenImageModularPipeline takes no reference"):
        call_arguments(pipe, "m", {}, {"reference": 1})


def test_what_can_not_be_loaded_is_told(folder, tmp_path):
    """A component that is missing, and blocks that are code of the repository."""
    place = folder("flux")
    weights = place / "vae/diffusion_pytorch_model.safetensors"
    weights.rename(tmp_path / "kept")
    try:
        with pytest.raises(ArgumentError, match=r"model: .*can't be loaded: .*vae"):
            loaded(folder("flux"))
    finally:
        (tmp_path / "kept").rename(weights)
    (tmp_path / "modular_model_index.json").write_text('{"_class_name": "FluxModularPipeline"}')
    (tmp_path / "modular_config.json").write_text('{"auto_map": {"ModularPipelineBlocks": "code.Blocks"}}')
    (tmp_path / "code.py").write_text("raise SystemExit('the code of the repository ran')")
    with pytest.raises(ArgumentError, match=r"model: .*can't be loaded: .*trust_remote_code"):
        loaded(tmp_path)


def test_a_repository_without_a_standard_pipeline_is_modular(monkeypatch):
    import httpx
    from huggingface_hub.errors import RemoteEntryNotFoundError

    from dit_accel import modular_call

    def from_pretrained(source, **dtype):
        answer = httpx.Response(404, request=httpx.Request("GET", "https://hub/m"))
        raise RemoteEntryNotFoundError("no model_index.json", response=answer)

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", from_pretrained)
    monkeypatch.setattr(modular_call, "load_modular", lambda source, **dtype: (source, dtype))
    assert loading._from_pretrained("owner/name", dtype=torch.float32) == ("owner/name", {"dtype": torch.float32})


@pytest.mark.parametrize(
    ("blocks", "transformer", "expected"),
    [
        ("Cosmos3OmniBlocks", "Cosmos3OmniTransformer", ("any", True)),
        ("AnimaAutoBlocks", "CosmosTransformer3DModel", ("any", False)),
        ("MiniMaxH3Blocks", "MiniMaxH3Transformer3DModel", ("minimax_h3", True)),
    ],
)
def test_advice_reads_the_blocks_of_a_folder(tmp_path, blocks, transformer, expected):
    index = {"_blocks_class_name": blocks, "transformer": ["diffusers", transformer, {}]}
    (tmp_path / "modular_model_index.json").write_text(json.dumps(index))
    identity = identify(str(tmp_path))
    assert (identity.family, identity.is_video) == expected and identity.is_modular
