"""dit-accel tune on a tiny pipeline saved to disk: files, messages and exit codes."""

import json

import pytest

from dit_accel.presets import load_preset

SMALL = ("--steps", "6", "--height", "32", "--width", "32", "--evaluations", "2")
FORECASTS = ("--set", "schedule.target_error=0.3", "--set", "schedule.warmup=2")


@pytest.fixture
def tune(run, model, tmp_path):
    """Runs the command on four prompts of a file, with further arguments."""
    (tmp_path / "prompts.txt").write_text("a red fox\n\ntwo whales\n  snow \na heart\n")

    def invoke(*arguments):
        return run("tune", "-m", model, "--prompts", "prompts.txt", *SMALL, *FORECASTS, *arguments)

    return invoke


def test_a_tuned_preset_is_written_and_used(tune, run, model, tmp_path):
    """Preset, plot and state appear; the preset serves `generate`; a second call makes no run and says the same."""
    result = tune("--target-psnr", 25, "--output", "mine.yaml")
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.txt", "mine.yaml", "mine.png", "mine-tuning"}
    state = json.loads((tmp_path / "mine-tuning" / "state.json").read_text())
    assert state["request"]["prompts"] == ["a red fox", "two whales"]
    assert state["request"]["held-out prompts"] == ["snow", "a heart"]
    assert load_preset(tmp_path / "mine.yaml").description == "balanced, tuned for PSNR ≥ 25 dB"
    assert "held-out prompts" in result.stdout and "wrote mine.yaml and mine.png" in result.stdout
    written = (tmp_path / "mine.yaml").read_text()
    assert tune("--target-psnr", 25, "--output", "mine.yaml").exit_code == 0
    assert (tmp_path / "mine.yaml").read_text() == written
    made = run("generate", "-m", model, "-p", "a", "--preset", "mine.yaml", *SMALL[:6])
    assert made.exit_code == 0, made.output
    changed = tune("--target-psnr", 26, "--output", "mine.yaml")
    assert changed.exit_code == 2 and "state.json holds another tuning, which differs in target" in changed.stderr


def test_a_target_that_can_not_be_met_is_told(tune, tmp_path):
    """Exit code 1 with one line; the closest preset is there, and its header says that it misses."""
    result = tune("--target-error", 1e-9, "--quiet")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "error: no setting saves work and meets latent error ≤ 1e-09 on the held-out prompts" in result.stderr
    assert (tmp_path / "tuned.yaml").read_text().startswith("# MISSES its target")


@pytest.mark.parametrize(
    ("model", "given", "base"),
    [
        ("some/pictures", (), "balanced"),
        ("some/clips", (), "video-balanced"),
        ("some/clips", ("--preset", "turbo"), "turbo"),
    ],
    ids=["pictures", "clips", "named"],
)
def test_a_tuning_starts_from_the_models_own_preset(handed_on, model, given, base):
    """--preset names another one."""
    image = () if model == "some/clips" else ("--image", "black.png")
    assert handed_on("tune", "--target-psnr", 30, "-m", model, *image, *given)["base"] == base
