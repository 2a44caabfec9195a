"""Recommendations name presets, options and lines that fit the model; figures stand in docs/guide/choosing.md."""

import ast
import inspect
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
from dit_accel.tools.demo import demo_path
from tests.models import tiny

DOCS = Path(__file__).parents[3] / "docs"
# Family, whether it is distilled, class of the pipeline without "Pipeline", and number of steps of the printed lines.
# None = no pipeline of its own, or no number.
MODELS = {
    "black-forest-labs/FLUX.1-dev": ("flux", False, "Flux", 28),
    "black-forest-labs/FLUX.1-schnell": ("flux", True, "Flux", 4),
    "black-forest-labs/FLUX.1-Kontext-dev": ("flux", False, "FluxKontext", 28),
    "black-forest-labs/FLUX.1-Fill-dev": ("flux", False, "FluxFill", None),
    "black-forest-labs/FLUX.1-Canny-dev": ("flux", False, "FluxControl", None),
    "black-forest-labs/FLUX.2-dev": ("flux2", False, "Flux2", 50),
    "black-forest-labs/FLUX.2-klein-4B": ("flux2", True, "Flux2Klein", 4),
    "black-forest-labs/FLUX.2-klein-base-4B": ("flux2", False, "Flux2Klein", 50),
    "Qwen/Qwen-Image": ("qwen_image", False, "QwenImage", 50),
    "Qwen/Qwen-Image-Edit": ("qwen_image", False, "QwenImageEdit", 50),
    "Qwen/Qwen-Image-2.1": ("qwen_image_21", False, "QwenImage21", 40),
    "Qwen/Qwen-Image-Layered": ("qwen_image", False, "QwenImageLayered", 50),
    "Tongyi-MAI/Z-Image-Turbo": ("z_image", True, "ZImage", 8),
    "Tongyi-MAI/Z-Image": ("z_image", False, "ZImage", 50),
    "stabilityai/stable-diffusion-3-medium-diffusers": ("sd3", False, "StableDiffusion3", 28),
    "stabilityai/stable-diffusion-3.5-large-turbo": ("sd3", True, "StableDiffusion3", 4),
    "HiDream-ai/HiDream-I1-Full": ("hidream", False, "HiDreamImage", 50),
    "HiDream-ai/HiDream-I1-Fast": ("hidream", True, "HiDreamImage", 16),
    "Alpha-VLLM/Lumina-Image-2.0": ("lumina2", False, "Lumina2", 30),
    "lodestones/Chroma1-HD": ("chroma", False, "Chroma", 35),
    "Photoroom/prx-1024-t2i-beta": ("prx", False, "PRX", 28),
    "krea/Krea-2-Raw": ("krea2", False, "Krea2", 28),
    "krea/Krea-2-Turbo": ("krea2", True, "Krea2", 8),
    "baidu/ERNIE-Image": ("ernie_image", False, "ErnieImage", 50),
    "baidu/ERNIE-Image-Turbo": ("ernie_image", True, "ErnieImage", 8),
    "meituan-longcat/LongCat-Image": ("longcat_image", False, "LongCatImage", 50),
    "zai-org/GLM-Image": ("glm_image", False, "GlmImage", 50),
    "hunyuanvideo-community/HunyuanImage-2.1-Diffusers": ("hunyuan_image", False, "HunyuanImage", 50),
    "hunyuanvideo-community/HunyuanImage-2.1-Distilled-Diffusers": ("hunyuan_image", True, "HunyuanImage", 8),
    "hunyuanvideo-community/HunyuanImage-2.1-Refiner-Diffusers": ("hunyuan_image", True, "HunyuanImageRefiner", 4),
    "meituan-longcat/LongCat-Image-Edit": ("longcat_image", False, "LongCatImageEdit", 50),
    "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers": ("kandinsky5", False, "Kandinsky5T2I", 50),
    "kandinskylab/Kandinsky-5.0-T2V-Lite-distilled16steps-5s-Diffusers": ("kandinsky5", True, "Kandinsky5T2V", 16),
    "kandinskylab/Kandinsky-5.0-I2V-Pro-sft-5s-Diffusers": ("kandinsky5", False, "Kandinsky5I2V", 50),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": ("wan", False, "Wan", 50),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": ("wan", False, "WanImageToVideo", 50),
    "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers": ("wan", False, "WanImageToVideo", None),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": ("wan", False, "Wan", 50),
    "Wan-AI/Wan2.2-Animate-14B-Diffusers": ("wan_animate", False, "WanAnimate", None),
    "Wan-AI/Wan2.1-VACE-14B-diffusers": ("wan_vace", False, "WanVACE", 50),
    "FastVideo/FastWan2.1-T2V-1.3B-Diffusers": ("wan", True, "Wan", None),
    "Skywork/SkyReels-V2-T2V-14B-540P-Diffusers": ("skyreels_v2", False, "SkyReelsV2", 50),
    "hunyuanvideo-community/HunyuanVideo-I2V": ("hunyuan_video", False, "HunyuanVideoImageToVideo", 50),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": ("hunyuan_video15", False, "HunyuanVideo15", 50),
    "Lightricks/LTX-Video": ("ltx", False, "LTX", 50),
    "Lightricks/LTX-2": ("ltx2", False, "LTX2", 30),
    "zai-org/CogVideoX-5b-I2V": ("cogvideox", False, "CogVideoXImageToVideo", 50),
    "genmo/mochi-1-preview": ("mochi", False, "Mochi", 64),
    "BestWishYsh/Helios-Base": ("helios", False, "Helios", 50),
    "demo-flux": ("flux", False, "Flux", 50),
    "demo-wan": ("wan", False, "Wan", 50),
    "demo-hunyuan": ("hunyuan_video", False, "HunyuanVideo", 50),
    "black-forest-labs/flux-3-image-klein": ("flux3", True, None, None),
    "black-forest-labs/flux-3-image-klein-base": ("flux3", False, None, None),
    "MiniMaxAI/MiniMax-H3": ("minimax_h3", False, None, None),
    "someone/something": ("any", False, None, None),
    "flux-dev": ("flux", False, None, None),
    "schnell": ("flux", True, None, None),
    "klein": ("flux2", True, None, None),
    "auraflow": ("any", False, None, None),
    "qwen-image": ("qwen_image", False, None, None),
    "z-image-turbo": ("z_image", True, None, None),
    "hunyuanvideo-1.5": ("hunyuan_video15", False, None, None),
    "flux.2-klein": ("flux2", True, None, None),
    "sd3.5-medium": ("sd3", False, None, None),
}
FIGURE = re.compile(r"\d+(?:\.\d+)?(?= ?(?:×|%|times|dB|ms|[MG]i?B)(?!\w))")


