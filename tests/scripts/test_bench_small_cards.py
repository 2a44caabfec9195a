"""The benchmark of small cards, at toy size: its rows, what they were calculated from, and its table."""

import json
import sys

import pytest
import torch

from dit_accel import accelerate_pipeline
from scripts.bench import recommended, small_cards
from scripts.bench.call_speed.pipelines import EVERY_FIFTH
from scripts.bench.card_memory.table import markdown
from scripts.bench.card_memory.weights import WEIGHTS, bytes_of, packed_q4
from scripts.bench.model_speed.bench import Bench
from scripts.bench.model_speed.models import TINY


def run(monkeypatch, file, *options):
    monkeypatch.setattr(sys, "argv", ["small_cards", "--tiny", "--steps", "5", *options, "--output", str(file)])
    assert small_cards.main() == 0
    return json.loads(file.read_text())["runs"][-1]


def test_rows_of_every_way(monkeypatch, tmp_path):
    """The seconds follow from those of the steps."""
    ways, chosen = "model,block,leaf", ("--models", "flux", "--weights", "bf16")
    document = run(monkeypatch, tmp_path / "deep" / "cards.json", *chosen, "--ways", ways)
    rows = document["rows"]
    assert [(row["way"], row["run"], row["card_gib"]) for row in rows] == [
        (way, which, card) for way in ways.split(",") for which in ("balanced", "plain") for card in (24, 16, 12)
    ]
    for row in rows:
        forecast = row["forecast_seconds"] or 0.0
        steps = row["computed_steps"] * row["computed_seconds"] + (28 - row["computed_steps"]) * forecast
        assert row["seconds"] == pytest.approx(row["start_seconds"] + steps)
        assert row["run"] == "plain" or (row["copies"]["mode"], row["fallbacks"]) == ("dispatch", [])
    assert len(markdown({"runs": [document]}).split("FLUX.1-dev | bf16 | ")) == 1 + 3 * 3


@pytest.mark.parametrize("weights", WEIGHTS)
def test_forms_of_weights(monkeypatch, tmp_path, weights):
    """They take less memory, and run under group offload; a package that is missing is the row's error."""
    package, change = WEIGHTS[weights]
    if package is not None:
        pytest.importorskip(package)
    rows = run(monkeypatch, tmp_path / "c.json", "--models", "flux", "--weights", weights, "--ways", "leaf")["rows"]
    assert [row["fits"] for row in rows] == [True] * 6
    transformer = TINY["flux"].build()
    before = bytes_of(transformer)
    change(transformer)
    assert bytes_of(transformer) <= before * {"bf16": 1, "q4": 0.4, "nf4": 0.4}.get(weights, 0.7)
    monkeypatch.setattr(small_cards, "why_not_available", lambda weights: "package is not installed")
    (row,) = run(monkeypatch, tmp_path / "c.json", "--models", "flux", "--weights", weights)["rows"]
    assert row["error"] == "package is not installed"


def test_4_bits_are_those_of_gguf():
    """Bit for bit as the package packs them, a block of zeros included."""
    gguf, weight = pytest.importorskip("gguf"), torch.randn(6, 96)
    weight[2, 32:64] = 0
    assert (packed_q4(weight).numpy() == gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q4_0)).all()


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Runs one way with a replaced measurement, by the limit in GiB; returns the document and all limits."""

    def run_with(measure, way="leaf", *options):
        limits = []

        def in_memory(bench, case, way, steps, device, limit):
            limits.append(limit + small_cards.CONTEXT)
            return measure(limits[-1]) | {"seconds": 1.0, "computed_seconds": 1.0, "forecast_seconds": 0.0}

        monkeypatch.setattr(small_cards, "_in_memory", in_memory)
        chosen = ("--models", "flux", "--weights", "bf16", "--ways", way, *options)
        return run(monkeypatch, tmp_path / "cards.json", *chosen), limits

    return run_with


def fitting(peak):
    return {"fits": True, "peak_gib": peak, "reserved_gib": peak + 1}


def test_memory_that_does_not_suffice_is_a_result(measured):
    """A card that holds the memory of a larger one is not measured again; once it does not fit, no smaller is tried."""
    document, limits = measured(lambda limit: fitting(12.0) if limit > 14 else {"fits": False})
    assert [row["fits"] for row in document["rows"]] == [True, True, False] * 2 and limits == [24, 12] * 2
    assert "| 12 | does not fit | does not fit | does not fit |" in markdown({"runs": [document]})


def test_weights_above_the_limit_are_not_moved(measured, monkeypatch):
    """A card that can't hold the weights alone is no measurement under model offload."""
    monkeypatch.setattr(small_cards, "bytes_of", lambda transformer: 20 * 2**30)
    document, limits = measured(lambda limit: fitting(21.0), "model")
    assert [row["fits"] for row in document["rows"]] == [True, False, False] * 2 and limits == [24] * 2


def test_a_run_that_was_not_measured_is_not_called_too_large(measured, monkeypatch):
    """Nothing begins after the deadline, also between the cards of a way; the table leaves that run's cells empty."""
    now = [0.0]

    def slow(limit):
        now[0] += 30
        return {"fits": False}

    monkeypatch.setattr(small_cards.time, "monotonic", lambda: now[0])
    document, _ = measured(slow, "leaf", "--seconds", "20")
    *rows, last = document["rows"]
    assert [(row["run"], row["fits"]) for row in rows] == [("balanced", False)] * 3
    assert (last["run"], last["error"]) == ("plain", "no time was left")
    assert "| 12 |  → does not fit | does not fit |  → does not fit |" in markdown({"runs": [document]})


@pytest.mark.parametrize("model, grouped, computed, forecast", [("flux", 1, 14, 36), ("ltx2", 3, 10, 20)])
def test_seconds_of_recommended_lines(monkeypatch, tmp_path, model, grouped, computed, forecast):
    """They follow from the measured steps: 6 computed and 8 forecast ones."""
    monkeypatch.setattr(sys, "argv", f"recommended --tiny --models {model} --output {tmp_path}/cards.json".split())
    assert recommended.main() == 0
    rows = json.loads((tmp_path / "cards.json").read_text())["runs"][0]["rows"]
    assert [row["card_gib"] for row in rows if "group" in row["lines"][0]] == [12, 16, 24][:grouped] and len(rows) == 3
    for row in rows:
        more = (computed - 6) * row["computed_seconds"] + (forecast - 8) * row["forecast_seconds"]
        assert row["seconds"] == pytest.approx(row["measured_seconds"] + more)


@pytest.mark.parametrize("name", small_cards.STEPS)
def test_computed_steps(name):
    """The number of computed steps is that of the interval of whole calls."""
    case = small_cards.case_of(name, 81, tiny=True)
    bench = Bench(case.model, "cpu")
    warmup, interval = EVERY_FIFTH
    schedule = {"control": "interval", "warmup": warmup, "interval": interval, "cooldown": 1}
    accelerate_pipeline(bench, "balanced", schedule=schedule)
    for _ in bench.loop(case.steps):
        pass
    report = bench.dit_accel.report()
    assert len(report.steps) - report.steps_by_mode["dispatch"] == case.computed
