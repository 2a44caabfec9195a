"""Frontiers, leads and tables of a comparison."""

import pytest

from dit_accel.tools.measure.compare.report import FRACTIONS, at, figures, frontier_table, margins, remarks, table


def row(series, name, fraction, decibels, **more):
    figures = {"computed_fraction": fraction, "psnr_db": decibels, "psnr_db_each": [decibels - 1, decibels + 1]}
    times = {"seconds": fraction, "seconds_each": [fraction], "plain_seconds_each": [1.0]}
    rest = {"ours": series == "dit-accel", "ssim": 0.99, "reloaded": False, "computed_fraction_each": [fraction]}
    return {"series": series, "name": name, **figures, **times, **rest, **more}


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
    "plain": {"repeats": True, "lpips": "the package lpips is not installed", "flip": None},
    "left_out": {"scm": "cache-dit is not installed"},
}


def test_a_frontier_is_read_between_its_settings():
    """Nothing before the first setting, a straight line between two, the last one's value behind it."""
    points = [(0.2, 30.0), (0.4, 40.0)]
    assert [at(points, fraction) for fraction in (0.1, 0.2, 0.3, 0.9)] == [None, 30.0, 35.0, 40.0]
    assert at([], 0.5) is None


def test_leads_are_over_the_best_of_all_others():
    """The lead is over the frontier of all other methods together; settings that failed do not count."""
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
    """Our rows come first, failed and missing methods are listed, and both plots are written."""
    written = table(DOCUMENT)
    lines = written.splitlines()
    assert lines[2].startswith("| dit-accel | – | 38.0 |") and "| **lead of dit-accel** | – | +8.0 |" in written
    assert "| dit-accel | balanced | 0.250 | 0.25 | 4.00× | 38.0 | 37.0 | 0.9900 |" in lines
    assert "- Failed: broken: RuntimeError: no" in lines
    assert "- Left out: scm, because cache-dit is not installed." in lines
    figures(DOCUMENT, tmp_path / "pareto.png")
    assert {path.name for path in tmp_path.iterdir()} == {"pareto.png", "pareto-time.png"}


def test_columns_of_further_metrics_are_there_where_a_row_has_them():
    """Rows of an older file, and settings without a value, have a dash."""
    assert "SI-SDR" not in table(DOCUMENT)
    assert "- No column LPIPS: the package lpips is not installed." in table(DOCUMENT).splitlines()
    heard = row("dit-accel", "heard", 0.3, 40.0, si_sdr_db=21.04, rms_ratio_db=-0.254)
    lines = table({**DOCUMENT, "results": [*ROWS, heard]}).splitlines()
    assert any(line.endswith("| SSIM | SI-SDR dB | RMS ratio dB |") for line in lines)
    assert "| dit-accel | heard | 0.300 | 0.30 | 3.33× | 40.0 | 39.0 | 0.9900 | 21.0 | -0.25 |" in lines
    assert "| dit-accel | balanced | 0.250 | 0.25 | 4.00× | 38.0 | 37.0 | 0.9900 | – | – |" in lines


def timed(name, seconds, plain, fractions):
    times = {"seconds": sorted(seconds)[len(seconds) // 2], "seconds_each": seconds, "plain_seconds_each": plain}
    return row("dit-accel", name, fractions[0], 38.0, **times, computed_fraction_each=fractions)


STEADY = timed("steady", [0.5, 0.45, 0.5], [2.0, 2.0, 2.0], [0.25])
OF_PROMPTS = timed("prompts", [0.4, 0.6, 0.8], [2.0, 2.0, 2.0], [0.2, 0.3, 0.4])
SHAKEN = timed("shaken", [0.5, 0.5, 0.8], [2.0, 2.0, 2.0], [0.25])
PLAIN_SHAKEN = timed("plain shaken", [0.5, 0.5, 0.5], [2.0, 4.0, 2.0], [0.25])


def test_times_are_shown_with_their_spread_and_disturbed_ones_are_named():
    """Times are marked if repeats, or plain steps, differ, unless the prompts needed different work."""
    steady = [*ROWS, STEADY, OF_PROMPTS]
    lines = table({**DOCUMENT, "results": steady}).splitlines()
    assert "| dit-accel | steady | 0.250 | 0.50 | 4.00× (4.00 to 4.44) | 38.0 | 37.0 | 0.9900 |" in lines
    assert not any("disturbed" in line for line in lines)
    notes = remarks({**DOCUMENT, "results": [*steady, SHAKEN, PLAIN_SHAKEN]})
    (remark,) = (note for note in notes if "disturb" in note)
    assert remark.startswith("Times of shaken, plain shaken were disturbed") and "up to 100%" in remark
