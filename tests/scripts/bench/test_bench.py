"""The benchmark: its checks, no speed-up for wrong results, and the files of a whole run on a CPU."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dit_accel import kernels
from dit_accel.errors import KernelError
from dit_accel.sla import module as sla
from scripts.bench.kernels import gate, verify
from scripts.bench.kernels.__main__ import OPS, main
from scripts.bench.kernels.cases import Case, make_inputs
from scripts.bench.kernels.recorder import Recorder
from scripts.bench.kernels.sizes import FULL, QUICK, TINY, sparse_cases
from scripts.bench.kernels.sla import bench_sla
from scripts.bench.kernels.verify import Verdict
from scripts.bench.kernels.verify_attention import verify_attention, verify_attention_gradients

ROOT = Path(__file__).parents[3]
CPU = ("--quick", "--device", "cpu", "--backends", "reference")
SMALL = Case(300, heads=5, head_dim=32, block=64, rows=0.5, tiles=0.5, dtype=torch.float32)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The folder of a quick run of all ops on the CPU, and its JSON."""
    folder = tmp_path_factory.mktemp("bench")
    assert main([*CPU, "--output", str(folder / "kernels")]) == 0
    return folder, json.loads((folder / "kernels.json").read_text())


def test_a_run_writes_json_and_tables(whole_run):
    """Each op has rows that passed; every row's ratios follow from its own milliseconds."""
    folder, document = whole_run
    assert {file.name for file in folder.iterdir()} == {"kernels.json", "kernels.md"}
    ops = {row["op"] for row in document["results"]}
    assert {"attention", "gemm_q", "gemm_o_update", "gemm_o_dispatch", "gemm_o_window"} <= ops
    assert {"lower", "pack_bits", "pooled_map", "symbols", "weighted_sum"} <= ops
    assert document["gate"] and all(row["passed"] for row in document["gate"] + document["results"])
    for row in document["results"]:
        assert row["ms"] > 0 and row["error"] <= row["bound"]
        assert row["speedup"] == {name: pytest.approx(ms / row["ms"]) for name, ms in row["baselines_ms"].items()}
    (run,) = document["runs"]
    assert run["torch"] == torch.__version__ and run["seconds"] > 0
    assert {"device", "driver", "triton", "cudnn", "flash-attn-4", "commit", "command"} <= run.keys()


def test_the_ideal_is_that_of_the_symbols_drawn(whole_run):
    """1 / density for attention and GEMMs; an UPDATE rebases D entries at the cost of the symbols that changed, for two
    random choices at most 2 min(density, 1 - density); a window's ideal follows from its parts."""
    _, document = whole_run
    update_work = {
        (row["kind"], row["sparsity"]): 1 / row["ideal"] for row in document["results"] if row["op"] == "gemm_o_update"
    }
    ms = {(row["op"], row["kind"], row["sparsity"]): row["ms"] for row in document["results"]}
    for (kind, sparsity), work in update_work.items():
        order, most = int(kind[2]), 2 * min(sparsity, 1 - sparsity)
        assert (work == pytest.approx(1)) == (order * most == 0) and 1 - 1e-9 <= work <= 1 + order * most + 1e-9
    for row in document["results"]:
        density = 1 - row["sparsity"]
        if row["op"] in ("attention", "gemm_q", "gemm_o_dispatch"):
            assert row["ideal"] == pytest.approx(1 / density)
        if row["op"] == "gemm_o_window":
            length, order = row["kind"].split()
            length = int(length[2:])
            work = update_work[order, row["sparsity"]] + (length - 1) * density
            assert row["ideal"] == pytest.approx(length / work)
            update, dispatch = (ms[op, order, row["sparsity"]] for op in ("gemm_o_update", "gemm_o_dispatch"))
            assert row["ms"] == pytest.approx(update + (length - 1) * dispatch)


def wrong(op, factor=1.05):
    """The op with a result that is off by a twentieth."""

    def scaled(*arguments, **options):
        return op(*arguments, **options).mul_(factor)

    return scaled


