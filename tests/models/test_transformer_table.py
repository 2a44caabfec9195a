"""docs/reference/transformers.md: what becomes of every transformer class of the diffusers that is installed.

python -m tests.models.test_transformer_table      # rewrites the page, and the families in other pages
"""

import inspect
import re
import textwrap
import warnings
from collections import defaultdict
from pathlib import Path

import diffusers
import pytest
import torch

from dit_accel import accelerated, load_preset
from dit_accel.errors import UnsupportedError
from dit_accel.loop.controller import Controller
from dit_accel.loop.runs import Runs
from dit_accel.loop.tracker import TimestepClock
from dit_accel.models import denoisers
from dit_accel.models.families import FAMILIES, known_family
from dit_accel.models.transformer import TransformerDriver
from tests.models import tiny

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "transformers.md"
TINY = [
    *("flux", "sd3", "mochi", "ltx", "qwen-image", "wan", "hunyuan", "framepack", "hunyuan15"),
    *tiny.PIPELINES,
    *tiny.others.OTHERS,
]
INTERVAL = {"schedule": {"control": "interval", "warmup": 3, "interval": 2}}
STEPS = 8
HEAD = """# Transformers of diffusers

What level `output` makes of every transformer class of diffusers {version}. *Ran* means that a tiny pipeline of it ran
in our tests, with forecasts in some of its steps. The last column has the name by which presets call a family whose
[facts](adding_a_model.md) are known, and the further levels that it has; there computed steps can also skip tiles. The
test of this page writes it (`tests/models/test_transformer_table.py`).

| class | outcome | family, and levels inside of it |
|---|---|---|
{rows}
**Accepted**: these classes take a timestep, but no pipeline of them was run here; the
[rules](concepts.md#branches-runs-and-what-ends-them) decide in their runs. Steps that can't be told apart run
plainly, and the report says why.

{accepted}

**Refused** by `accelerate_pipeline`, because they take no timestep:

{refused}
"""


def classes() -> dict[str, type[torch.nn.Module]]:
    named = inspect.getmembers(diffusers.models.transformers, inspect.isclass)
    return {name: cls for name, cls in named if issubclass(cls, torch.nn.Module)}


def outcomes_of_runs() -> dict[str, list[str]]:
    """Outcomes by class, from the reports of tiny pipelines."""
    found = defaultdict(list)
    for name in TINY:
        pipe = tiny.pipeline(name)
        with accelerated(pipe, "balanced", **INTERVAL), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tiny.output(name, STEPS)
            report = pipe.dit_accel.report()
        forecasts = report.steps_by_mode.get("dispatch", 0) > 0
        how = "ran" if forecasts else f"ran plainly: {report.notes[-1]}"
        for kind in {type(each).__name__ for each in denoisers(pipe).values()}:
            found[kind].append(f"{how} ({type(pipe).__name__})")
    return found


def inside(cls: type) -> str:
    """The family of a class, with the modules inside its blocks."""
    family = known_family(cls.__new__(cls))
    if family is None:
        return "–"
    return f"`{family.name}`: `layer`, `head`" if family.fused else f"`{family.name}`: `layer`"


def page() -> str:
    ran, rows = outcomes_of_runs(), ""
    accepted, refused = [], []
    runs = Runs(lambda _: Controller(load_preset("balanced"), TimestepClock([1.0]), "any"))
    for name, cls in classes().items():
        try:
            TransformerDriver(cls.__new__(cls), runs, "transformer", lambda: None)
        except UnsupportedError:
            refused.append(name)
            continue
        if name in ran or inside(cls) != "–":
            rows += f"| {name} | {'; '.join(ran.get(name, ['accepted']))} | {inside(cls)} |\n"
        else:
            accepted.append(name)
    lists = ["\n".join(textwrap.wrap(", ".join(names), 120)) for names in (accepted, refused)]
    return HEAD.format(version=diffusers.__version__, rows=rows, accepted=lists[0], refused=lists[1])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_table_is_right():
    """Every class of the page's version has a row, and outcomes equal those of current runs."""
    text = PAGE.read_text(encoding="utf-8")
    if re.search(r"of diffusers (\S+)\. ", text).group(1) != diffusers.__version__:
        pytest.skip("the page is about another version of diffusers")
    assert text == page()


def rows() -> dict[str, list[tuple[str, str, str]]]:
    """Cells of other pages that list families: by page, the text before each cell, the cell, and the text behind it."""
    facts, own = (", ".join(each.title for each in FAMILIES if each.fused == fused) for fused in (False, True))
    names = ", ".join(f"`{name}`" for name in ("any", *(each.name for each in FAMILIES)))
    *heads, last = (f"`{each.name}`" for each in FAMILIES if each.fused)
    return {
        "docs/guide/using.md": [("| ", facts, " | ✓, and sparse tiles on computed steps | ✓ | – |")],
        "docs/reference/adding_a_model.md": [("| families | ", f"{facts} | {own}", " |\n")],
        "docs/reference/presets.md": [
            ("| `model` | ", names, " | family that the preset is made for; "),
            ("level `head` needs ", f"{', '.join(heads)} or {last}", " |\n"),
        ],
    }


def with_rows(text: str, cells: list[tuple[str, str, str]]) -> str:
    """Text of a page with today's cells between the text before and after them."""
    for before, cell, behind in cells:
        pattern = f"({re.escape(before)})[^\n]*?({re.escape(behind)})"
        pattern = f"^{pattern}" if before.startswith("|") else pattern
        text, found = re.subn(pattern, rf"\g<1>{cell}\g<2>", text, flags=re.MULTILINE)
        assert found == 1, (before, behind)
    return text


@pytest.mark.parametrize("page", rows())
def test_pages_name_every_family(page):
    """Pages list the table's families in their rows on families."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert with_rows(text, rows()[page]) == text


def test_no_family_is_among_other_models():
    """The row of models whose blocks are not known names none."""
    text = (ROOT / "docs/guide/using.md").read_text(encoding="utf-8")
    (others,) = re.findall(r"^\| (.*), and \[other transformers\]", text, flags=re.MULTILINE)
    assert {*others.split(", ")}.isdisjoint(each.title for each in FAMILIES)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    for name, cells in rows().items():
        (ROOT / name).write_text(with_rows((ROOT / name).read_text(encoding="utf-8"), cells), encoding="utf-8")
