"""docs/reference/transformers.md: what becomes of every transformer class of the diffusers that is installed.

python -m tests.models.test_transformer_table      # rewrites the page, and the families in other pages
"""

import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace

import diffusers
import pytest

from dit_accel.kernels.checks import TRITON_HEAD_DIMS
from dit_accel.models.families import FAMILIES, known_family
from dit_accel.models.families.family import Family
from scripts.checks.class_study import report
from scripts.checks.class_study.cases import STEPS
from scripts.checks.every_class import classes, is_wrong

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "transformers.md"
RESULT = ROOT / "docs" / "results" / "every-class.json"
HEAD = """# Transformers of diffusers

A small model of every transformer class of diffusers {version}, with random weights, ran plainly and accelerated for
{steps} steps on a CPU, with guidance where it has it, for one sample and (if possible) a batch of two
([JSON](../results/every-class.json), `scripts/checks/every_class.py`). *Run in* names the pipeline and counts modular
ones; a class *alone* ran in a loop of its own. Errors are the largest relative change of the outputs against the plain
run, and *far* above 50%; random weights make them larger than trained ones. *Equal* is equal bit for bit, as all runs
with `exact` are, and *plain* says why no step could be forecast. The last column has the name by which presets call a
family whose [facts](adding_a_model.md) are known, and its further levels; its computed steps can also skip tiles.

{rows}
**Refused**, computed every step, or not run:

{others}
"""


def inside(cls: type) -> str:
    """The family of a class, with the modules inside its blocks."""
    family = known_family(cls.__new__(cls))
    if family is None:
        return "–"
    return f"`{family.name}`: `layer`, `head`" if family.fused == "head" else f"`{family.name}`: `layer`"


def page() -> str:
    document = json.loads(RESULT.read_text(encoding="utf-8"))
    rows = report.rows(document)
    exact = rows[0].index("`exact`")
    assert {row[exact] for row in rows[1:]} == {"equal"}  # the page says so, in place of the column
    head, *rows = ([*row[:exact], *row[exact + 1 :]] for row in rows)
    whole = [[*head, "family, and levels inside of it"], *([*cells, inside(classes()[cells[0]])] for cells in rows)]
    version, others = document["run"]["diffusers"], report.left_out(document)
    return HEAD.format(version=version, steps=STEPS, rows=report.table(whole), others=others)


def test_the_table_is_right():
    """The page shows the results of the script, which has a row for every class of its diffusers."""
    document = json.loads(RESULT.read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == page()
    assert not [name for name, found in document["classes"].items() if is_wrong(found)]
    if document["run"]["diffusers"] == diffusers.__version__:
        assert [*document["classes"]] == sorted(classes())


def released_head_dim(family: Family) -> int:
    """Features of a head by the defaults of the class, which are those of a released model."""
    parameters = inspect.signature(getattr(diffusers, family.model).__init__).parameters
    config = SimpleNamespace(**{name: item.default for name, item in parameters.items()})
    return family.heads(SimpleNamespace(config=config))[1]


def rows() -> dict[str, list[tuple[str, str, str]]]:
    """Cells of other pages that list families: by page, the text before each cell, the cell, and the text behind it."""
    without_head = ", ".join(item.title for item in FAMILIES if item.fused != "head")
    names = ", ".join(f"`{name}`" for name in ("any", *(item.name for item in FAMILIES)))
    *heads, last = (f"`{item.name}`" for item in FAMILIES if item.fused == "head")
    dense = ", ".join(item.title for item in FAMILIES if released_head_dim(item) not in TRITON_HEAD_DIMS)
    return {
        "docs/guide/using.md": [
            ("| ", without_head, " | ✓, and sparse tiles on computed steps (not on a GPU: "),
            ("(not on a GPU: ", dense, ") | ✓ | – |\n"),
        ],
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
    assert {*others.split(", ")}.isdisjoint(item.title for item in FAMILIES)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    for name, cells in rows().items():
        (ROOT / name).write_text(with_rows((ROOT / name).read_text(encoding="utf-8"), cells), encoding="utf-8")
