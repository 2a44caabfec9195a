"""Recommendations fit the model and the GPU, by count, and their lines fit the pipeline and the command."""

import ast
import inspect
import json
import re
import shlex
from pathlib import Path

import diffusers
import pytest
import torch
import typer
from safetensors.torch import save_file

import dit_accel
from dit_accel.cli import app
from dit_accel.errors import ArgumentError, UnsupportedError
from dit_accel.models.families import FAMILIES, known_family
from dit_accel.models.parallel.context_parallel import split_plan
from dit_accel.presets import load_preset
from dit_accel.tools.advise.cards import CARDS, known_card
from dit_accel.tools.advise.identify import IDS, TABLE, identify
from dit_accel.tools.advise.memory import BILLION, EIGHT_BITS, RESERVED, count, row_of
from dit_accel.tools.advise.recommend import Recommendation, recommend
from dit_accel.tools.demo import demo_path
from scripts.bench.call_speed.pipelines import CASES
from scripts.bench.recommended import placement
from tests.models import tiny

RESULTS = Path(__file__).parents[3] / "docs" / "results"
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
    "Wan-AI/Wan2.2-Animate-14B-Diffusers": ("wan_animate", False, "WanAnimate", None),
    "Wan-AI/Wan2.1-VACE-14B-diffusers": ("wan_vace", False, "WanVACE", 50),
    "FastVideo/FastWan2.1-T2V-1.3B-Diffusers": ("wan", True, "Wan", None),
    "mine/TurboWan2.1-T2V-1.3B-480P": ("wan", True, "Wan", None),
    "Skywork/SkyReels-V2-T2V-14B-540P-Diffusers": ("skyreels_v2", False, "SkyReelsV2", 50),
    "hunyuanvideo-community/HunyuanVideo-I2V": ("hunyuan_video", False, "HunyuanVideoImageToVideo", 50),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": ("hunyuan_video15", False, "HunyuanVideo15", 50),
    "Lightricks/LTX-Video": ("ltx", False, "LTX", 50),
    "Lightricks/LTX-2": ("ltx2", False, "LTX2", 30),
    "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS": ("any", False, "PixArtSigma", None),
    "nvidia/Cosmos-1.0-Diffusion-7B-Text2World": ("any", False, "CosmosTextToWorld", None),
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
    "schnell": ("flux", True, None, None),
    "klein": ("flux2", True, None, None),
    "auraflow": ("any", False, None, None),
    "hunyuanvideo-1.5": ("hunyuan_video15", False, None, None),
}

PIPELINES = {name: facts[2:] for name, facts in MODELS.items() if facts[2]}
GPUS = ("t4", "v100", "2080 ti", "3060", "3090", "4060", "4070", "4080", "4090", "5070 ti", "5090", "l4", "l40s")
GPUS += ("a10", "a100 40gb", "a100", "h100", "h200", "b200", "mi300x", "m4 max", "dgx spark")
GENERATE = typer.main.get_command(app).commands["generate"]


def printed(found: Recommendation) -> str:
    """All that the command prints."""
    return "\n".join([*map(" ".join, found.choices), *found.notes, found.python, found.shell])


