"""The benchmark of the video transformers at toy size: every model runs, and mistakes come before anything does."""

import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_video  # noqa: E402


@pytest.mark.parametrize("model", bench_video.MODELS)
def test_every_model_runs_at_toy_size(monkeypatch, tmp_path, model):
    """The file holds the plain run and those asked for; its folder is made."""
    file = tmp_path / "deep" / "results.json"
    arguments = ["bench_video", "--tiny", "--model", model, "--runs", "computed", "--output", str(file)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert bench_video.main() == 0
    runs = [row["run"] for row in json.loads(file.read_text())["rows"]]
    assert runs == ["plain", "exact", "50% of tiles left out", "80% of tiles left out"]


def test_unknown_runs_are_refused_before_anything_is_made(monkeypatch, tmp_path, capsys):
    """The message names the run and those that there are."""
    file = tmp_path / "deep" / "results.json"
    monkeypatch.setattr(sys, "argv", ["bench_video", "--tiny", "--runs", "computed,fity", "--output", str(file)])
    with pytest.raises(SystemExit) as exit_:
        bench_video.main()
    assert exit_.value.code == 2 and "unknown run 'fity'; runs are computed, fifty" in capsys.readouterr().err
    assert not file.parent.exists()