def test_a_red_gate_stops_before_anything_is_timed(monkeypatch, tmp_path, capsys):
    """A wrong op fails the small checks: exit 1, the failures are named, and nothing is measured."""
    monkeypatch.setattr(kernels, "weighted_sum", wrong(kernels.weighted_sum))
    assert main([*CPU, "--ops", "forecast", "--output", str(tmp_path / "k")]) == 1
    assert {file.name for file in tmp_path.iterdir()} == {"k.json"}
    document = json.loads((tmp_path / "k.json").read_text())
    assert document["results"] == []
    assert {row["op"] for row in document["gate"] if not row["passed"]} == {"weighted_sum"}
    assert "FAILED: weighted_sum reference" in capsys.readouterr().out


@pytest.mark.parametrize("error", [KernelError("failed at launch"), ValueError("too many registers")], ids=repr)
def test_a_kernel_that_does_not_run_fails_the_gate(error, monkeypatch):
    """A backend that refuses a case leaves it out; one that takes it and breaks has failed."""

    def broken(*arguments, **options):
        raise error

    monkeypatch.setattr(kernels, "gemm_q", broken)
    failed = [row for row in gate.check_kernels("cpu", [SMALL], ["reference"]) if not row["passed"]]
    assert [(row["op"], str(error) in row["reason"]) for row in failed] == [("gemm_q", True)]


def test_a_backend_that_fails_the_gate_is_not_timed_and_others_are(monkeypatch, tmp_path):
    """Correct backends are measured and their rows kept, but the run fails."""
    checks = [gate.outcome("attention", "triton", "case", "wrong"), gate.outcome("lower", "reference", "case", None)]
    monkeypatch.setattr(gate, "check_kernels", lambda *arguments: list(checks))
    monkeypatch.setattr(gate, "available_backends", lambda: ["triton"])
    assert main(("--quick", "--device", "cpu", "--ops", "lowering", "--output", str(tmp_path / "k"))) == 1
    document = json.loads((tmp_path / "k.json").read_text())
    assert {row["backend"] for row in document["results"]} == {"reference"} and len(document["gate"]) == 2
    assert {file.name for file in tmp_path.iterdir()} == {"k.json"}


def test_a_wrong_row_has_no_time_and_no_speedup(monkeypatch, tmp_path, capsys):
    """A backend that fails only at a timed size is not timed there; only --force deletes an earlier run's files."""
    (tmp_path / "k.md").write_bytes(b"earlier")
    monkeypatch.setattr(gate, "check_kernels", lambda *arguments: [])
    monkeypatch.setattr(kernels, "gemm_q", wrong(kernels.gemm_q))
    asked = [*CPU, "--ops", "gemm_q", "--output", str(tmp_path / "k")]
    with pytest.raises(SystemExit):
        main(asked)
    assert (tmp_path / "k.md").read_bytes() == b"earlier"
    assert "k.md exists; name another stem" in capsys.readouterr().err and main([*asked, "--force"]) == 1
    assert {file.name for file in tmp_path.iterdir()} == {"k.json"}
    rows = json.loads((tmp_path / "k.json").read_text())["results"]
    assert rows and all((row["ms"], row["rate"], row["speedup"]) == (None, None, {}) for row in rows)


