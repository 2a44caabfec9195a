"""What is recommended follows from files in docs/results, and docs/guide/choosing.md holds the same.

python -m tests.tools.test_recommend      # writes the page's tables anew
"""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer

from dit_accel.cli import app
from dit_accel.cli.recommend import figures
from dit_accel.errors import UnsupportedError
from dit_accel.models.context_parallel import split_plan
from dit_accel.models.families import FAMILIES, family_of, known_family
from dit_accel.presets import load_preset
from dit_accel.tools.identify import identify
from dit_accel.tools.recommend import HAS_PLAN, PEAK_GIB, SHARED_AMONG_TWO, Choice, recommend, token_count
from tests.models import tiny

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "guide" / "choosing.md"
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
    "someone/something": ("any", False),
}
FAMILY = {
    "FLUX.1": "flux",
    "Qwen-Image": "qwen_image",
    "FLUX.2": "flux2",
    "HunyuanVideo": "hunyuan_video",
    "Wan 2.1 and 2.2": "wan",
}
COUNTS = {"FLUX.1": (100, 50, 28, 20, 12, 8, 4), **dict.fromkeys([*FAMILY][1:], (50, 28))}


def rows(name: str) -> list[dict]:
    return json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def tables() -> str:
    """Figures of every number of steps that was measured, as the page shows them."""
    lines = [
        "| model | steps | `quality`: computed, PSNR dB, speed-up | `balanced` | `turbo` |",
        "|---|---|---|---|---|",
    ]
    for title, counts in COUNTS.items():
        for steps in counts:
            by_name = {choice.preset: choice for choice in recommend(FAMILY[title], steps=steps).choices}
            cells = [", ".join(figures(by_name[name])) for name in ("quality", "balanced", "turbo")]
            lines.append(f"| {title} | {steps} | {' | '.join(cells)} |")
    return "\n".join(lines)


def written(text: str) -> str:
    """The page with the tables of today between its marks."""
    begin, end = "<!-- figures -->\n\n", "\n\n<!-- end of figures -->"
    return re.sub(f"{begin}.*{end}", lambda _: f"{begin}{tables()}{end}", text, flags=re.DOTALL)


def test_the_page_holds_what_is_recommended():
    """docs/guide/choosing.md shows the figures that the command prints."""
    text = PAGE.read_text(encoding="utf-8")
    assert tables() in text and written(text) == text


@pytest.mark.parametrize("name", IDS)
def test_families_are_told_by_ids(name):
    """Known ids lead to their family, and names of distilled models are noticed."""
    found = identify(name)
    assert (found.family, found.is_distilled) == IDS[name]


def test_every_family_has_an_id_and_a_recommendation():
    """Each family of the registry is told by some id, and gets a preset that fits it."""
    assert {family.name for family in FAMILIES} <= {family for family, _ in IDS.values()}
    for family in FAMILIES:
        frames = None if identify(family.name).makes_images_alone else 81
        for choice in recommend(family.name, height=512, width=512, frames=frames).choices:
            assert load_preset(choice.preset).model in ("any", family.name)


