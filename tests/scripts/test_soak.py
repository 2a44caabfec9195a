"""Generations with accidents, a few of them here."""

import json
import random

import pytest

from scripts.checks import soak


def test_nothing_of_an_accident_stays_behind(tmp_path, capsys, monkeypatch):
    """The plain result equals the first one bit for bit, and the number of live tensors is the same."""
    monkeypatch.setattr(
        soak, "preset_names", lambda: ["exact", "turbo", "flux-taylorseer", "flux-flashomni-paper", "wan21-sla"]
    )
    options = ["--pipelines", "flux", "--generations", "8", "--every", "4", "--seed", "3"]
    soak.main(["--output", str(tmp_path / "soak.json"), *options])
    facts = json.loads((tmp_path / "soak.json").read_text())
    assert facts["left_over"] == [] and [check["drift"] for check in facts["checks"]] == [0.0] * 3
    assert facts["counts"]["generations"] == 8
    assert facts["counts"]["accelerated"] > 2
    assert any(name.startswith("ended by an") for name in facts["counts"])
    assert "'generations': 8" in capsys.readouterr().out


def test_what_stays_behind_is_told():
    """Drift in any check, and more tensors in the whole second half than ever in the first."""
    run = soak.Soak([], None)
    run.checks = [{"drifted": [], "tensors": tensors} for tensors in (7, 9, 9, 10)]
    assert run.left_over() == []
    run.checks += [{"drifted": ["wan"], "tensors": tensors} for tensors in (11, 11, 12, 13)]
    assert run.left_over() == ["plain results drifted: wan", "live tensors grew from 10 to 11"]


@pytest.mark.parametrize("accident", soak.ACCIDENTS)
def test_accidents_happen(accident):
    """The failure happens at the randomly chosen step or call."""
    pipe = soak.tiny_pipeline("flux")
    with soak._arranged(pipe, accident, 1, random.Random(0)) as callback:
        if accident == soak.STOP:
            soak.tiny_output(pipe, "flux", steps=3, **callback)
            assert pipe._interrupt
        else:
            with pytest.raises((soak.Accident, KeyboardInterrupt)):
                soak.tiny_output(pipe, "flux", steps=3, **callback)
    assert not any(block._forward_pre_hooks for block in pipe.transformer.transformer_blocks)
