"""The benchmark of SLA: a wrong part of the module has no time."""

import pytest

from dit_accel.sla import module as sla
from scripts.bench.kernels.recorder import Recorder
from scripts.bench.kernels.sizes import TINY
from scripts.bench.kernels.sla import bench_sla

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