def printed(found: Recommendation) -> str:
    """All that the command prints, less the name of a card that has a figure."""
    lines = [*(f"{choice.preset} {choice.use}" for choice in found.choices), *found.notes, found.python, found.shell]
    return "\n".join(lines).replace("A100 of 40 GB", "A100")


GENERATE = typer.main.get_command(app).commands["generate"]


def parse(shell: str) -> dict:
    """Options of a printed command, by the parser of the real one."""
    words = shlex.split(shell)
    return GENERATE.make_context("generate", words[words.index("generate") + 1 :]).params


def test_families_are_known_by_ids():
    """Known ids lead to their family, and names of distilled models are noticed."""
    found = {name: identify(name) for name in MODELS}
    assert {name: (model.family, model.is_distilled) for name, model in found.items()} == {
        name: facts[:2] for name, facts in MODELS.items()
    }
    # Other transformer classes make videos if diffusers calls the class a 3D one.
    assert identify("rhymes-ai/Allegro").is_video and not identify("fal/AuraFlow").is_video


def test_every_family_has_an_id_and_a_recommendation():
    """Each family of the registry is identified by some id, and gets a preset that fits it."""
    assert {family.name for family in FAMILIES} <= {family for family, *_ in MODELS.values()}
    for family in FAMILIES:
        frames = None if family.makes == "images" else 81
        for choice in recommend(family.name, height=512, width=512, frames=frames).choices:
            assert load_preset(choice.preset).model in ("any", family.name)