@pytest.mark.parametrize("name", ["flux", "wan", "framepack"])
def test_folders_are_told_by_their_index(name, tmp_path):
    """A pipeline's folder tells its family by the class of its transformer."""
    index = {"_class_name": "P", "transformer": ["diffusers", type(tiny.pipeline(name).transformer).__name__]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert identify(str(tmp_path)).family == (name if name != "framepack" else "any")


def test_peaks_are_those_of_the_speed_files():
    """GiB of a transformer are the plain run's."""
    for (family, part), (gib, page) in PEAK_GIB.items():
        plain = next(row for row in rows(Path(page).stem) if row["run"] == "plain")
        assert gib == round(plain["peak_gib"], 1), (family, part)


def test_gains_of_two_gpus_are_those_of_the_table():
    """How many times faster two GPUs are stands in docs/results/parallel.json."""
    found = {(row["of"], row["run"]): row for name in ("parallel", "parallel-images") for row in rows(name)}
    runs = {
        "flux": ("flux, 2 devices", "14 of 50 steps"),
        "qwen_image": ("qwen-image, 2 devices", "14 of 50 steps"),
        "flux2": ("flux2, 2 devices", "14 of 50 steps"),
        "hunyuan_video": ("hunyuan, 2 devices", "14 of 50 steps"),
        "wan": ("wan-1.3b, 2 devices", "two branches, 14 of 50 steps"),
    }
    assert runs.keys() == SHARED_AMONG_TWO.keys()
    for family, key in runs.items():
        assert SHARED_AMONG_TWO[family][1] == pytest.approx(found[key]["over_one"], abs=0.005)


def test_plans_are_those_of_the_code():
    """Families that are said to share tokens have a plan, as far as tiny pipelines show."""
    for name in ("flux", "wan", "qwen-image", "hunyuan", "sd3", "mochi"):
        pipe = tiny.pipeline(name)
        plan = split_plan(pipe.transformer, known_family(pipe.transformer))
        assert (family_of(pipe) in HAS_PLAN) == (plan is not None), name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gpu": "4090", "steps": 28, "height": 1024, "width": 1024},
        {"gpu": "a100", "height": 480, "width": 832, "frames": 81, "lora": True, "quantized": True},
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
    words = shlex.split(found.shell)
    words = words[words.index("generate") + 1 :]
    typer.main.get_command(app).commands["generate"].make_context("generate", words)
    assert all(note.endswith(".") for note in found.notes)


def test_what_was_not_measured_is_said():
    """Steps, cards and models without figures are named in the notes."""
    notes = " ".join(recommend("someone/model", gpu="a100", steps=35, quantized=True, gpus=8).notes)
    for said in ("35 steps were not measured", "Speed was not measured", "neither speed nor PSNR", "no plan"):
        assert said in notes
    assert "Few steps were not measured on video models" in " ".join(recommend("wan", steps=4).notes)
    assert "next to none can be left out" in " ".join(recommend("flux", steps=4).notes)


def test_tiles_are_for_long_clips_alone():
    """The preset that leaves out tiles is offered from the length on that it was measured at, and last."""
    names = [[c.preset for c in recommend("wan", height=480, width=832, frames=f).choices] for f in (17, 81)]
    assert names == [["balanced", "quality", "turbo"], ["balanced", "quality", "turbo", "wan21-sparge-balanced"]]
    assert token_count("wan", 480, 832, 81) == 32_760 and token_count("flux", 1024, 1024, None) == 4096


@pytest.mark.parametrize(
    "gpu, options",
    [
        ("h200", ""),
        ("l40s", "--offload model"),
        ("4090", "--quantize float8 --offload model"),
        ("3090", "--quantize int8 --offload model"),
        ("t4", "--offload sequential"),
    ],
)
def test_pipelines_are_made_to_fit_their_card(gpu, options):
    """A transformer of 27 GiB fits a large card, fills half of a middling one, and fits a small one by halves."""
    shell = recommend("hunyuanvideo-community/HunyuanVideo", gpu=gpu).shell
    assert " ".join(re.findall(r"--(?:quantize|offload) \S+", shell)) == options


@pytest.mark.parametrize(
    "wrong", [{"gpu": "voodoo"}, {"steps": 0}, {"gpus": "2"}, {"frames": 81}, {"model": None}], ids=str
)
def test_bad_arguments_are_told(wrong):
    """An unknown card, no number from 1 on, frames of an image, no name: an error that names the argument."""
    with pytest.raises(UnsupportedError, match=f"^{next(iter(wrong))} must be"):
        recommend(**{"model": "flux", **wrong})


def test_two_transformers_count_twice():
    """Wan 2.2's pair fills more than half of a card that one of them would not."""
    one, two = ("Wan-AI/Wan2.1-T2V-14B-Diffusers", "Wan-AI/Wan2.2-T2V-A14B-Diffusers")
    assert "--offload" not in recommend(one, gpu="a100").shell and "--offload model" in recommend(two, gpu="a100").shell


def test_distilled_models_run_few_steps():
    """Without a number of steps the line for a distilled model has that of the figures, and the notes say so."""
    found = recommend("black-forest-labs/FLUX.1-schnell")
    assert "--steps 8" in found.shell and "8 are assumed" in " ".join(found.notes)


def test_every_choice_has_figures():
    """No recommended preset lacks a measurement."""
    choices = [c for model in ("flux", "wan", "hunyuan_video", "any") for c in recommend(model).choices]
    assert all(isinstance(choice, Choice) and choice.run is not None for choice in choices)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
