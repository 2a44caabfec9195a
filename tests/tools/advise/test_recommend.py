"""Recommendations name presets, options and lines that fit the model; figures stand in docs/guide/choosing.md."""

import ast
import inspect
import itertools
import json
import re
import shlex
from pathlib import Path

import diffusers
import pytest
import typer

from dit_accel.cli import app
from dit_accel.errors import UnsupportedError
from dit_accel.models.families import FAMILIES, known_family
from dit_accel.models.parallel.context_parallel import split_plan
from dit_accel.presets import load_preset
from dit_accel.tools.advise import recommend as module
from dit_accel.tools.advise.cards import CARDS, known_card
from dit_accel.tools.advise.identify import identify
from dit_accel.tools.advise.lines import inputs_of
from dit_accel.tools.advise.recommend import PEAKS, Peak, Recommendation, recommend
from dit_accel.tools.demo import demo_arguments, demo_path
from tests.models import tiny

DOCS = Path(__file__).parents[3] / "docs"
IDS = {
    "black-forest-labs/FLUX.1-dev": ("flux", False),
    "black-forest-labs/FLUX.1-schnell": ("flux", True),
    "black-forest-labs/FLUX.2-dev": ("flux2", False),
    "hunyuanvideo-community/HunyuanVideo": ("hunyuan_video", False),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": ("hunyuan_video15", False),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": ("wan", False),
    "Wan-AI/Wan2.1-VACE-14B-diffusers": ("wan_vace", False),
    "Wan-AI/Wan2.2-Animate-14B-Diffusers": ("wan_animate", False),
    "Skywork/SkyReels-V2-T2V-14B-540P-Diffusers": ("skyreels_v2", False),
    "stabilityai/stable-diffusion-3.5-large": ("sd3", False),
    "Qwen/Qwen-Image-Edit": ("qwen_image", False),
    "Tongyi-MAI/Z-Image-Turbo": ("z_image", True),
    "Lightricks/LTX-Video": ("ltx", False),
    "Lightricks/LTX-2": ("ltx2", False),
    "zai-org/CogVideoX-5b": ("cogvideox", False),
    "HiDream-ai/HiDream-I1-Full": ("hidream", False),
    "Alpha-VLLM/Lumina-Image-2.0": ("lumina2", False),
    "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers": ("kandinsky5", False),
    "genmo/mochi-1-preview": ("mochi", False),
    "Photoroom/prx-1024-t2i-beta": ("prx", False),
    "lodestones/Chroma1-HD": ("chroma", False),
    "meituan-longcat/LongCat-Image": ("longcat_image", False),
    "hunyuanvideo-community/HunyuanImage-2.1-Diffusers": ("hunyuan_image", False),
    "krea/Krea-2-Raw": ("krea2", False),
    "Qwen/Qwen-Image-2.1": ("qwen_image_21", False),
    "baidu/ERNIE-Image": ("ernie_image", False),
    "black-forest-labs/flux-3-image-klein": ("flux3", True),
    "black-forest-labs/flux-3-image-klein-base": ("flux3", False),
    "BestWishYsh/Helios-Base": ("helios", False),
    "zai-org/GLM-Image": ("glm_image", False),
    "MiniMaxAI/MiniMax-H3": ("minimax_h3", False),
    "someone/something": ("any", False),
    "flux-dev": ("flux", False),
    "schnell": ("flux", True),
    "klein": ("flux2", True),
    "auraflow": ("any", False),
    "pixart-sigma": ("any", False),
    "qwen-image": ("qwen_image", False),
    "z-image-turbo": ("z_image", True),
    "hunyuanvideo-1.5": ("hunyuan_video15", False),
    "flux.2-klein": ("flux2", True),
    "black-forest-labs/FLUX.2-klein-base-4B": ("flux2", False),
    "sd3.5-medium": ("sd3", False),
}
FIGURE = re.compile(r"\d+(?:\.\d+)?(?= ?(?:×|%|times|dB|ms|[MG]i?B)(?!\w))")


def told(found: Recommendation) -> str:
    """All that the command prints, less the name of a card that has a figure."""
    lines = [*(f"{choice.preset} {choice.use}" for choice in found.choices), *found.notes, found.python, found.shell]
    return "\n".join(lines).replace("A100 of 40 GB", "A100")