def test_folders_are_known_by_their_index(tmp_path):
    """A pipeline's folder is assigned to a family by the class of its transformer; one with a UNet is refused."""
    names = {"FluxTransformer2DModel": "flux", "WanTransformer3DModel": "wan", "LatteTransformer3DModel": "any"}
    for transformer, family in names.items():
        (tmp_path / "model_index.json").write_text(json.dumps({"transformer": ["diffusers", transformer]}))
        assert identify(str(tmp_path)).family == family
    (tmp_path / "model_index.json").write_text(json.dumps({"unet": ["diffusers", "UNet2DConditionModel"]}))
    with pytest.raises(UnsupportedError, match="denoises with a UNet"):
        recommend(str(tmp_path))


def test_peaks_are_those_of_the_speed_files():
    """GiB of a transformer are the plain run's."""
    for peak in PEAKS:
        rows = json.loads((DOCS / "results" / f"{peak.source}.json").read_text(encoding="utf-8"))["rows"]
        plain = next(row for row in rows if row["run"] == "plain")
        assert peak.gib == round(plain["peak_gib"], 1), peak


@pytest.mark.parametrize("model", [*(family.name for family in FAMILIES), "any", "demo-wan"])
def test_notes_have_no_figures(model):
    """Figures are on the page that the first note names; the presets suit few steps."""
    for steps, gpus, gpu in ((None, 1, None), (None, 2, "h100"), (4, 2, None), (8, 1, "h100"), (50, 2, None)):
        found = recommend(model, steps=steps, gpus=gpus, gpu=gpu)
        assert not FIGURE.findall(printed(found)) and "docs/guide/choosing.md" in found.notes[0]
        assert all(note.endswith(".") for note in found.notes)
        if steps in (4, 8):
            assert ("none to forecast" if steps == 4 else "forecasts save little") in printed(found)
            assert found.choices[0].preset == ("exact" if steps == 4 else "balanced")


def test_plans_are_those_of_the_code():
    """Families that are said to share tokens have a plan, as far as tiny pipelines show."""
    for name in ("flux", "wan", "sd3", "mochi"):
        pipe = tiny.pipeline(name)
        family = known_family(pipe.transformer)
        plan = split_plan(pipe.transformer, family)
        assert ("ulysses" in family.sharing) == (plan is not None), name


OFFLOAD = "--offload model"


@pytest.mark.parametrize(
    ("model", "options", "expected", "absent"),
    [
        ("someone/model", {"gpus": 8}, "tokens can't be split", "torchrun"),
        ("mochi", {"gpus": 2}, "tokens can't be split", "torchrun"),
        ("wan", {"gpus": 2}, "parallelize_pipeline(pipe, branches=2)", "ulysses"),
        ("wan", {"gpus": 2}, "--parallel branches=2 ", "ulysses"),
        ("wan", {"gpus": 2, "distilled": True}, "--parallel ulysses=2 ", "branches"),
        ("flux", {"gpu": "4090"}, OFFLOAD, "not measured"),  # all its measured models take the same memory
        ("wan", {"gpu": "4090"}, "Memory was not measured", OFFLOAD),
        ("black-forest-labs/FLUX.1-Kontext-dev", {"gpu": "4090"}, "Memory was not measured", OFFLOAD),
        ("Wan-AI/Wan2.1-T2V-14B-Diffusers", {"gpu": "a100"}, "--preset", OFFLOAD),
        ("Wan-AI/Wan2.2-T2V-A14B-Diffusers", {"gpu": "a100"}, OFFLOAD, "not measured"),  # two transformers
        ("black-forest-labs/FLUX.1-schnell", {}, "--steps 4", "--guidance 3"),
        ("Tongyi-MAI/Z-Image-Turbo", {}, "--steps 8 --guidance 0", "No number"),
        ("someone/FLUX.1-Turbo", {}, "add --steps", "--steps 4"),
        ("Qwen/Qwen-Image", {"gpu": "h200"}, 'negative_prompt=" "', "distilled"),
        ("Qwen/Qwen-Image", {"steps": 8, "distilled": True}, "--steps 8", "negative"),
        ("black-forest-labs/FLUX.1-dev", {"gpu": "t4"}, "Fused kernels need", "--offload group"),
    ],
    ids=str,
)
def test_lines_and_notes_follow_the_request(model, options, expected, absent):
    text = printed(recommend(model, **options))
    assert expected in text and absent not in text


