"""Modular pipelines in the commands, the server and the app, with the inputs of their blocks."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import diffusers
import httpx
import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.minimax_h3 import encoders as minimax_h3_encoders
from diffusers.modular_pipelines.minimax_h3 import references
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3Blocks
from huggingface_hub import errors
from PIL import Image
from rich.console import Console

from dit_accel import modular_call
from dit_accel.cli.options import RunOptions
from dit_accel.errors import ArgumentError
from dit_accel.models import denoisers
from dit_accel.serving import loading, pipelines
from dit_accel.serving.input_images import read_input
from dit_accel.serving.loading import Loading, load_pipeline
from dit_accel.serving.pipelines import Setup, call_arguments
from dit_accel.serving.playground import Playground, Wish
from dit_accel.serving.worker import Worker
from dit_accel.tools.advise.identify import identify
from dit_accel.tools.measure.timing import denoise, run_pipeline, timed_output, transformer_clock
from dit_accel.tools.media.video import Sound, _write_wav, write_clip
from scripts.bench.model_speed.models import TINY
from tests.clips import read_sound
from tests.models.tiny import videos
from tests.models.tiny.parts import small
from tests.serving.http.test_server import GOOD, running, send
from tests.stages.autoencoders import H3
from tests.tiny import encoders, tiny_pipeline

SMALL = {"height": 64, "width": 64, "num_inference_steps": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("modular")

    def save(name, blocks, **parts):
        pipe = blocks.init_pipeline()
        pipe.update_components(**{**tiny_pipeline(name).components, **parts})
        pipe.save_pretrained(str(root / name), overwrite_modular_index=True)
        return root / name

    return save


def loaded(place):
    return load_pipeline(str(place), Loading("cpu"), Console(quiet=True))


def test_every_door_runs_the_standard_pipelines_images(run, folder, saved, tmp_path):
    """Final latents and frames are equal, and a call may stop after a step."""
    place = folder("flux", diffusers.FluxAutoBlocks())
    pipe, standard = loaded(place), loaded(saved("flux"))
    found, expected = (run_pipeline(item, SMALL, "a fox", 3) for item in (pipe, standard))
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
    with transformer_clock(pipe) as clock:
        denoise(pipe, {**SMALL, "prompt": "a fox"}, 3, steps=2)
    assert clock.calls == 2
    with running(Worker(Setup(str(place)))) as (app, _):
        assert send(app, "POST", "/v1/images/generations", json=GOOD).status_code == 200
    wish = Wish("a fox", str(place), "balanced", target_error=0.9, steps=6, height=64, width=64)
    *_, last = Playground(lambda model: Worker(Setup(model, "none"))).compare(wish)
    assert last.comparison.report.steps_by_mode["dispatch"] and len(last.steps["plain"]) == 6
    (place / "modular_config.json").write_text('{"auto_map": {"ModularPipelineBlocks": "code.Blocks"}}')
    (place / "code.py").write_text("raise SystemExit('the code of the repository ran')")
    with pytest.raises(ArgumentError, match=r"model: .*can't be loaded: .*trust_remote_code"):
        loaded(place)


def test_a_video_has_its_sound(run, folder, tmp_path):
    """The blocks decide on the preset, and on inputs without which they can't run."""
    pipe, sizes = videos.cosmos3()[0], {"vocoder_input_dim": 8, "dec_dim": 8, "dec_c_mults": (1, 1), "enc_dim": 8}
    sizes |= {"dec_strides": (4, 40), "enc_latent_dim": 16, "enc_c_mults": (1, 1), "enc_strides": (2, 5)}
    transformer = type(pipe.transformer).from_config(pipe.transformer.config, vocab_size=encoders.VOCABULARY)
    sound = diffusers.Cosmos3AVAEAudioTokenizer(sampling_rate=16000, **sizes)
    parts = {"transformer": transformer, "sound_tokenizer": sound, "text_tokenizer": encoders.qwen()["tokenizer"]}
    parts |= {"scheduler": pipe.scheduler, "enable_safety_checker": False}
    place = folder("wan", diffusers.Cosmos3OmniBlocks(), **parts)
    options = ("--steps", 6, "--height", 64, "--width", 64, "--num-frames", 5, "--call", "enable_sound=true")
    result = run("generate", "-m", place, "-p", "a fox", *options, "-o", "a.mp4", "--json", "a.json")
    assert result.exit_code == 0, result.output
    assert read_sound(tmp_path / "a.mp4")[1] == 16_000 and identify(str(place)).is_video
    assert json.loads((tmp_path / "a.json").read_text())["preset"] == "video-balanced"
    pipe = loaded(folder("wan-i2v-clip", diffusers.WanImage2VideoAutoBlocks()))
    with pytest.raises(ArgumentError, match="image: WanImage2VideoModularPipeline needs an input image"):
        call_arguments(pipe, "m", {"prompt": "a fox"})
    with pytest.raises(ArgumentError, match=r"call: .*no\.png can.t be read as an image: No such file"):
        call_arguments(pipe, "m", {}, {"last_image": str(tmp_path / "no.png")})


