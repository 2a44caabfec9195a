"""The study of students of few steps with SLA: a small run of it."""

import json
import sys

import torch

from dit_accel.models.beside import quantized_linears
from scripts.research import distilled_sla


def test_students_learn_the_calls_of_the_teachers_steps(monkeypatch, tmp_path):
    """All train as many steps from the same weights; SLA and layers in 8 bits change the videos of their students."""
    monkeypatch.setattr(distilled_sla, "FINE", 2)
    monkeypatch.setattr(quantized_linears, "LEAST_ROWS", 1)
    monkeypatch.setattr(sys, "argv", ["distilled_sla", "--smoke", "--output", str(tmp_path / "students")])
    solved, kept = distilled_sla.solve, []
    monkeypatch.setattr(distilled_sla, "solve", lambda *args: kept.append(solved(*args)) or kept[0])
    distilled_sla.main()
    times, latents = (kept[0].arguments[name].unflatten(0, (4, 4)) for name in ("timestep", "hidden_states"))
    sigmas = torch.tensor([1, 21 / 22, 7 / 8, 7 / 10, 0])  # 7 s / (1 + 6 s) of 1, 3/4, 1/2, 1/4 and 0
    torch.testing.assert_close(times, 1000 * sigmas[:4, None].expand(4, 4))
    steps = (sigmas[1:] - sigmas[:-1]).view(4, 1, 1, 1, 1, 1) * kept[0].velocity.unflatten(0, (4, 4))
    torch.testing.assert_close(latents[:-1] + steps[:-1], latents[1:])  # each velocity leads to the next call's latents
    document = json.loads((tmp_path / "students.json").read_text())
    assert {log["steps"] for log in document["training"].values()} == {2}
    rows = {row["name"]: row for row in document["rows"]}
    assert (
        rows["teacher"]["teacher"]["psnr_db"]
        == distilled_sla.IDENTICAL
        > rows["teacher, 4 steps"]["teacher"]["psnr_db"]
    )
    same = {name: row["student"]["psnr_db"] == distilled_sla.IDENTICAL for name, row in [*rows.items()][2:]}
    assert [*same.values()] == [True, False, False, False, False, False], same