def test_pipelines_are_made_to_fit_their_card():
    """A transformer of 27 GiB fits a large card, fills half of a middling one, and fits a small one by halves."""
    for gpu, options in {
        "h200": "",
        "l40s": "--offload model",
        "4090": "--quantize float8 --offload model",
        "3090": "--quantize int8 --offload model",
        "t4": "--offload group",
    }.items():
        found = recommend("hunyuanvideo-community/HunyuanVideo", gpu=gpu)
        assert " ".join(re.findall(r"--(?:quantize|offload) \S+", found.shell)) == options, gpu
        assert ("upload nothing" in " ".join(found.notes)) == ("group" in options), gpu


@pytest.mark.parametrize(
    "wrong", [{"gpu": "voodoo"}, {"steps": 0}, {"gpus": "2"}, {"frames": 81}, {"model": None}], ids=str
)
def test_bad_arguments_are_printed(wrong):
    """An unknown card, no number from 1 on, frames of an image, no name: an error that names the argument."""
    with pytest.raises(UnsupportedError, match=f"^{next(iter(wrong))} must be"):
        recommend(**{"model": "flux", **wrong})


def test_short_and_misspelt_names_get_a_question():
    for name, meant in {
        "hunyuan": "demo-hunyuan or hunyuan_video or hunyuan_video15 or hunyuan_image",
        "flx": "flux or flux2 or flux3",
    }.items():
        with pytest.raises(UnsupportedError, match=f"got '{name}'; did you mean {meant}[?]$"):
            identify(name)


def test_memory_is_enough_up_to_all_of_it(monkeypatch):
    """Half of a card of 80 GiB without offloading, the whole with it, and a transformer of 1 / 0.65 of it in 8 bits."""
    limits = {40.0: [], 40.1: ["model"], 80.0: ["model"], 80.1: ["float8"], 123.0: ["float8"], 123.1: ["group"]}
    for gib, fitting in limits.items():
        monkeypatch.setattr(module, "PEAKS", (Peak("flux", "flux", 1, gib, "none"),))
        options, notes = module._fitted(identify("flux"), CARDS["h100"], quantized=False, is_shared=False)
        assert options[1:2] == fitting and bool(notes) == bool(fitting), gib
        assert module._fitted(identify("flux"), CARDS["h100"], quantized=True, is_shared=False) == ([], [])


def test_a_long_video_begins_at_the_measured_one():
    """Of as many tokens, whichever side is the longer one; the preset that skips tiles is then offered last."""
    for size, is_long in {(256, 1024, 49): True, (1024, 256, 52): True, (256, 1024, 48): False}.items():
        names = [choice.preset for choice in module._choices(identify("wan"), size, 50)]
        assert names == ["balanced", "quality", "turbo", *["wan21-sparge-balanced"] * is_long], size


def test_branches_are_shared_by_an_even_number_of_gpus():
    """A distilled model has one branch."""
    ways = {2: "branches=2", 3: "ulysses=3", 4: "ulysses=2,branches=2"}
    assert {gpus: module._shared(identify("wan"), gpus, few=False)[0] for gpus in ways} == ways
    assert module._shared(identify("wan"), 2, few=True)[0] == "ulysses=2"


PIPELINES = {name: facts[2:] for name, facts in MODELS.items() if facts[2]}