@pytest.mark.parametrize("name, shape", [("audio", (1, 2, 12_000)), ("reference_audio", (2, 12_000))])
def test_sound_comes_from_files_at_the_pipelines_rate(tmp_path, name, shape):
    """Mono plays on both sides at its own level; stereo stays."""
    tones = np.sin(np.arange(8000) / 8000 * 2 * np.pi * np.array([[440], [220]])) * [[0.5], [0.25]]
    pipe = SimpleNamespace(vae=SimpleNamespace(config=SimpleNamespace(sampling_rate=12_000)))
    for channels in (1, 2):
        _write_wav(Sound(tones[:channels], 8000), tmp_path / "tones.wav")
        found = read_input(name, str(tmp_path / "tones.wav"), pipe)
        assert found.shape == shape and found.dtype == torch.float32
        levels = found.reshape(2, -1)[:, 500:-500].amax(dim=1)
        torch.testing.assert_close(levels, torch.tensor([0.5, 0.5 / channels]), atol=0.01, rtol=0)
    (tmp_path / "broken.wav").write_bytes(b"x")
    with pytest.raises(ArgumentError, match=r"call: .*broken.wav can't be read as audio: .*Invalid data"):
        read_input(name, str(tmp_path / "broken.wav"), pipe)


def test_references_of_blocks_come_from_files_and_load_their_transformer(monkeypatch, tmp_path):
    """Blocks read a file into their own object; the other transformer stays on the disk."""
    pipe, model = MiniMaxH3Blocks().init_pipeline(), TINY["minimax-h3"].build()
    pipe.update_components(transformer=model, transformer_ref=model)
    pipe.save_pretrained(str(tmp_path / "model"), overwrite_modular_index=True)
    inputs = RunOptions(call=["references=[subject.png]"]).loading().inputs
    assert [*denoisers(loaded(tmp_path / "model"))] == ["transformer"]
    pipe = load_pipeline(str(tmp_path / "model"), Loading("cpu", inputs=inputs), Console(quiet=True))
    assert [*denoisers(pipe)] == ["transformer_ref"]
    Image.new("RGB", (48, 32)).save(tmp_path / "subject.png")
    monkeypatch.setattr(pipelines, "sampling_rate", lambda pipe: 16_000)
    (image,) = call_arguments(pipe, "m", {"prompt": "a"}, {"references": str(tmp_path / "subject.png")})["references"]
    assert (image.kind, image.image.size) == ("image", (48, 32))
    assert call_arguments(pipe, "m", {"prompt": "a fox", "fps": 24.0}) == {"prompt": "a fox"}
    with pytest.raises(ArgumentError, match="fps: MiniMaxH3ModularPipeline makes sound for its own"):
        call_arguments(pipe, "m", {"prompt": "a fox", "fps": 12.0})


class Eyes:
    """Replaces Qwen3-VL and its processor, for images of four tokens."""

    dtype, merge_size = torch.float32, 2
    image_processor = property(lambda self: self)

    def __call__(self, images, **_):
        return {"pixel_values": None, "image_grid_thw": torch.tensor([[1, 4, 4]] * len(images))}


@pytest.fixture
def minimax_h3(monkeypatch):
    """MiniMax-H3 with a small transformer, autoencoders and canvas, and random features of text."""
    pipe, model = MiniMaxH3Blocks().init_pipeline(), small("MiniMaxH3Transformer3DModel")
    of_video, of_sound = ({"latents_mean": [0.0] * size, "latents_std": [1.0] * size} for size in (24, 32))
    of_sound |= {"encoder_dim": 4, "latent_dim": 32, "decoder_dim": 128, "resblock_kernel_sizes": (3,)}
    of_sound["resblock_dilation_sizes"] = ((1,),)
    parts = {"vae": diffusers.AutoencoderKLMiniMaxH3(**H3 | {"latent_channels": 24} | of_video)}
    parts |= {"audio_vae": diffusers.AutoencoderKLMiniMaxH3Audio(**of_sound), "tokenizer": encoders.qwen()["tokenizer"]}
    parts |= {f"{kind}scheduler": diffusers.MiniMaxH3Scheduler(shift) for kind, shift in videos.H3_SHIFTS.items()}
    parts |= {"transformer": model, "transformer_ref": model, "processor": Eyes(), "text_encoder": Eyes()}
    pipe.update_components(**parts, canvas_short_edge=64, canvas_max_pixels=64 * 96, reference_image_short_edge=64)
    features = lambda _, __, ids, *___, **____: torch.randn(1, len(ids), videos.WIDTH)  # noqa: E731
    monkeypatch.setattr(minimax_h3_encoders, "get_qwen3vl_prompt_embeds", features)
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *_: modular_call.called_as_standard(pipe))


