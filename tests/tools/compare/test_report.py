"""Frontiers, leads and tables of a comparison."""

import pytest

from dit_accel.tools.compare.report import FRACTIONS, at, figures, frontier_table, margins, table


def row(series, name, fraction, decibels, **more):
    figures = {"computed_fraction": fraction, "psnr_db": decibels, "psnr_db_each": [decibels - 1, decibels + 1]}
    rest = {"ours": series == "dit-accel", "ssim": 0.99, "seconds": fraction, "left_behind": {}, "reloaded": False}
    return {"series": series, "name": name, **figures, **rest, **more}


ROWS = [
    row("cache", "cache 1", 0.25, 30.0),
    row("cache", "cache 2", 0.45, 40.0),
    row("cache", "cache worse", 0.5, 35.0),
    row("fewer steps", "10 steps", 0.2, 25.0),
    row("dit-accel", "balanced", 0.25, 38.0),
    row("dit-accel", "quality", 0.35, 45.0),
    {**row("broken", "broken", 0.1, 99.0), "error": "RuntimeError: no"},
]
DOCUMENT = {
    "results": ROWS,
    "plain": {"seconds": 1.0, "repeats": True, "lpips": "the package lpips is not installed"},
    "left_out": {"scm": "cache-dit is not installed"},
}


def test_a_frontier_is_read_between_its_settings():
    """Nothing before the first setting, a straight line between two, the last one's value behind it."""
    points = [(0.2, 30.0), (0.4, 40.0)]
    assert [at(points, fraction) for fraction in (0.1, 0.2, 0.3, 0.9)] == [None, 30.0, 35.0, 40.0]
    assert at([], 0.5) is None


def test_leads_are_over_the_best_of_all_others():
    """The rival is the frontier of all peers together; settings that failed count for nobody."""
    leads = {lead["name"]: lead for lead in margins(ROWS)}
    assert leads["balanced"] == {"name": "balanced", "rival_db": 30.0, "lead_db": 8.0}
    assert leads["quality"]["lead_db"] == pytest.approx(45 - 35)
    levels = frontier_table(ROWS)
    assert list(levels["psnr_db"]) == ["dit-accel", "cache", "fewer steps", "broken"]
    assert levels["lead_db"][FRACTIONS.index(0.2)] is None
    assert levels["lead_db"][FRACTIONS.index(0.25)] == pytest.approx(8.0)
    assert levels["lead_db"][FRACTIONS.index(0.6)] == pytest.approx(45 - 40)
    assert set(levels["psnr_db"]["broken"]) == {None}


def test_tables_and_plots_are_written(tmp_path):
    """Ours stand first, what failed or was left out is said, and both plots are there."""
    written = table(DOCUMENT)
    lines = written.splitlines()
    assert lines[2].startswith("| dit-accel | – | 38.0 |") and "| **lead of dit-accel** | – | +8.0 |" in written
    assert "| dit-accel | balanced | 0.250 | 0.25 | 4.00× | 38.0 | 37.0 | 0.9900 |" in lines
    assert (
        "- Failed: broken: RuntimeError: no" in lines
        and "- Left out: scm, because cache-dit is not installed." in lines
    )
    figures(DOCUMENT, tmp_path / "pareto.png")
    assert {path.name for path in tmp_path.iterdir()} == {"pareto.png", "pareto-time.png"}