GENERATE = typer.main.get_command(app).commands["generate"]


def expected_steps(model: str, steps: int | None) -> int | None:
    """Steps of the printed lines: the given ones, a distilled or demo model's own, or the pipeline's default."""
    found, folder = identify(model), demo_path(model)
    own = demo_arguments(folder)["num_inference_steps"] if folder else found.facts and found.facts.steps
    return steps or found.steps or (None if found.is_distilled else own)


def parse(shell: str) -> dict:
    """Options of a printed command, by the parser of the real one."""
    words = shlex.split(shell)
    return GENERATE.make_context("generate", words[words.index("generate") + 1 :]).params


def rows(name: str) -> list[dict]:
    return json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize("name", IDS)
def test_families_are_told_by_ids(name):
    """Known ids lead to their family, and names of distilled models are noticed."""
    found = identify(name)
    assert (found.family, found.is_distilled) == IDS[name]


def test_every_family_has_an_id_and_a_recommendation():
    """Each family of the registry is identified by some id, and gets a preset that fits it."""
    assert {family.name for family in FAMILIES} <= {family for family, _ in IDS.values()}
    for family in FAMILIES:
        frames = None if identify(family.name).makes_images_alone else 81
        for choice in recommend(family.name, height=512, width=512, frames=frames).choices:
            assert load_preset(choice.preset).model in ("any", family.name)


