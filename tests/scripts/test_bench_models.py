"""The benchmark of full-size transformers, at toy size: every model and run, and the figures made of their times."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from scripts.bench import models as bench_models
from scripts.bench.model_speed.bench import busy_and_span
from scripts.bench.model_speed.measures import limit_memory
from scripts.bench.model_speed.table import compare, markdown

LEFT_OUT = ["50% of tiles left out", "80% of tiles left out"]
TILES = ["exact", *(run for name in LEFT_OUT for run in (name, f"{name}, by their means"))]
GRAPHS = [f"exact{layers}{graphs}" for layers in ("", ", float8 layers") for graphs in ("", ", CUDA graphs")]
RELATIVES = ("flux-512", "flux-2048", "flux2-klein-4b", "wan-14b", "wan-i2v-14b")  # their models leave tiles out
DISPATCHED = {
    "flux": ["DISPATCH, plain", "DISPATCH, CFG", "DISPATCH, Kontext", "DISPATCH, ControlNet"],
    **{f"flux-{side}": ["DISPATCH, plain"] for side in (512, 2048)},
    "flux2": ["DISPATCH, plain"],
    "flux2-klein-4b": ["DISPATCH, plain"],
    "qwen-image": ["DISPATCH, plain", "DISPATCH, CFG"],
    "krea2": ["DISPATCH, plain", "DISPATCH, CFG"],
    "hunyuan": ["DISPATCH, plain"],
    "ltx2": ["DISPATCH, plain"],
    "minimax-h3": ["DISPATCH, plain"],
    "wan-1.3b": ["DISPATCH, plain", "DISPATCH, CFG"],
    "wan-14b": ["DISPATCH, plain"],
    "wan-i2v-14b": ["DISPATCH, plain", "DISPATCH, CFG"],
}


def run(monkeypatch, file, *options):
    monkeypatch.setattr(sys, "argv", ["bench_models", "--tiny", "--timed-steps", "1", *options, "--output", str(file)])
    return bench_models.main()


@pytest.mark.parametrize("model", bench_models.MODELS)
def test_every_model_runs_at_toy_size(monkeypatch, tmp_path, model):
    """The file has the plain run and the requested ones; its folder is created."""
    stem = tmp_path / "deep" / "speed"
    runs, names = ("exact,dispatch", GRAPHS) if model in RELATIVES else ("computed,dispatch", TILES)
    assert run(monkeypatch, stem, "--model", model, "--runs", runs) == 0
    rows = json.loads(stem.with_suffix(".json").read_text())["rows"]
    assert [row["run"] for row in rows] == ["plain", *names, *DISPATCHED[model]]
    exact, *_, dispatched = rows[1:]
    assert exact["relative_error"] < 1e-5 and exact["speedup_over_plain"] == pytest.approx(rows[0]["ms"] / exact["ms"])
    assert min(dispatched["dispatch_share"], dispatched["dispatch_step_share"]) > 0


def test_the_table_has_a_line_a_run_and_says_what_failed(monkeypatch, tmp_path):
    """The baseline's blocks are compiled for its own run alone."""
    stem = tmp_path / "speed"
    assert run(monkeypatch, stem, "--model", "flux", "--runs", "baseline,fifty") == 0
    results, table = json.loads(stem.with_suffix(".json").read_text()), stem.with_suffix(".md").read_text()
    plain, baseline, fifty = results["rows"]
    assert baseline["attention"] == "native" and "_native_cudnn" in baseline["failed"]
    assert "- _native_cudnn failed: RuntimeError" in table
    assert fifty["steps_by_mode"] == {"full": 5, "update": 9, "dispatch": 36}
    assert f"| {fifty['run']} | {fifty['ms']:.1f} | {plain['ms'] / fifty['ms']:.2f}× |" in table


@pytest.mark.parametrize("model", ["flux", "hunyuan", "wan-1.3b"])
def test_the_other_papers_methods_run_at_their_densities(monkeypatch, tmp_path, model):
    stem = tmp_path / "speed"
    assert run(monkeypatch, stem, "--model", model, "--runs", "papers,flashomni") == 0
    _, sparge, sla, fg_attn, flashomni = json.loads(stem.with_suffix(".json").read_text())["rows"]
    assert [row["run"] for row in (sparge, sla, fg_attn, flashomni)] == ["SpargeAttn", "SLA", "FG-Attn", "FlashOmni"]
    assert all(not row["fallbacks"] and row["computed_fraction"] < 1 for row in (sparge, sla, fg_attn, flashomni))
    assert fg_attn["key_density"] == 0.59 and flashomni["key_density"] == 1.0