MISTAKES = {
    "no-gpu": (["--quick"], "needs a CUDA GPU"),
    "cpu-in-full": (["--device", "cpu"], "add --quick"),
    "op": ([*CPU, "--ops", "attention,gemm"], "--ops: unknown 'gemm'; give names among attention, quantised"),
    "shape": ([*CPU, "--shapes", "17"], "--shapes: must be among 300"),
    "backend": ([*CPU[:-1], "cublas"], "--backends: unknown 'cublas'; give names among reference"),
    "backend-here": ([*CPU[:-1], "cuda"], "--backends: 'cuda' can't run here"),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_exit_with_2_and_write_nothing(arguments, message, tmp_path, monkeypatch, capsys):
    """The last line names the option."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "--output", str(tmp_path / "k")])
    assert exit_.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_the_module_needs_neither_diffusers_nor_typer(tmp_path):
    """``python -m scripts.bench.kernels`` runs where only torch is, and names itself in the results."""
    blocked = (
        "import sys; sys.modules.update(dict.fromkeys(('diffusers', 'transformers', 'pydantic', 'typer', 'yaml')))"
    )
    (tmp_path / "sitecustomize.py").write_text(blocked)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = ["-m", "scripts.bench.kernels", *CPU, "--ops", "lowering", "--output", str(tmp_path / "k")]
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "k.md").exists()
    (run,) = json.loads((tmp_path / "k.json").read_text())["runs"]
    assert run["command"].endswith(" ".join(command))


def test_gpu_check_without_a_gpu_says_so(tmp_path):
    """The script of the same checks imports without diffusers, and needs a GPU."""
    code = "import sys, runpy, torch; sys.modules['diffusers'] = None; torch.cuda.is_available = lambda: False; "
    code += "sys.argv = ['gpu.py']; runpy.run_module('scripts.checks.gpu', run_name='__main__')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, "needs a CUDA GPU" in result.stderr) == (2, True), result.stderr


def test_an_op_that_breaks_fails_the_run_and_keeps_the_others(monkeypatch, tmp_path, capsys):
    """Rows that were measured are written; exit 1, and no tables."""

    def broken(recorder, case, sizes):
        raise RuntimeError("illegal memory access")

    monkeypatch.setitem(OPS, "quantised", (broken, OPS["quantised"][1]))
    assert main([*CPU, "--ops", "quantised,lowering", "--output", str(tmp_path / "k")]) == 1
    assert {row["op"] for row in json.loads((tmp_path / "k.json").read_text())["results"]} == {"lower", "pack_bits"}
    assert "FAILED: quantised" in (output := capsys.readouterr().out) and "illegal memory access" in output
    assert {file.name for file in tmp_path.iterdir()} == {"k.json"}


def attended(inputs):
    """The reference's attention in an output that was NaN before, and its q, k and v."""
    qkv = inputs.qkv()
    out = torch.full_like(qkv[0], math.nan)
    kernels.attention(*qkv, inputs.plan, out=out, backend="reference")
    return out, qkv


FAULTS = {
    "none": lambda out, inputs: None,
    "scaled": lambda out, inputs: out.mul_(1.001),
    "unwritten": lambda out, inputs: out[:, :64].fill_(math.nan),
    "last-token": lambda out, inputs: out[:, -1].add_(0.1),
    "reused-row-written": lambda out, inputs: out.nan_to_num_(0.0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_attention_fails(fault):
    """A small factor, NaN, the ragged tail and a written reused row are all found; the reference's result is right."""
    inputs = make_inputs(SMALL, "cpu")
    assert inputs.rows[..., 0].any() and inputs.rows[..., -1].any() and not inputs.rows.all()
    out, qkv = attended(inputs)
    FAULTS[fault](out, inputs)
    assert verify_attention(out, qkv, inputs, poisoned=True).passed == (fault == "none")


def test_a_missing_tile_fails():
    """Attention over one tile less than the symbols ask for is wrong at the sampled rows."""
    inputs = make_inputs(replace(SMALL, rows=1.0, tiles=1.0), "cpu")
    plan, qkv = replace(inputs.plan, kv_count=inputs.plan.kv_count - 1), inputs.qkv()
    assert not verify_attention(kernels.attention(*qkv, plan, backend="reference"), qkv, inputs, samples=3).passed


def test_samples_are_spread_and_nan_never_passes():
    """4 evenly spread entries of 100 with the last; all of 3."""
    assert verify.spread(torch.arange(100), 4).tolist() == [25, 50, 74, 99]
    assert verify.spread(torch.arange(3), 4).tolist() == [0, 1, 2]
    assert not verify.worst([Verdict(0.1, 1.0), Verdict(math.nan, 1.0)]).passed


def test_the_gate_checks_what_a_benchmark_stands_on():
    """Symbols and attention, also with masks inside tiles; everything where nothing is named."""
    masks = gate.check_kernels("cpu", [SMALL], ["reference"], OPS["attention"][1])
    assert {row["op"] for row in masks} == {"lower", "pack_bits", "unpack_bits", "attention"}
    assert any("causal" in row["case"] for row in masks)
    everything = {row["op"] for row in gate.check_kernels("cpu", [SMALL], ["reference"])}
    assert {"attention", "gemm_q", "weighted_sum", "linear_attention", "select_rows"} < everything


def test_sparse_cases_draw_the_sparsity_that_they_name():
    """Rows, tiles, and both together skip the requested share, published points included."""
    cases = list(sparse_cases(Case(4608), FULL))
    assert cases[0] == ("dense", Case(4608))
    shares = sorted((kind, round(1 - case.rows * case.tiles, 6)) for kind, case in cases[1:])
    assert shares == sorted(
        [(kind, s) for kind in ("rows", "tiles", "both") for s in (0.5, 0.8, 0.9)] + [("tiles", 0.78), ("rows", 0.77)]
    )
    inputs = make_inputs(dict(cases[1:])["both"], "cpu")
    assert inputs.row_density == pytest.approx(inputs.case.rows, abs=1e-3)
    assert inputs.density == pytest.approx(inputs.case.rows * inputs.case.tiles, abs=0.01)


@pytest.mark.parametrize("sizes", [FULL, QUICK, TINY], ids=["full", "quick", "tiny"])
def test_every_op_runs_at_some_size(sizes):
    """Each benchmark has a case, and every case and every check of the gate belongs to a benchmark."""
    assert set(gate.ALL_CHECKS) == {check for _, checks in OPS.values() for check in checks}
    assert sizes.cases.keys() == OPS.keys() and all(sizes.cases.values())


def test_what_can_t_run_is_noted_once():
    """A baseline that raises, or is wrong, has no time; its reason is noted, and not for every mask again."""
    recorder = Recorder("cpu", ["reference"], log=lambda line: None)

    def broken():
        raise ImportError("no module named flash_attn")

    for place in ("one", "two"):
        assert recorder.baselines(place, {"fa4": broken}, lambda result: Verdict(0.0, 0.0)) == {}
    assert recorder.baselines("one", {"flex": lambda: lambda: None}, lambda result: Verdict(2.0, 1.0)) == {}
    reasons = {"fa4": "ImportError: no module named flash_attn", "flex": "its error 2 is above 1"}
    assert recorder.left_out == [{"what": "one", "who": who, "reason": why} for who, why in reasons.items()]
    q = torch.zeros(1, 4, 1, 8)
    unsupported = lambda: kernels.weighted_sum([q], [1.0], backend="cuda")  # noqa: E731
    assert recorder.time("weighted_sum", "cuda", "", Case(4), unsupported, lambda result: Verdict(0.0, 1.0)) is None
    assert recorder.rows == [] and recorder.left_out[-1]["who"] == "cuda"


@pytest.mark.parametrize("wrong", [None, 0, 1, 2], ids=["right", "dq", "dk", "dv"])
def test_a_wrong_gradient_fails(wrong):
    """Right gradients pass, and one that is 10% too large does not."""
    case = Case(300, heads=2, head_dim=32, block=64, batch=2, rows=0.8, tiles=0.4, dtype=torch.float16)
    inputs = make_inputs(case, "cpu")
    qkv, do = inputs.qkv(), inputs.features()
    o, lse = kernels.attention(*qkv, inputs.plan, return_lse=True)
    right = kernels.attention_backward(*qkv, o, lse, do, inputs.plan)
    gradients = [gradient * 1.1 if index == wrong else gradient for index, gradient in enumerate(right)]
    assert verify_attention_gradients(gradients, qkv, do, inputs, samples=4).passed == (wrong is None)


PARTS = {  # of the module: the rows that it makes wrong
    "attention": "sla forward",
    "linear_attention": "sla forward",
    "differentiable_attention": "sla backward",
    "differentiable_linear_attention": "sla backward",
}


@pytest.mark.parametrize("part", PARTS)
def test_a_wrong_part_has_no_time(part, monkeypatch):
    """A result that is off by a hundredth fails the rows that it belongs to."""
    right = getattr(sla, part)
    monkeypatch.setattr(sla, part, lambda *arguments, **options: right(*arguments, **options) * 1.01)
    recorder = Recorder("cpu", ["reference"], log=lambda line: None)
    bench_sla(recorder, TINY.cases["sla"][0], TINY)
    wrong = [row for row in recorder.rows if row["op"] == PARTS[part]]
    assert wrong and all(not row["passed"] and row["ms"] is None and row["speedup"] == {} for row in wrong)