@pytest.mark.parametrize("name", ["flux", "wan", "framepack"])
def test_folders_are_told_by_their_index(name, tmp_path):
    """A pipeline's folder is assigned to a family by the class of its transformer."""
    index = {"_class_name": "P", "transformer": ["diffusers", type(tiny.pipeline(name).transformer).__name__]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert identify(str(tmp_path)).family == (name if name != "framepack" else "any")


def test_peaks_are_those_of_the_speed_files():
    """GiB of a transformer are the plain run's."""
    for peak in PEAKS:
        plain = next(row for row in rows(peak.source) if row["run"] == "plain")
        assert peak.gib == round(plain["peak_gib"], 1), peak


NAMES = [*IDS, "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "Qwen/Qwen-Image", "demo-flux", "demo-wan"]
NAMES += [*(family.name for family in FAMILIES), "any"]


@pytest.mark.parametrize("model", NAMES)
def test_notes_have_no_figures(model):
    """Figures are on the page that the first note names; the command runs the expected steps and suits few of them."""
    has_shell = not (set(inputs_of(identify(model))) - {"image"} or identify(model).is_modular)
    for steps, gpus, gpu in itertools.product((None, 4, 8, 50), (1, 2), (None, "h100")):
        found = recommend(model, steps=steps, gpus=gpus, gpu=gpu)
        assert not FIGURE.findall(told(found)) and "docs/guide/choosing.md" in found.notes[0]
        assert bool(found.shell) == has_shell
        if has_shell:
            assert parse(found.shell)["steps"] == expected_steps(model, steps)
        if steps in (4, 8):
            assert ("none to forecast" if steps == 4 else "forecasts save little") in told(found)
            assert found.choices[0].preset == ("exact" if steps == 4 else "balanced")


def test_plans_are_those_of_the_code():
    """Families that are said to share tokens have a plan, as far as tiny pipelines show."""
    for name in ("flux", "wan", "qwen-image", "hunyuan", "sd3", "mochi"):
        pipe = tiny.pipeline(name)
        family = known_family(pipe.transformer)
        plan = split_plan(pipe.transformer, family)
        assert ("ulysses" in family.sharing) == (plan is not None), name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gpu": "4090", "steps": 28, "height": 1024, "width": 1024},
        {"gpu": "a100", "height": 480, "width": 832, "frames": 81, "loras": {"a/b": 1.0}, "quantized": True},
        {"gpus": 4},
        {"steps": 4, "distilled": True, "gpus": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "black-forest-labs/FLUX.1-dev", "someone/model"])
def test_lines_can_be_copied(model, options):
    """Python's line compiles, and the shell's has options that exist."""
    if identify(model).makes_images_alone:
        options = {name: value for name, value in options.items() if name != "frames"}
    found = recommend(model, **options)
    compile(found.python, "line", "exec")
    parse(found.shell)
    assert all(note.endswith(".") for note in found.notes)


def test_what_does_not_fit_is_said():
    """Tokens that can't be split, and memory that was not measured, are named in the notes."""
    assert "tokens can't be split" in told(recommend("someone/model", gpus=8))
    assert "Memory was not measured" in told(recommend("lodestones/Chroma1-HD", gpu="a100"))


def test_tiles_are_for_long_clips_alone():
    """The preset that skips tiles is offered only from its measured length on, and last."""
    names = [[c.preset for c in recommend("wan", height=480, width=832, frames=f).choices] for f in (17, 81)]
    assert names == [["balanced", "quality", "turbo"], ["balanced", "quality", "turbo", "wan21-sparge-balanced"]]


@pytest.mark.parametrize(
    "gpu, options",
    [
        ("h200", ""),
        ("l40s", "--offload model"),
        ("4090", "--quantize float8 --offload model"),
        ("3090", "--quantize int8 --offload model"),
        ("t4", "--offload group"),
    ],
)
def test_pipelines_are_made_to_fit_their_card(gpu, options):
    """A transformer of 27 GiB fits a large card, fills half of a middling one, and fits a small one by halves."""
    found = recommend("hunyuanvideo-community/HunyuanVideo", gpu=gpu)
    assert " ".join(re.findall(r"--(?:quantize|offload) \S+", found.shell)) == options
    assert ("upload nothing" in " ".join(found.notes)) == ("group" in options)


@pytest.mark.parametrize(
    "wrong", [{"gpu": "voodoo"}, {"steps": 0}, {"gpus": "2"}, {"frames": 81}, {"model": None}], ids=str
)
def test_bad_arguments_are_told(wrong):
    """An unknown card, no number from 1 on, frames of an image, no name: an error that names the argument."""
    with pytest.raises(UnsupportedError, match=f"^{next(iter(wrong))} must be"):
        recommend(**{"model": "flux", **wrong})


def test_videos_are_known_by_their_class():
    """Models of other transformer classes make videos if diffusers calls the class a 3D one."""
    assert identify("rhymes-ai/Allegro").is_video and not identify("fal/AuraFlow").is_video


@pytest.mark.parametrize(
    "name, meant",
    [
        ("hunyuan", "demo-hunyuan or hunyuan_video or hunyuan_video15 or hunyuan_image"),
        ("flx", "flux or flux2 or flux3"),
    ],
)
def test_short_and_misspelt_names_get_a_question(name, meant):
    with pytest.raises(UnsupportedError, match=f"got '{name}'; did you mean {meant}[?]$"):
        identify(name)


def test_the_memory_of_a_family_is_that_of_its_models():
    """A family's name counts as its measured models if they all take the same memory."""
    assert "--offload model" in recommend("flux", gpu="4090").shell
    assert "Memory was not measured" in told(recommend("wan", gpu="4090"))


@pytest.mark.parametrize(
    "gib, fitting",
    [(40.0, ""), (40.1, "model"), (80.0, "model"), (80.1, "float8"), (123.0, "float8"), (123.1, "group")],
)
def test_memory_is_enough_up_to_all_of_it(monkeypatch, gib, fitting):
    """Half of a card of 80 GiB without offloading, the whole with it, and a transformer of 1 / 0.65 of it in 8 bits."""
    monkeypatch.setattr(module, "PEAKS", (Peak("flux", "flux", 1, gib, "none"),))
    options, notes = module._fitted(identify("flux"), CARDS["h100"], quantized=False, is_shared=False)
    assert options[1:2] == ([fitting] if fitting else []) and bool(notes) == bool(fitting)
    assert module._fitted(identify("flux"), CARDS["h100"], quantized=True, is_shared=False) == ([], [])


@pytest.mark.parametrize("size, is_long", [((256, 1024, 49), True), ((1024, 256, 52), True), ((256, 1024, 48), False)])
def test_a_long_video_begins_at_the_measured_one(size, is_long):
    """Of as many tokens, whichever side is the longer one."""
    assert (len(module._choices(identify("wan"), size, 50)) == 4) == is_long


@pytest.mark.parametrize(
    "gpus, few, way",
    [(2, False, "branches=2"), (3, False, "ulysses=3"), (4, False, "ulysses=2,branches=2"), (2, True, "ulysses=2")],
)
def test_branches_are_shared_by_an_even_number_of_gpus(gpus, few, way):
    """A distilled model has one branch."""
    assert module._shared(identify("wan"), gpus, few=few)[0] == way


def test_two_transformers_count_twice():
    """Wan 2.2's pair fills more than half of a card that one of them would not."""
    one, two = ("Wan-AI/Wan2.1-T2V-14B-Diffusers", "Wan-AI/Wan2.2-T2V-A14B-Diffusers")
    assert "--offload" not in recommend(one, gpu="a100").shell and "--offload model" in recommend(two, gpu="a100").shell


def test_distilled_models_run_few_steps():
    """A distilled model gets its own number of steps if its name determines it, else a note."""
    assert "--steps 4" in recommend("black-forest-labs/FLUX.1-schnell").shell
    assert "--steps 8 --guidance 0" in recommend("Tongyi-MAI/Z-Image-Turbo").shell
    turbo = recommend("someone/FLUX.1-Turbo")
    assert "--steps" not in turbo.shell and "add --steps" in " ".join(turbo.notes)
    assert not identify("black-forest-labs/FLUX.2-klein-base-4B").is_distilled


def test_several_gpus_are_in_both_lines():
    """The Python line shares the work like the shell line; a model with few steps has no second branch."""
    for options, way in (({}, "branches=2"), ({"distilled": True}, "ulysses=2")):
        found = recommend("wan", gpus=2, **options)
        assert f"parallelize_pipeline(pipe, {way})" in found.python and f"--parallel {way} " in found.shell
    assert "torchrun" not in recommend("mochi", gpus=2).shell


PIPELINES = {  # class of the pipeline and number of steps that the printed lines run; None = no number
    "black-forest-labs/FLUX.1-dev": ("FluxPipeline", 28),
    "black-forest-labs/FLUX.1-schnell": ("FluxPipeline", 4),
    "black-forest-labs/FLUX.1-Krea-dev": ("FluxPipeline", 28),
    "black-forest-labs/FLUX.1-Kontext-dev": ("FluxKontextPipeline", 28),
    "black-forest-labs/FLUX.1-Fill-dev": ("FluxFillPipeline", None),
    "black-forest-labs/FLUX.1-Canny-dev": ("FluxControlPipeline", None),
    "black-forest-labs/FLUX.2-dev": ("Flux2Pipeline", 50),
    "black-forest-labs/FLUX.2-klein-4B": ("Flux2KleinPipeline", 4),
    "black-forest-labs/FLUX.2-klein-9B": ("Flux2KleinPipeline", 4),
    "black-forest-labs/FLUX.2-klein-base-4B": ("Flux2KleinPipeline", 50),
    "Qwen/Qwen-Image": ("QwenImagePipeline", 50),
    "Qwen/Qwen-Image-Edit": ("QwenImageEditPipeline", 50),
    "Qwen/Qwen-Image-Edit-2509": ("QwenImageEditPlusPipeline", 50),
    "Qwen/Qwen-Image-2.1": ("QwenImage21Pipeline", 40),
    "Qwen/Qwen-Image-Layered": ("QwenImageLayeredPipeline", 50),
    "Tongyi-MAI/Z-Image-Turbo": ("ZImagePipeline", 8),
    "Tongyi-MAI/Z-Image": ("ZImagePipeline", 50),
    "stabilityai/stable-diffusion-3-medium-diffusers": ("StableDiffusion3Pipeline", 28),
    "stabilityai/stable-diffusion-3.5-large": ("StableDiffusion3Pipeline", 28),
    "stabilityai/stable-diffusion-3.5-large-turbo": ("StableDiffusion3Pipeline", 4),
    "HiDream-ai/HiDream-I1-Full": ("HiDreamImagePipeline", 50),
    "HiDream-ai/HiDream-I1-Dev": ("HiDreamImagePipeline", 28),
    "HiDream-ai/HiDream-I1-Fast": ("HiDreamImagePipeline", 16),
    "Alpha-VLLM/Lumina-Image-2.0": ("Lumina2Pipeline", 30),
    "lodestones/Chroma1-HD": ("ChromaPipeline", 35),
    "Photoroom/prx-1024-t2i-beta": ("PRXPipeline", 28),
    "krea/Krea-2-Raw": ("Krea2Pipeline", 28),
    "krea/Krea-2-Turbo": ("Krea2Pipeline", 8),
    "baidu/ERNIE-Image": ("ErnieImagePipeline", 50),
    "baidu/ERNIE-Image-Turbo": ("ErnieImagePipeline", 8),
    "meituan-longcat/LongCat-Image": ("LongCatImagePipeline", 50),
    "zai-org/GLM-Image": ("GlmImagePipeline", 50),
    "hunyuanvideo-community/HunyuanImage-2.1-Diffusers": ("HunyuanImagePipeline", 50),
    "hunyuanvideo-community/HunyuanImage-2.1-Distilled-Diffusers": ("HunyuanImagePipeline", 8),
    "hunyuanvideo-community/HunyuanImage-2.1-Refiner-Diffusers": ("HunyuanImageRefinerPipeline", 4),
    "meituan-longcat/LongCat-Image-Edit": ("LongCatImageEditPipeline", 50),
    "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers": ("Kandinsky5T2IPipeline", 50),
    "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers": ("Kandinsky5T2VPipeline", 50),
    "kandinskylab/Kandinsky-5.0-T2V-Lite-distilled16steps-5s-Diffusers": ("Kandinsky5T2VPipeline", 16),
    "kandinskylab/Kandinsky-5.0-I2V-Pro-sft-5s-Diffusers": ("Kandinsky5I2VPipeline", 50),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": ("WanPipeline", 50),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": ("WanPipeline", 50),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": ("WanImageToVideoPipeline", 50),
    "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers": ("WanImageToVideoPipeline", None),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": ("WanPipeline", 50),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": ("WanPipeline", 50),
    "Wan-AI/Wan2.2-Animate-14B-Diffusers": ("WanAnimatePipeline", None),
    "Wan-AI/Wan2.1-VACE-14B-diffusers": ("WanVACEPipeline", 50),
    "FastVideo/FastWan2.1-T2V-1.3B-Diffusers": ("WanPipeline", None),
    "Skywork/SkyReels-V2-T2V-14B-540P-Diffusers": ("SkyReelsV2Pipeline", 50),
    "hunyuanvideo-community/HunyuanVideo": ("HunyuanVideoPipeline", 50),
    "hunyuanvideo-community/HunyuanVideo-I2V": ("HunyuanVideoImageToVideoPipeline", 50),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": ("HunyuanVideo15Pipeline", 50),
    "Lightricks/LTX-Video": ("LTXPipeline", 50),
    "Lightricks/LTX-2": ("LTX2Pipeline", 30),
    "zai-org/CogVideoX-5b": ("CogVideoXPipeline", 50),
    "zai-org/CogVideoX-5b-I2V": ("CogVideoXImageToVideoPipeline", 50),
    "genmo/mochi-1-preview": ("MochiPipeline", 64),
    "BestWishYsh/Helios-Base": ("HeliosPipeline", 50),
    "demo-flux": ("FluxPipeline", 50),
    "demo-wan": ("WanPipeline", 50),
    "demo-hunyuan": ("HunyuanVideoPipeline", 50),
}


@pytest.mark.parametrize("model", PIPELINES)
def test_printed_lines_fit_the_pipeline(model):
    """Python's call has arguments of the pipeline and all required ones, with the same values as the shell's."""
    pipeline, own_steps = PIPELINES[model]
    signature = inspect.signature(getattr(diffusers, pipeline).__call__)
    is_video = "num_frames" in signature.parameters
    for steps, gpu, gpus in itertools.product((None, 4, 50), (None, "RTX 4090", "h200"), (1, 2)):
        frames = 33 if is_video and gpus == 2 else None
        found = recommend(model, steps=steps, gpu=gpu, gpus=gpus, frames=frames, loras={"owner/name/file": 0.5})
        *_, call = found.python.splitlines()
        compile(found.python, "lines of Python", "exec")
        keywords = {each.arg: each.value for each in ast.parse(call).body[0].value.keywords}
        signature.bind(None, **dict.fromkeys(keywords), **({"kwargs": {}} if "kwargs" in signature.parameters else {}))
        values = {name: node.value for name, node in keywords.items() if isinstance(node, ast.Constant)}
        assert values.get("num_inference_steps") == (steps or own_steps)
        if identify(model).steps is None and not demo_path(model) and own_steps:
            assert signature.parameters["num_inference_steps"].default == own_steps
        required = {name for name, each in signature.parameters.items() if each.default is each.empty}
        assert required - {"self", "kwargs"} <= set(keywords)
        if not found.shell:
            assert set(keywords) - set(signature.parameters) == set() and "use Python" in told(found)
            continue
        given = parse(found.shell)
        assert given["model"] == model and given["lora"] == ["owner/name/file:0.5"]
        assert (given["image"] is not None) == ("image" in keywords)
        assert given["steps"] == values.get("num_inference_steps")
        if not demo_path(model):  # the command reads the other values from the demo model's folder
            for name in ("num_frames", "height", "width", "negative_prompt"):
                assert given[name] == values.get(name)
            assert given["guidance"] == values.get("guidance_scale")


def test_facts_of_guidance_are_those_of_pipelines():
    """A family has a scale that switches guidance off if its pipeline's defaults run guidance by that scale."""
    for model, (pipeline, _) in PIPELINES.items():
        facts, parameters = identify(model).facts, inspect.signature(getattr(diffusers, pipeline).__call__).parameters
        true_scale, scale = (parameters.get(name) for name in ("true_cfg_scale", "guidance_scale"))
        if (true_scale is None and scale is None) or "negative_prompt" not in parameters or demo_path(model):
            continue  # a component sets the scale, or guidance is in the weights
        assert (facts.unguided is not None) == (true_scale is None and scale.default > 1) or facts.name == "wan_animate"


@pytest.mark.parametrize(
    "name, key",
    [
        ("rtx4090", "4090"),
        ("RTX 4090", "4090"),
        ("4090", "4090"),
        ("GeForce RTX 3060", "3060"),
        ("rtx-5090", "5090"),
        ("L40S", "l40s"),
        ("RTX A6000", "a6000"),
        ("rtxa6000", "a6000"),
        ("b200", "b200"),
        ("A100 80GB", "a100"),
        ("a100-40gb", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("4090 laptop", None),
        ("gh200", None),
        ("H100 PCIe", None),
        ("", None),
    ],
)
def test_cards_are_known_by_their_usual_names(name, key):
    assert known_card(name) == key
    assert all(known_card(each) == each and known_card(card.title.replace(" of ", " ")) for each, card in CARDS.items())


@pytest.mark.parametrize(
    "model",
    [
        *(
            "sdxl",
            "stabilityai/stable-diffusion-xl-base-1.0",
            "stabilityai/sdxl-turbo",
            "runwayml/stable-diffusion-v1-5",
        ),
        *("stabilityai/stable-diffusion-2-1", "stabilityai/stable-video-diffusion-img2vid-xt", "Kwai-Kolors/Kolors"),
    ],
)
def test_models_with_a_unet_are_refused(model):
    """Presets can't accelerate a UNet, so there is no recommendation."""
    with pytest.raises(UnsupportedError, match=r"^model must be a diffusion transformer, got .* a UNet can't be"):
        recommend(model)


def test_folders_with_a_unet_are_refused(tmp_path):
    index = {"_class_name": "StableDiffusionXLPipeline", "unet": ["diffusers", "UNet2DConditionModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedError, match="denoises with a UNet"):
        recommend(str(tmp_path))


def test_guidance_is_in_the_lines():
    """Qwen-Image runs with the negative prompt that switches guidance on, unless it is distilled."""
    found = recommend("Qwen/Qwen-Image", gpu="h200")
    assert 'negative_prompt=" "' in found.python and parse(found.shell)["negative_prompt"] == " "
    assert "negative" not in recommend("Qwen/Qwen-Image", steps=8, distilled=True).python
