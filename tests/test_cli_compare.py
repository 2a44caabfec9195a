"""dit-accel compare on a tiny pipeline saved to disk: files, messages and exit codes."""

import json

import pytest

from dit_accel.testing import tiny_pipeline

SMALL = ("--steps", "6", "--height", "32", "--width", "32", "--settings", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Folder of a saved tiny pipeline."""
    folder = tmp_path_factory.mktemp("models") / "flux"
    tiny_pipeline("flux").save_pretrained(folder)
    return folder


def test_a_comparison_is_written_and_goes_on(run, model, tmp_path):
    """Table, JSON and plots of presets and peers; asked again with one more peer, only that one is measured."""
    asked = ("compare", "-m", model, "-p", "a red fox", "--presets", "flux-turbo,any-quality", *SMALL)
    result = run(*asked, "--peers", "fewer-steps")
    assert result.exit_code == 0, result.output
    names = {"comparison.json", "comparison.md", "comparison.png", "comparison-time.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    first = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["name"] for row in first["results"]] == ["flux-turbo", "any-quality", "3 steps"]
    assert "flux-turbo" in result.stdout and "speed-up" in result.stdout
    assert run(*asked, "--peers", "fewer-steps,fewer-steps-dpm").exit_code == 0
    second = json.loads((tmp_path / "comparison.json").read_text())
    assert second["results"][:3] == first["results"] and len(second["results"]) == 4
    other = run(*asked, "--peers", "none", "--seed", 1)
    assert other.exit_code == 2 and "differs in seed (seed: 0 there, 1 now)" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--prompt: give either a prompt or --prompts"),
        (("-p", "a", "--prompts", "b.txt"), "--prompt: give either a prompt or --prompts"),
        (("--prompts", "missing.txt"), "--prompts: missing.txt can't be read"),
        (("-p", "a", "--peers", "magic"), "--peers: 'magic' is no peer; there are taylorseer, "),
        (("-p", "a", "--presets", "flux-balance"), "did you mean 'flux-balanced'"),
        (("-p", "a", "--output", "no/where"), "--output: folder"),
    ],
    ids=["no-prompt", "two-prompts", "prompts", "peer", "preset", "folder"],
)
def test_mistakes_are_told_before_the_model_loads(run, arguments, message):
    """Exit code 2 and one line that names the option; the model, which does not exist, is not looked for."""
    result = run("compare", "-m", "nowhere/at-all", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr and len(result.stderr.splitlines()) == 1
