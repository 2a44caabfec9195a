"""docs/transformers.md: what becomes of every transformer class of the diffusers that is installed.

python -m tests.models.test_transformer_table      # writes the page anew
"""

import inspect
import re
import warnings
from pathlib import Path

import diffusers
import pytest
import torch

from dit_accel import accelerated, load_preset
from dit_accel.errors import UnsupportedError
from dit_accel.loop.controller import Controller
from dit_accel.loop.tracker import TimestepClock
from dit_accel.models import denoisers
from dit_accel.models.hooks import parameter_names
from dit_accel.models.transformer_hook import TIMESTEPS, TransformerDriver
from dit_accel.tools.testing import tiny_output, tiny_pipeline
from tests.models import test_steps

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
TINY = ["flux", "sd3", "cogvideox", "mochi", "ltx", "qwen-image", "wan", "hunyuan", "framepack", "hunyuan15"]
HEAD = """# Transformers of diffusers

What level `output` makes of every transformer class of diffusers {version}. *Ran* means that a tiny pipeline of it ran
in our tests, with forecasts in some of its steps. *Accepted* means that it takes a timestep, and that no pipeline of it
was run here; the [rules](concepts.md#branches-runs-and-what-ends-them) decide in its runs. What can't be told apart
runs plainly, and the report says why. The test that holds this page also writes it
(`tests/models/test_transformer_table.py`).

| class | its step is told by | outcome |
|---|---|---|
"""


def classes() -> dict[str, type[torch.nn.Module]]:
    named = inspect.getmembers(diffusers.models.transformers, inspect.isclass)
    return {name: cls for name, cls in named if issubclass(cls, torch.nn.Module)}


def outcomes_of_runs() -> dict[str, str]:
    """By class: what the report of a tiny pipeline says."""
    runs = {name: (tiny_pipeline(name), lambda pipe, name=name: tiny_output(pipe, name, steps=16)) for name in TINY}
    for name in (*test_steps.PIPELINES, "diffusion-forcing"):
        runs[name] = test_steps.built(name)[0], lambda pipe, name=name: test_steps.call(name)
    found = {}
    for pipe, call in runs.values():
        with accelerated(pipe, "balanced", **test_steps.INTERVAL), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(pipe)
            report = pipe.dit_accel.report()
        forecasts = report.steps_by_mode.get("dispatch", 0) > 0
        how = "ran" if forecasts else f"ran plainly: {report.notes[-1]}"
        found |= {type(each).__name__: f"{how} ({type(pipe).__name__})" for each in denoisers(pipe).values()}
    return found


def page() -> str:
    ran, rows = outcomes_of_runs(), []
    controller = Controller(load_preset("balanced"), TimestepClock([1.0]), "any")
    for name, cls in classes().items():
        transformer = cls.__new__(cls)
        told = next((f"`{each}`" for each in TIMESTEPS if each in parameter_names(transformer)), "nothing")
        try:
            TransformerDriver(transformer, controller, "transformer")
            outcome = ran.get(name, "accepted")
        except UnsupportedError:
            outcome = "refused by `accelerate_pipeline`, which says so"
        rows.append(f"| {name} | {told} | {outcome} |\n")
    return HEAD.format(version=diffusers.__version__) + "".join(rows)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_table_is_right():
    """Every class of the version that the page names has its row, and outcomes are those of runs now."""
    text = PAGE.read_text(encoding="utf-8")
    if re.search(r"of diffusers (\S+)\. ", text).group(1) != diffusers.__version__:
        pytest.skip("the page is about another version of diffusers")
    assert text == page()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