def test_layers_in_8_bits(monkeypatch, tmp_path):
    """They err, int8 less than float8, and a step's kernels are listed."""
    stem = tmp_path / "speed"
    assert run(monkeypatch, stem, "--model", "flux", "--runs", "linear,kernels") == 0
    _, int8, _, float8, _, *profiled = json.loads(stem.with_suffix(".json").read_text())["rows"]
    assert 0 < int8["relative_error"] < float8["relative_error"] < 0.1
    assert [row["run"] for row in profiled] == ["exact", "50% of tiles left out"]


def test_weights_on_the_host(monkeypatch, tmp_path):
    """Steps are those of the same weights on the GPU, but for modulations, whose weights are rounded too."""
    stem = tmp_path / "speed"
    assert run(monkeypatch, stem, "--model", "flux", "--runs", "exact,linear,host,exact") == 0
    rows = {row["run"]: row for row in json.loads(stem.with_suffix(".json").read_text())["rows"]}
    on_host = "exact, int8 layers, weights on the host"
    assert [name for name in rows if on_host in name] == [on_host, f"{on_host}, CUDA graphs", f"{on_host}, 16 GiB"]
    assert not any(row.get("failed") for row in rows.values())
    assert rows["exact"]["relative_error"] < 1e-5
    error = rows["exact, int8 layers"]["relative_error"]
    assert rows[on_host]["relative_error"] == rows[f"{on_host}, 16 GiB"]["relative_error"]
    assert rows[on_host]["relative_error"] == pytest.approx(error, rel=0.2)


@pytest.mark.parametrize(("device", "index"), [("cuda", 2), ("cuda:1", 1)])
def test_memory_of_a_device_is_limited(monkeypatch, device, index):
    """A device without an index is the current one."""
    limits = []
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=64 * 2**30))
    monkeypatch.setattr(torch._C, "_cuda_setMemoryFraction", lambda *limit: limits.append(limit), raising=False)
    limit_memory(torch.device(device), 16)
    limit_memory(torch.device(device), None)
    assert limits == [(0.25, index), (1.0, index)]


def test_the_kernels_that_take_longest_are_listed():
    kernels = [{"kernel": f"kernel {n}", "launches": 2.0, "ms": float(30 - n)} for n in range(20)]
    results = {"model": "flux", "seconds": 1, "latents": [], "command": "", "device": "", "torch": "", "triton": ""}
    table = markdown(results | {"rows": [{"run": "exact", "ms": 1.0, "kernels": kernels}]})
    assert "| `kernel 0` | 2 | 30.00 | 7.3% |" in table and "| 4 others | 8 | 50.00 |" in table


def test_unknown_runs_are_refused_before_anything_is_made(monkeypatch, tmp_path, capsys):
    """The message names the unknown run and the valid ones."""
    stem = tmp_path / "deep" / "speed"
    with pytest.raises(SystemExit) as exit_:
        run(monkeypatch, stem, "--runs", "computed,fity")
    assert exit_.value.code == 2 and "unknown 'fity'; give names among baseline, computed" in capsys.readouterr().err
    assert not stem.parent.exists()


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [([(1, 4)], (3, 3)), ([(8, 10), (0, 4)], (6, 10)), ([(0, 4), (1, 2), (3, 6), (8, 10)], (8, 10))],
    ids=["one", "gap", "overlapping"],
)
def test_overlapping_kernels_count_once(intervals, expected):
    assert busy_and_span(intervals) == expected


def test_a_baseline_that_failed_gives_no_speed_up():
    rows = [
        {"run": "plain", "ms": 6.0, "peak_gib": 2.0},
        {"run": "baseline", "failed": {"native, compiled": "RuntimeError"}},
        {"run": "exact", "ms": 4.0, "peak_gib": 2.5},
    ]
    compare(rows)
    assert rows[2]["speedup_over_plain"] == 1.5 and "speedup_over_baseline" not in rows[2]
    assert rows[2]["peak_over_plain"] == 1.25
