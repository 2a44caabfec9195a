"""A family has one home: the package names it nowhere else, and CONTRIBUTING.md says all that a new one needs."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dit_accel
from dit_accel.models.families import FAMILIES
from dit_accel.presets import preset_names
from dit_accel.tools.demo import DEMOS

PACKAGE = Path(dit_accel.__file__).parent
HOME = PACKAGE / "models" / "families"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if HOME not in path.parents]
WORDS = {word for family in FAMILIES for word in (family.name, family.model, *family.words_of_ids, *family.distilled)}
NAMES_OF_OTHER_THINGS = {*preset_names(), *DEMOS}  # which have a family's name in theirs

# A page as CONTRIBUTING.md has it, for a transformer of diffusers that has none.
TOY = """
from dit_accel.models.families.family import Family, Stack, packed_tokens

FAMILY = Family(
    name="toy",
    title="Toy",
    model="OvisImageTransformer2DModel",
    stacks=(Stack("transformer_blocks"), Stack("single_transformer_blocks", features=1)),
    tokens=packed_tokens,
    parts=("attn", "ff", "ff_context"),
    words=("toymodel",),
    distilled={"toyquick": 3},
)
"""
SCRIPT = """
import torch
from dit_accel import accelerated, load_preset
from dit_accel.errors import PresetError
from dit_accel.models.presets import preset_schema
from dit_accel.tools.advise.identify import identify
from tests.models import tiny
from tests.models.test_transformer_table import classes, inside, rows

NAME, STEPS, SIZE = "OvisImagePipeline", 7, {"height": 256, "width": 256}
INTERVAL = {"control": "interval", "warmup": 2, "interval": 1, "cooldown": 1}
pipe, plain = tiny.pipeline(NAME), tiny.output(NAME, STEPS, **SIZE)


def run(*preset, **overrides):
    with accelerated(pipe, *preset, **overrides):
        return tiny.output(NAME, STEPS, **SIZE), pipe.dit_accel.report()


same, report = run("exact", model="toy")
assert torch.equal(same, plain) and report.family == "toy", report
tiles = {"policy": "sparge", "steps": "all", "tau_kv": 0.3}
sparse, report = run("exact", model="toy", schedule=INTERVAL, skip=tiles, blocks={"size": 64})
assert not torch.equal(sparse, plain) and not report.fallbacks, report
layers, report = run("exact", schedule=INTERVAL | {"interval": 3}, forecast={"level": "layer", "order": 1})
assert report.steps_by_mode["dispatch"] > 0, report

for wrong, message in (({"model": "tot"}, "got 'tot' (did you mean 'toy'?)"), ({"forecast.level": "head"}, "'head'")):
    try:
        load_preset("exact", **wrong)
    except PresetError as error:
        assert message in str(error), error
    else:
        raise AssertionError(wrong)
assert "toy" in preset_schema()["properties"]["model"]["enum"]
found = identify("someone/Toy-Model-Toy-Quick")
assert (found.family, found.title, found.steps, found.is_video) == ("toy", "Toy", 3, False), found
assert inside(classes()["OvisImageTransformer2DModel"]) == "`toy`: `layer`"
assert all(any("toy" in cell.lower() for _, cell, _ in cells) for cells in rows().values())
print("it runs")
"""


def literals(path: Path) -> Iterator[str]:
    """Strings in a file's code, less docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


def test_no_other_file_names_a_family():
    """No string in code is or has a family's name, its transformer's, or a word of its models' ids."""
    named = [(str(path), text) for path in FILES for text in literals(path) if text not in NAMES_OF_OTHER_THINGS]
    assert [(path, text) for path, text in named if not WORDS.isdisjoint(re.split(r"[^A-Za-z0-9_]+", text))] == []


def test_a_family_is_a_page_and_a_line(tmp_path):
    """A page and a line in the table give a family presets, sparse attention, level layer, an id and its rows."""
    shutil.copytree(PACKAGE, tmp_path / "dit_accel", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(PACKAGE.parent / "configs", tmp_path / "configs")
    families = tmp_path / "dit_accel" / "models" / "families"
    (families / "toy.py").write_text(TOY, encoding="utf-8")
    table = (families / "__init__.py").read_text(encoding="utf-8")
    (families / "__init__.py").write_text(table.replace('"chroma", ', '"chroma", "toy", '), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(PACKAGE.parent)])}
    command = [sys.executable, "-c", SCRIPT]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout == "it runs\n", result.stderr
