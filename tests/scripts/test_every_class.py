"""scripts/checks/every_class.py: small models of denoiser classes, some of which run here."""

from types import SimpleNamespace

import diffusers
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaTokenizer

from scripts.checks import every_class, stand_ins
from scripts.checks.class_study import cases, modular, report
from scripts.checks.class_study.blocks import MODULAR

TINY = ("qwen-image-21", "ltx2")
ALONE = ("Kandinsky6Transformer3DModel",)
BLOCKS = (  # by place among the modular pipelines of a class
    ("Flux3Transformer2DModel", 1),
    ("FluxTransformer2DModel", 1),
    ("Ideogram4Transformer2DModel", 0),
    ("MiniMaxH3Transformer3DModel", 2),
)


def assert_near(found: dict, batches: int = 2) -> None:
    assert [item["is"] for item in found["exact"]] == ["equal"] * batches
    assert [item["is"] for item in found["forecast"]] == ["within the bound"] * batches
    assert all(item["forecasts"] > 0 for item in found["forecast"])
    assert all(item["is"] in ("equal", "within the bound") for item in found["balanced"])


@pytest.mark.parametrize("name", TINY)
def test_pipelines_run(name):
    """`exact` equals the plain run, and forecasts are near it, in all outputs and in a batch of two."""
    assert_near(every_class.study(every_class.tiny_case(name)))


@pytest.mark.parametrize("name", ALONE)
def test_transformers_run_alone(name):
    (make,) = cases.alone_of_small(name)
    assert_near(every_class.study(make()))


@pytest.mark.parametrize(("name", "place"), BLOCKS, ids=[MODULAR[name][place].name for name, place in BLOCKS])
def test_modular_pipelines_run(name, place):
    """Distilled steps, a given image, a transformer for each branch, and video with sound."""
    if not hasattr(diffusers, name):
        pytest.skip(f"diffusers has no {name}")
    make = [*modular.makers(name, cases.small_transformer(None, name))][place]
    assert_near(every_class.study(make()), batches=1 if name.startswith("MiniMax") else 2)


def test_outputs_of_one_pipeline_are_all_compared():
    assert len(every_class.tiny_case("ltx2").run(1)) == 2


def case(accelerated: torch.Tensor) -> cases.Case:
    """A case whose accelerated run gives these values instead of ones, and makes no batch."""
    is_accelerated = []
    report = SimpleNamespace(steps_by_mode={"dispatch": 1}, notes=[])

    def run(batch: int) -> list[torch.Tensor]:
        if batch > 1:
            raise cases.NotRun("it takes one prompt")
        return [accelerated if is_accelerated else torch.ones(4)]

    def accelerate(kind: str) -> tuple:
        is_accelerated.append(kind)
        return lambda: report, is_accelerated.clear

    return cases.Case("alone", [], run, accelerate)


@pytest.mark.parametrize(
    ("values", "exact", "forecast"),
    [
        pytest.param(torch.ones(4), "equal", "equal", id="same"),
        pytest.param(torch.full((4,), 1.1), "differs", "within the bound", id="near"),
        pytest.param(torch.zeros(4), "differs", "beyond the bound", id="far"),
        pytest.param(torch.full((4,), torch.nan), "differs", "differs", id="not-finite"),
        pytest.param(torch.ones(5), "differs", "differs", id="other-shape"),
    ],
)
def test_verdicts(values, exact, forecast):
    found = every_class.study(case(values))
    assert (found["exact"][0]["is"], found["forecast"][0]["is"]) == (exact, forecast)
    assert found["batch"] == "it takes one prompt"
    assert every_class.is_wrong({"runs": [found]}) == (exact == "differs")


def test_modular_pipelines_share_the_first_row_of_their_class():
    """The largest error of all of them is in the table; refused and unforecast ones are listed with the reason."""
    near, far = ({"is": "within the bound", "error": error} for error in (0.01, 0.3))
    plain, refused = ({"is": item, "reason": f"it is {item}"} for item in ("plain", "refused"))
    runs = [{"ran": str(place), **{kind: [item] for kind in cases.PRESETS}} for place, item in enumerate((near, far))]
    runs += [runs[0] | {"ran": "2", "forecast": [plain]}, {"ran": "3", **{kind: [refused] for kind in cases.PRESETS}}]
    document = {"classes": {"Model": {"runs": runs[:1], "modular": runs[1:]}}}
    assert report.rows(document)[1:] == [["Model", "0, 2 modular", "30.0%", "30.0%", "30.0%"]]
    assert report.left_out(document).splitlines() == ["- Model (3): it is refused", "- Model (2): it is plain"]


def test_a_class_without_a_timestep_is_refused():
    assert "takes no 'timestep'" in every_class.why_refused(diffusers.models.transformers.T5FilmDecoder)


def test_wrong_arguments_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        every_class.main([str(tmp_path), "--output", str(tmp_path / "found")])
    assert "checkout must hold tests/pipelines" in capsys.readouterr().err


def test_stand_ins_are_loaded_by_their_names_on_the_hub(tmp_path, monkeypatch):
    """The working directory has them, as for tests that run there."""
    stand_ins.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert AutoConfig.from_pretrained("hf-internal-testing/tiny-random-t5").d_model == 32
    for name in ("tiny-random-clip", "tiny-random-t5", "dummy-gemma", "tiny-random-Qwen2VLForConditionalGeneration"):
        assert AutoTokenizer.from_pretrained(f"hf-internal-testing/{name}")("a fox")["input_ids"]
    assert LlamaTokenizer.from_pretrained("finetrainers/dummy-hunyaunvideo", subfolder="tokenizer")("a fox")