def results(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def rows_of(name: str) -> list[dict]:
    return [row for run in results(name)["runs"] for row in run["rows"]]


NO_SIZE = (None, None, None)


def counted(model: str, size: tuple = NO_SIZE, *, few: bool = False, quantized: bool = False):
    return count(identify(model), size, few=few, quantized=quantized)


def test_families_are_known_by_ids():
    """Known ids lead to their family, and names of distilled models are noticed."""
    found = {name: identify(name) for name in MODELS}
    expected = {name: facts[:2] for name, facts in MODELS.items()}
    assert {name: (model.family, model.is_distilled) for name, model in found.items()} == expected
    assert identify("rhymes-ai/Allegro").is_video and not identify("nvidia/Cosmos-Predict2-2B-Text2Image").is_video
    assert all(identify(row["ids"][0]).family == row["family"] for row in TABLE["models"])


def test_every_family_has_an_id_and_a_recommendation():
    """Each family of the registry is identified by some id, and gets presets that fit it."""
    assert {family.name for family in FAMILIES} <= {family for family, *_ in MODELS.values()}
    for family in FAMILIES:
        frames = None if family.makes == "images" else 81
        for preset, _ in recommend(family.name, height=512, width=512, frames=frames).choices:
            assert load_preset(preset).model in ("any", family.name)


def test_folders_are_known_by_their_index_and_counted_by_their_files(tmp_path):
    """The class of the transformer gives the family, and the shapes in the files all sizes; a UNet is refused."""
    names = {"FluxTransformer2DModel": "flux", "WanTransformer3DModel": "wan", "LatteTransformer3DModel": "any"}
    for transformer, family in names.items():
        index = {"transformer": ["diffusers", transformer], "text_encoder": ["transformers", "T5EncoderModel"]}
        (tmp_path / "model_index.json").write_text(json.dumps(index))
        assert identify(str(tmp_path)).family == family
    for part, dtype in {"transformer": torch.float32, "text_encoder": torch.bfloat16}.items():
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text('{"num_attention_heads": 2, "attention_head_dim": 8}')
        assert counted(str(tmp_path)) is None and "not counted" in printed(recommend(str(tmp_path), gpu="4090"))
        save_file({"weight": torch.zeros(1000, 100, dtype=dtype)}, tmp_path / part / "model.safetensors")
    found = counted(str(tmp_path))
    assert found.transformers == found.texts == (BILLION * 1e-4,) and 0 < found.step < 0.1
    for text, reason in (('{"unet": ["diffusers", "UNet2DConditionModel"]}', "with a UNet"), ("[]", "a JSON object")):
        (tmp_path / "model_index.json").write_text(text)
        with pytest.raises((UnsupportedError, ArgumentError), match=reason):
            recommend(str(tmp_path))


# Models by their names in files of results, which are transformers of full size with random weights.
MEASURED = {"flux": "FLUX.1-dev", "flux2": "FLUX.2-dev", "flux2-klein-4b": "FLUX.2-klein-4B", "ltx2": "LTX-2"}
MEASURED |= {"hunyuan": "HunyuanVideo", "krea2": "Krea-2-Raw", "qwen-image": "Qwen-Image"}
MEASURED |= {"wan-1.3b": "Wan2.1-T2V-1.3B-Diffusers", "wan-14b": "Wan2.1-T2V-14B-Diffusers"}
MEASURED |= {"wan-i2v-14b": "Wan2.1-I2V-14B-480P-Diffusers"}


@pytest.mark.parametrize("name", sorted(MEASURED.keys() - {"wan-14b"}))
def test_counts_of_steps_are_not_below_measured_peaks(name):
    row = next(row for row in results(f"speed-{name}")["rows"] if row["run"] == "plain")
    memory = counted(MEASURED[name], (480, 832, 81) if name.startswith(("hunyuan", "wan")) else NO_SIZE, few=True)
    assert row["peak_gib"] <= memory.transformers[0] + memory.step


def test_counts_of_calls_are_not_below_measured_peaks():
    """Of whole calls, in little memory with each way to offload, and of autoencoders."""
    for row in rows_of("calls"):
        if row["gpus"] == 1 and row["way"] in ("eager", "exact", "balanced"):
            memory = counted(row["model"], row["size"], few=not row["guidance"])
            in_float32 = memory.autoencoder + memory.decoding[0] if row["case"].startswith("wan") else 0.0
            assert row["peak_gib"] <= memory.needed("whole", memory.decoding[0]) + in_float32, row["model"]
    for row in rows_of("recommended"):
        facts = placement(CASES[row["case"]], str(row["card_gib"]))
        assert row["lines"] != facts["lines"] or row["peak_gib"] <= facts["counted_gib"], row
    for row in rows_of("small-cards"):
        size = (480, 832, 33) if len(row["latents"]) == 5 else NO_SIZE
        memory = counted(MEASURED[row["case"]], size, few=True, quantized=row["weights"] != "bf16")
        needed = {"model": memory.needed("model", 0.0), "linear": EIGHT_BITS * memory.transformers[0] + memory.step}
        assert row.get("peak_gib", 0) <= needed.get(row["way"], memory.needed("group", 0.0)), row
    rows = results("decoding")["rows"]
    peaks = {row["decoded"]: row["diffusers"]["gib"] for row in rows if "decoded" in row and row["dtype"] == "bf16"}
    fused = {row["decoded"]: row["fused"]["gib"] for row in rows if "decoded" in row and row["dtype"] == "bf16"}
    for kind in (kind for kind in TABLE["autoencoders"].values() if "row" in kind):
        assert kind.get("fused_gib", fused[kind["row"]]) == pytest.approx(fused[kind["row"]], abs=2e-3)
        assert kind.get("gib", kind.get("tiled_gib")) == pytest.approx(peaks[kind["row"]], abs=2e-3)
    tiled = TABLE["autoencoders"]["AutoencoderKLHunyuanVideo"]["tiled_gib"]
    assert tiled == pytest.approx(peaks["HunyuanVideo in tiles, the same"], abs=2e-3)


@pytest.mark.parametrize("gpu", GPUS)
def test_no_line_runs_out_of_memory_by_its_own_count(gpu):
    """A line is printed if the peak fits the card, with the same offload in Python as in the shell, or is unknown."""
    card = CARDS[known_card(gpu)]
    for model in {**MODELS, **dict.fromkeys(IDS)}:
        found = recommend(model, gpu=gpu)
        text = printed(found)
        if not found.python:
            assert re.search("too little(, and| even with) offloading|is too little", text) and not found.shell, model
        elif found.gib is None:
            assert "not counted" in text or card.memory_gib is None, model
        else:
            assert found.gib <= card.memory_gib - RESERVED, model
        offloads = {"model": "cpu_offload(", "text": 'modules=["transformer', "group": "use_stream=True)"}
        options = parse(found.shell) if found.shell else {}
        taken = {way for way in offloads if offloads[way] in found.python}
        assert not options or taken == {options["offload"]} - {"none"}
        assert ("plain torch" in text) == ((card.capability or (0, 0)) < (8, 0)), model
        assert "plain torch" not in text or not re.search("8bit|with fused", text), model
        assert ("no bf16" in text) == (bool(found.python) and gpu in GPUS[:3]), model
        assert ("CUDA 12.6" in text) == (bool(found.python) and gpu == "v100"), model
        dtype, device = options.get("dtype") or "bfloat16", "mps" if card.device == "mps" else None
        assert not options or (f"dtype=torch.{dtype}" in found.python and options["device"] == device), model
        assert all(note.endswith(".") for note in found.notes)


def parse(shell: str) -> dict:
    """Options of a printed command, by the parser of the real one."""
    words = shlex.split(shell)
    return GENERATE.make_context("generate", words[words.index("generate") + 1 :]).params


OFFLOAD = "--offload model"
TO_GPU = 'pipe.to("cuda")'


@pytest.mark.parametrize(
    ("model", "options", "expected", "absent"),
    [
        ("someone/model", {"gpus": 8, "gpu": "4090"}, "tokens can't be split", "torchrun"),
        ("mochi", {"gpus": 2}, "tokens can't be split", "torchrun"),
        ("wan", {"gpus": 2}, "parallelize_pipeline(pipe, branches=2)", "ulysses"),
        ("wan", {"gpus": 2, "gpu": "4090"}, "so the lines are for one", "torchrun"),
        ("wan", {"gpus": 2, "distilled": True}, "--parallel ulysses=2 ", "branches"),
        ("wan", {"gpus": 3}, "--parallel ulysses=3 ", "branches"),
        ("wan", {"gpus": 4}, "--parallel ulysses=2,branches=2 ", "one GPU"),
        ("black-forest-labs/FLUX.1-Kontext-dev", {"gpu": "4070"}, "in host memory (31 GiB of weights)", TO_GPU),
        ("FLUX.1-dev", {"gpu": "4090"}, "8 bits all of it fits; in bf16 use --offload model.", "pu_offload("),
        ("Wan-AI/Wan2.1-T2V-14B-Diffusers", {"gpu": "4090"}, 'balanced-8bit", linear={"weights": "host"})', TO_GPU),
        ("black-forest-labs/FLUX.2-klein-4B", {"gpu": "4070"}, "encoders wait in host memory (7 GiB", "-8bit --"),
        ("Tongyi-MAI/Z-Image-Turbo", {"gpu": "3060"}, "8bit --set linear.weights=host", "generate --compare"),
        ("Wan-AI/Wan2.1-T2V-14B-Diffusers", {"gpu": "a100"}, TO_GPU, "--offload"),
        ("Wan-AI/Wan2.2-T2V-A14B-Diffusers", {"gpu": "l40s"}, OFFLOAD, TO_GPU),
        ("wan2.2", {"gpu": "5090"}, "so Wan-AI/Wan2.2-T2V-A14B-Diffusers is counted", TO_GPU),
        ("hunyuanvideo-community/HunyuanVideo", {"gpu": "h100"}, "pipe.vae.enable_tiling()", "sparge"),
        ("hunyuanvideo-community/HunyuanVideo", {"gpu": "h100", "frames": 61}, "--num-frames 61", "enable_tiling"),
        ("hunyuanvideo-1.5", {"gpu": "4090"}, "decoding unknown, decoding in tiles", "--compare --model"),
        ("hunyuanvideo-1.5_i2v", {"gpu": "a6000"}, '"transformer_2", "vae", "image_encoder"])', TO_GPU),
        ("meituan-longcat/LongCat-Image", {"gpu": "4080"}, "token; --call enable_prompt_rewrite=false (Py", OFFLOAD),
        ("baidu/ERNIE-Image", {"gpu": "4090"}, OFFLOAD, "use_pe"),
        ("black-forest-labs/FLUX.1-schnell", {}, "--steps 4", "No number"),
        ("someone/FLUX.1-Turbo", {}, "add --steps", "--steps 4"),
        ("Qwen/Qwen-Image", {"gpu": "h200"}, 'negative_prompt=" "', "distilled"),
        ("Qwen/Qwen-Image", {"loras": {"lightx2v/Qwen-Image-Lightning/V1.0-4steps.file": 1}}, "--steps 4", "negative"),
        ("wan", {"loras": {"lightx2v/Wan2.2-Lightning": 1}}, "--steps 4 --guidance 1", "50"),
        ("HiDream-ai/HiDream-I1-Full", {"gpu": "4090"}, "text_encoder_4=text_encoder_4", "dit-accel generate --"),
        ("black-forest-labs/FLUX.1-dev", {"gpu": "v100"}, "--dtype float16 --offload text", "bfloat16"),
        ("black-forest-labs/FLUX.1-Fill-dev", {"gpu": "t4"}, "may give black images", "dtype float16"),
        ("black-forest-labs/FLUX.1-schnell", {"gpu": "m4 max"}, "hardly faster on this GPU", "8bit"),
        ("wan", {"gpu": "h100", "steps": 4}, "forecasts save little.", "8bit"),
        ("MiniMaxAI/MiniMax-H3", {"gpu": "dgx spark"}, "too little, and offloading frees none", "offload("),
        ("hunyuanvideo-community/HunyuanVideo", {"gpu": "dgx spark"}, "enable_tiling", "cpu_offload"),
        ("ltx-2.3", {"gpu": "h100"}, "no known size, so Lightricks/LTX-2 is counted", "LTX-2.3"),
        ("FLUX.1-dev", {"steps": 8}, "--model black-forest-labs/FLUX.1-dev --preset balanced", "MODEL"),
        ("MiniMaxAI/MiniMax-H3", {}, 'load_components(workflow="t2va", ', "--offload"),
        ("MiniMaxAI/MiniMax-H3", {"gpu": "h100"}, 'enable_auto_cpu_offload(device="cuda")', TO_GPU),
        ("MiniMaxAI/MiniMax-H3", {"gpu": "4090"}, "even with offloading", "dit-accel generate"),
        ("FLUX.1-dev", {"steps": 4, "quantized": True, "gpu": "4090"}, "--preset exact", "8bit"),
    ],
    ids=str,
)
def test_lines_and_notes_follow_the_request(model, options, expected, absent):
    text = printed(recommend(model, **options))
    assert expected in text and absent not in text and "docs/guide/choosing.md" in text


def test_plans_are_those_of_the_code():
    """Families that are said to share tokens have a plan, as far as tiny pipelines show."""
    for name in ("flux", "wan", "sd3", "mochi"):
        pipe = tiny.pipeline(name)
        family = known_family(pipe.transformer)
        assert ("ulysses" in family.sharing) == (split_plan(pipe.transformer, family) is not None), name


def test_8_bits_are_offered_where_a_gpu_multiplies_them_and_weights_are_plain():
    """For images; of few steps all are computed. A name can say that weights have 4 bits."""
    last = lambda *model, **options: recommend(*model, **options).choices[-1][0]  # noqa: E731
    assert [last("flux", gpu=gpu) for gpu in ("4090", "a100", "mi300x", None)] == ["turbo-8bit"] * 2 + ["turbo"] * 2
    names = "klein", "wan", "x/FLUX.1-dev-bnb-nf4"
    assert [last(name, gpu="4090") for name in names] == ["exact-8bit", "turbo", "turbo"]
    assert last("schnell", gpu="4090") == last("flux", gpu="4070") == "turbo", "offered first, and under group offload"
    assert "Weights in 4 bits run as they are" in printed(recommend("x/ERNIE-Image-Turbo-nunchaku-lite-nvfp4"))


@pytest.mark.parametrize("wrong", [{"gpu": "x"}, {"steps": 0}, {"gpus": "2"}, {"frames": 81}, {"model": None}], ids=str)
def test_bad_arguments_are_printed(wrong):
    """An unknown card, no number from 1 on, frames of an image, no name: an error that names the argument."""
    with pytest.raises(UnsupportedError, match=f"^{next(iter(wrong))} must be"):
        recommend(**{"model": "flux", **wrong})


@pytest.mark.parametrize(
    ("model", "advice"),
    {
        "sdxl": "a UNet can't be accelerated",
        "fal/FLUX.2-dev-Turbo": "has LoRAs: .* its base, black-forest-labs/FLUX.2-dev",
        "hunyuan": "did you mean demo-hunyuan or hunyuan_video or hunyuan_video15 or hunyuan_image?",
        "flx": "did you mean flux or flux2 or flux3?",
        "FLUX.1-dve": "did you mean black-forest-labs/FLUX.1-dev?",
        "city96/FLUX.1-dev-gguf": "has GGUF files: .*, black-forest-labs/FLUX.1-dev",
        "InstantX/Qwen-Image-ControlNet-Union": "a part of a pipeline: .* the original, Qwen/Qwen-Image",
        "nunchaku-tech/nunchaku-qwen-image": "nunchaku.*, Qwen/Qwen-Image",
        "black-forest-labs/FLUX.2-dev-NVFP4": "BFLQuantizationConfig.*, black-forest-labs/FLUX.2-dev",
        "Comfy-Org/z_image_turbo": "files for ComfyUI.*, Tongyi-MAI/Z-Image-Turbo",
        "tencent/HunyuanVideo": "a copy in that format, hunyuanvideo-community/HunyuanVideo",
        "tencent/HunyuanVideo-1.5": "that format, hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
        "Lightricks/LTX-2.3": "a copy in that format, diffusers/LTX-2.3-Diffusers",
        "nvidia/Cosmos-Predict2.5-2B": "in revisions, such as diffusers/base/post-trained: .* its folder",
        "tencent/HunyuanImage-3.0": "has no pipeline in diffusers: use HunyuanImage 2.1",
        "lightx2v/Qwen-Image-Lightning": "has LoRAs: name one with --lora, and as the model its base, Qwen/Qwen-Image",
    }.items(),
)
def test_models_that_cannot_load_get_advice(model, advice):
    with pytest.raises(UnsupportedError, match=rf"^model must be .*, got '{model}'.*{advice}[?]?$".replace("??", "?")):
        recommend(model)


@pytest.mark.parametrize("model", PIPELINES)
def test_printed_lines_fit_the_pipeline(model):
    """Calls have arguments of their methods and all required ones; Python's have the values of the shell's."""
    pipeline, default_steps = PIPELINES[model]
    signature = inspect.signature(getattr(diffusers, f"{pipeline}Pipeline").__call__)
    is_video = "num_frames" in signature.parameters
    for steps, gpu, gpus in ((None, None, 1), (None, "RTX 4090", 2), (4, "h200", 1), (50, "RTX 4090", 1)):
        frames = 33 if is_video and gpus == 2 else None
        found = recommend(model, steps=steps, gpu=gpu, gpus=gpus, frames=frames, loras={"owner/name/file": 0.5})
        calls = [node for node in ast.walk(ast.parse(found.python)) if isinstance(node, ast.Call)]
        for call in calls:
            owner, _, name = ast.unparse(call.func).rpartition(".")
            method = getattr({"pipe": diffusers.DiffusionPipeline, "dit_accel": dit_accel}.get(owner), name, None)
            if method is not None:
                words = {word.arg: word.value for word in call.keywords}
                inspect.signature(method).bind(*([None] if owner == "pipe" else []), *call.args, **words)
        if not found.python:
            continue
        call = calls[[ast.unparse(call.func) for call in calls].index("pipe")]
        keywords = {word.arg: word.value for word in call.keywords}
        signature.bind(None, **dict.fromkeys(keywords), **({"kwargs": {}} if "kwargs" in signature.parameters else {}))
        values = {name: node.value for name, node in keywords.items() if isinstance(node, ast.Constant)}
        assert values.get("num_inference_steps") == (steps or default_steps)
        if identify(model).steps is None and not demo_path(model) and default_steps:
            assert signature.parameters["num_inference_steps"].default == default_steps
        required = {name for name, item in signature.parameters.items() if item.default is item.empty}
        assert required - {"self", "kwargs"} <= set(keywords)
        if not found.shell:
            assert set(keywords) - set(signature.parameters) == set() and "Use Python" in printed(found)
            continue
        options = parse(found.shell)
        assert options["model"] == identify(model).name and options["lora"] == ["owner/name/file:0.5"]
        assert (options["image"] is not None) == ("image" in keywords)
        assert options["steps"] == values.get("num_inference_steps")
        if not demo_path(model):  # the command reads the other values from the demo model's folder
            for argument in ("num_frames", "height", "width", "negative_prompt"):
                assert options[argument] == values.get(argument)
            assert options["guidance"] == values.get("guidance_scale")


def test_facts_of_guidance_are_those_of_pipelines():
    """Scales that switch guidance off, and arguments that rewrite the prompt, are those that pipelines have."""
    for model, (pipeline, _) in PIPELINES.items():
        facts = identify(model).facts
        parameters = inspect.signature(getattr(diffusers, f"{pipeline}Pipeline").__call__).parameters
        rewrites = next((name for name in ("enable_prompt_rewrite", "use_pe") if name in parameters), None)
        assert row_of(identify(model)).get("rewrites") == rewrites, model
        true_scale, scale = (parameters.get(name) for name in ("true_cfg_scale", "guidance_scale"))
        has_scale = true_scale is not None or scale is not None
        if facts is None or not has_scale or "negative_prompt" not in parameters or demo_path(model):
            continue  # a component sets the scale, or guidance is in the weights
        assert (facts.unguided is not None) == (true_scale is None and scale.default > 1) or facts.name == "wan_animate"


USUAL_NAMES = {
    "4090": ("rtx4090", "NVIDIA GeForce RTX 4090", "4090"),
    "a100-40gb": ("a100-40gb", "NVIDIA A100-SXM4-40GB"),
    "h100": ("NVIDIA H100 80GB HBM3", "H100 PCIe"),
    "4070-ti-super": ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070tisuper"),
    None: ("4090 laptop", "4090 D", "RTX 2050", ""),
}


def test_cards_are_known_by_their_usual_names():
    for key, names in USUAL_NAMES.items():
        assert {name: known_card(name) for name in names} == dict.fromkeys(names, key)
    for key, card in CARDS.items():
        assert known_card(key) == key and known_card(card.title.replace(" of ", " "))
