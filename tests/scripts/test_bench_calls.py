"""The benchmark of whole calls, at toy size: pipelines, rows, the file and its table."""

import json
import sys

import pytest

from scripts.bench import calls, random_weights
from scripts.bench.call_speed.pipelines import CASES, Tokenizer, build
from scripts.bench.call_speed.table import markdown, measured
from scripts.bench.call_speed.ways import OURS, WAYS, ways_of
from scripts.tables import rendered


def run(monkeypatch, file, *options):
    monkeypatch.setattr(sys, "argv", ["calls", "--tiny", "--runs", "1", *options, "--output", str(file)])
    assert calls.main() == 0
    return json.loads(file.read_text())["runs"]


@pytest.mark.parametrize(
    ("model", "computed"),
    [
        ("flux2-klein-4b", {("exact", 4): 4}),
        ("z-image-turbo", {("exact", 8): 8, ("balanced", 8): 6}),
        ("wan-1.3b", {("balanced", 12): 7, ("sparse", 12): 7}),
        ("wan-1.3b-few-steps", {("exact", 4): 4, ("sla", 4): 4}),
        *((name, {("balanced", 12): 7, ("sparse", 12): 7}) for name in ("hunyuan", "minimax-h3")),
        ("ltx2", {("balanced", 7): 6, ("sparse", 7): 6}),
    ],
)
def test_stages_make_up_the_call(monkeypatch, tmp_path, model, computed):
    """Every row has the seconds of each stage, and a preset's row the number of computed steps and how it decoded."""
    ways = ",".join(way for way in ("eager", *OURS) if way in ways_of(CASES[model].calls[0], alone=True))
    few = ["--few", "4"] if model == "minimax-h3" else []
    (facts,) = run(monkeypatch, tmp_path / "deep" / "calls.json", "--models", model, "--ways", ways, *few)
    rows = facts["rows"]
    for row in rows:
        assert list(row["stages"]) == ["text encoding", "denoising", "decoding", "other"]
        assert min(row["stages"].values()) > 0 and sum(row["stages"].values()) == pytest.approx(row["seconds"])
        assert row.get("timed_steps") == (4 if few and row["way"] == "eager" else None)
        if row["way"] != "eager":
            assert row["decoded"].startswith("by the autoencoder's own decoder: kernels need a CUDA GPU")
    assert {(row["way"], row["steps"]): row["computed_steps"] for row in rows}.items() >= computed.items()


def test_rows_of_earlier_commands_stay_unless_measured_again(monkeypatch, tmp_path):
    """Each command's rows have its own origin, and the table has all rows and failures."""
    file = tmp_path / "calls.json"
    run(monkeypatch, file, "--models", "flux-schnell", "--ways", "eager,exact")
    earlier, latest = run(monkeypatch, file, "--models", "flux-schnell", "--ways", "exact")
    assert [row["way"] for row in earlier["rows"]] == ["eager"] and [row["way"] for row in latest["rows"]] == ["exact"]
    document = {"runs": [earlier, latest]}
    plain, exact = measured(document)
    assert exact["speed_up"] == plain["seconds"] / exact["seconds"] and plain["speed_up"] == 1.0
    latest["rows"].append({**latest["rows"][0], "way": "compiled", "error": "RuntimeError: no compiler"})
    table = markdown(document)
    assert "| flux.1-schnell, 32×64, 4 steps | dit-accel `exact` | 1 | 4 of 4 |" in table
    assert "- flux.1-schnell, 32×64, 4 steps, diffusers, compiled blocks: RuntimeError: no compiler" in table
    assert rendered(file) == markdown({"runs": [earlier, {**latest, "rows": latest["rows"][:1]}]})


def test_a_failure_is_a_row_and_the_next_way_runs(monkeypatch, tmp_path):
    """The row has the first line of the error, and the command fails at its end."""

    def fail(*_):
        raise RuntimeError("no\nkernel")

    monkeypatch.setitem(WAYS, "compiled", fail)
    options = ["--tiny", "--models", "flux-schnell", "--ways", "compiled,eager", "--output", str(tmp_path / "c.json")]
    monkeypatch.setattr(sys, "argv", ["calls", *options])
    assert calls.main() == 1
    failed, eager = json.loads((tmp_path / "c.json").read_text())["runs"][0]["rows"]
    assert failed["error"] == "RuntimeError: no" and eager["seconds"] > 0


def test_default_ways():
    """Few steps are all computed, in 8 bits too; several GPUs run only the presets."""
    shown = {name: ways_of(case.calls[0], alone=True) for name, case in CASES.items()}
    assert shown["flux"] == ["eager", "compiled", "balanced", "cache-dit"]
    assert shown["flux-schnell"] == ["eager", "compiled", "exact", "int8", "float8"]
    assert shown["z-image-turbo"] == ["eager", "compiled", "exact", "balanced", "int8", "float8", "cache-dit"]
    assert shown["ltx2"] == ["eager", "compiled", "balanced", "sparse"]  # cache-dit takes no three calls a step
    assert ways_of(CASES["flux"].calls[0], alone=False) == ["balanced"]
    assert ways_of(CASES["hunyuan"].calls[0], alone=False) == ["balanced", "sparse"]


@pytest.mark.parametrize("option, name", [("--models", "fluxx"), ("--ways", "quick")])
def test_unknown_names_are_refused(monkeypatch, capsys, option, name):
    monkeypatch.setattr(sys, "argv", ["calls", option, name])
    with pytest.raises(SystemExit):
        calls.main()
    assert f"unknown {name!r}; give names among" in capsys.readouterr().err


def test_tokens_depend_on_the_text_and_are_padded():
    """Ids are never the padding's, and the mask marks them."""
    tokenizer = Tokenizer(5, 64, 77)
    padded = tokenizer(["a", "b"], padding="max_length", max_length=9)
    assert padded.input_ids.shape == (2, 9) and (padded.input_ids[0] != padded.input_ids[1]).any()
    assert ((padded.input_ids > 0) == padded.attention_mask.bool()).all() and padded.attention_mask.sum() == 10
    assert tokenizer(["a"], padding="longest").input_ids.equal(padded.input_ids[:1, :5])
    tokenizer.padding_side = "left"
    left = tokenizer(["a", "b"], padding="max_length", max_length=9)
    assert all(left[name].equal(padded[name].roll(4, dims=1)) for name in ("input_ids", "attention_mask"))


def test_weights_are_equal_in_every_process():
    """Processes that share a call build the same pipeline."""
    first, second = (build(CASES["flux2-klein-4b"], tiny=True) for _ in range(2))
    for name in ("transformer", "text_encoder", "vae"):
        pairs = zip(getattr(first, name).parameters(), getattr(second, name).parameters(), strict=True)
        assert all(one.equal(other) for one, other in pairs)


@pytest.mark.parametrize(("model", "code"), [("flux.1-schnell-random-weights", 0), ("demo-flux", 2)])
def test_a_command_runs_without_weights(monkeypatch, tmp_path, model, code):
    """On a pipeline that is built instead of loaded; other names are refused."""
    asked = ("generate", "--prompt", "a", "--steps", "2", "--height", "32", "--width", "32", "--model", model)
    monkeypatch.setattr(sys, "argv", ["dit-accel", *asked, "--output", str(tmp_path / "a.png")])
    with pytest.raises(SystemExit, match=str(code)):
        random_weights.run(tiny=True)
    assert (tmp_path / "a.png").is_file() == (code == 0)