@pytest.mark.parametrize(
    ("options", "sides"),
    [
        ("--height 64 --width 32", (64, 32)),
        ("--image wide.png --call last_image=tall.png", (64, 96)),
        ("--call references=[tall.png,voice.wav]", (64, 96)),
    ],
)
def test_minimax_h3_makes_a_video_with_sound(run, minimax_h3, monkeypatch, tmp_path, options, sides):
    """Its sides are those asked for, the first image's or the model's, and its sound is as long."""
    for name, size in {"wide.png": (96, 64), "tall.png": (32, 64)}.items():
        Image.new("RGB", size).save(tmp_path / name)
    _write_wav(Sound(np.ones((1, 8000)), 8000), tmp_path / "voice.wav")
    of_sound = references.MiniMaxH3AudioReference
    monkeypatch.setattr(of_sound, "from_file", lambda path: of_sound(None, 8000))
    call = ("-p", "a fox", "--steps", 5, "--num-frames", 124, "-o", "a.mp4")
    result = run("generate", "-m", "h3", *call, *options.split())
    assert result.exit_code == 0, result.output
    samples, rate = read_sound(tmp_path / "a.mp4")
    assert rate == 32_000 and samples.shape == (2, pytest.approx(124 / 24 * rate, abs=1200))
    assert imageio.imread(tmp_path / "a.mp4", plugin="FFMPEG").shape[1:3] == sides


@pytest.mark.parametrize("kind", [errors.RemoteEntryNotFoundError, errors.GatedRepoError])
def test_a_repository_without_a_standard_pipeline_is_modular(monkeypatch, kind):
    def fail(source, **_):
        raise kind("no model_index.json", response=httpx.Response(404, request=httpx.Request("GET", "https://hub")))

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", fail)
    monkeypatch.setattr(modular_call, "load_modular", lambda source, *_, **dtype: source)
    with pytest.raises(kind) if kind is errors.GatedRepoError else nullcontext():
        assert loading._from_pretrained("owner/name") == "owner/name"


def test_masks_and_videos_come_from_files(folder, tmp_path):
    """A list of a video's frames, and a mask in grey; an input that no option sets is asked for by --call."""
    Image.new("RGB", (64, 64), "white").save(tmp_path / "mask.png")
    write_clip(np.zeros((3, 64, 64, 3), np.uint8), tmp_path / "walk.mp4", 8.0)
    assert [frame.size for frame in read_input("driving_video", str(tmp_path / "walk.mp4"))] == 3 * [(64, 64)]
    assert read_input("condition_video_keep", "first") == "first"
    assert [*map(len, read_input("control_videos", {"edge": str(tmp_path / "walk.mp4")}).values())] == [3]
    pipe = loaded(folder("qwen-image", diffusers.QwenImageAutoBlocks()))
    options = {"prompt": "a fox", "image": Image.new("RGB", (64, 64))}
    images = call_arguments(pipe, "m", {"prompt": "a fox"}, {"image": [str(tmp_path / "mask.png")] * 2})["image"]
    assert [image.mode for image in images] == ["RGB", "RGB"]
    with pytest.raises(ArgumentError, match="call: image is already set by the input image"):
        call_arguments(pipe, "m", options, {"image": str(tmp_path / "mask.png")})
    arguments = call_arguments(pipe, "m", options, {"mask_image": str(tmp_path / "mask.png")})
    assert timed_output(pipe, arguments | SMALL, 3).results[0].size == (64, 64)
    pipe.__call__.__func__.__signature__ = modular_call._signature(*2 * [diffusers.WanAnimate2Blocks()])
    with pytest.raises(ArgumentError, match=r"call: .* needs driving_video: --call driving_video=VALUE"):
        call_arguments(pipe, "m", options)