@pytest.mark.parametrize("model", PIPELINES)
def test_printed_lines_fit_the_pipeline(model):
    """Python's call has arguments of the pipeline and all required ones, with the same values as the shell's."""
    pipeline, default_steps = PIPELINES[model]
    signature = inspect.signature(getattr(diffusers, f"{pipeline}Pipeline").__call__)
    is_video = "num_frames" in signature.parameters
    for steps, gpu, gpus in ((None, None, 1), (None, "RTX 4090", 2), (4, "h200", 1), (50, "RTX 4090", 1)):
        frames = 33 if is_video and gpus == 2 else None
        found = recommend(model, steps=steps, gpu=gpu, gpus=gpus, frames=frames, loras={"owner/name/file": 0.5})
        *_, call = found.python.splitlines()
        compile(found.python, "lines of Python", "exec")
        keywords = {word.arg: word.value for word in ast.parse(call).body[0].value.keywords}
        signature.bind(None, **dict.fromkeys(keywords), **({"kwargs": {}} if "kwargs" in signature.parameters else {}))
        values = {name: node.value for name, node in keywords.items() if isinstance(node, ast.Constant)}
        assert values.get("num_inference_steps") == (steps or default_steps)
        if identify(model).steps is None and not demo_path(model) and default_steps:
            assert signature.parameters["num_inference_steps"].default == default_steps
        required = {name for name, item in signature.parameters.items() if item.default is item.empty}
        assert required - {"self", "kwargs"} <= set(keywords)
        assert bool(found.shell) == (not set(inputs_of(identify(model))) - {"image"})
        if not found.shell:
            assert set(keywords) - set(signature.parameters) == set() and "use Python" in printed(found)
            continue
        options = parse(found.shell)
        assert options["model"] == model and options["lora"] == ["owner/name/file:0.5"]
        assert (options["image"] is not None) == ("image" in keywords)
        assert options["steps"] == values.get("num_inference_steps")
        if not demo_path(model):  # the command reads the other values from the demo model's folder
            for name in ("num_frames", "height", "width", "negative_prompt"):
                assert options[name] == values.get(name)
            assert options["guidance"] == values.get("guidance_scale")


def test_facts_of_guidance_are_those_of_pipelines():
    """A family has a scale that switches guidance off if its pipeline's defaults run guidance by that scale."""
    for model, (pipeline, _) in PIPELINES.items():
        facts = identify(model).facts
        parameters = inspect.signature(getattr(diffusers, f"{pipeline}Pipeline").__call__).parameters
        true_scale, scale = (parameters.get(name) for name in ("true_cfg_scale", "guidance_scale"))
        if (true_scale is None and scale is None) or "negative_prompt" not in parameters or demo_path(model):
            continue  # a component sets the scale, or guidance is in the weights
        assert (facts.unguided is not None) == (true_scale is None and scale.default > 1) or facts.name == "wan_animate"


USUAL_NAMES = {
    "4090": ("rtx4090", "RTX 4090", "4090"),
    "3060": ("GeForce RTX 3060",),
    "5090": ("rtx-5090",),
    "l40s": ("L40S",),
    "a6000": ("RTX A6000", "rtxa6000"),
    "b200": ("b200",),
    "a100": ("A100 80GB",),
    "a100-40gb": ("a100-40gb",),
    "h100": ("NVIDIA H100 80GB HBM3",),
    None: ("4090 laptop", "gh200", "H100 PCIe", ""),
}


def test_cards_are_known_by_their_usual_names():
    for key, names in USUAL_NAMES.items():
        assert {name: known_card(name) for name in names} == dict.fromkeys(names, key)
    for key, card in CARDS.items():
        assert known_card(key) == key and known_card(card.title.replace(" of ", " "))


@pytest.mark.parametrize("model", ["sdxl", "stabilityai/stable-diffusion-2-1", "Kwai-Kolors/Kolors"])
def test_models_with_a_unet_are_refused(model):
    """Presets can't accelerate a UNet, so there is no recommendation."""
    with pytest.raises(UnsupportedError, match=r"^model must be a diffusion transformer, got .* a UNet can't be"):
        recommend(model)
