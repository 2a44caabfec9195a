"""Every program in examples/ runs as its docstring says, and the notebook cell by cell, here with few steps."""

import ast
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from dit_accel.tools import demo

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FEW = {"--steps": "2", "--tokens": "512"}  # instead of the docstring's values
PRINTS = {  # and the files that it leaves
    "compare_methods": ("flux-taylorseer", set()),
    "image": ("PSNR to the plain image", {"plain.png", "accelerated.png"}),
    "own_loop": ("steps              2", set()),
    "parallel": ("steps              2", {"video.gif"}),
    "sparse_attention": ("of the tiles", set()),
    "video": ("steps              2", {"video.gif"}),
}
SIDE = 128  # of images and videos, in pixels
every_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


def shown_command(path: Path) -> list[str]:
    """The command in the docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    (line,) = (line.strip() for line in docstring.splitlines() if line.strip().startswith("python examples/"))
    return shlex.split(line)


@every_example
def test_example_is_short(path):
    """Under 40 lines, and a docstring that says how to run this file."""
    assert len(path.read_text(encoding="utf-8").splitlines()) < 40
    assert shown_command(path)[:2] == ["python", f"examples/{path.name}"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small images and videos."""
    arguments = demo.demo_arguments
    monkeypatch.setattr(demo, "demo_arguments", lambda folder: arguments(folder) | {"height": SIDE, "width": SIDE})


@pytest.mark.filterwarnings("error::FutureWarning")
@every_example
def test_example_runs(path, tmp_path, monkeypatch, capsys):
    """The shown command, made small, ends well, prints its figures and writes no file but its own."""
    option, _ = shown_command(path)[2:]
    monkeypatch.setattr(sys, "argv", [str(path), option, FEW[option]])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    printed, files = PRINTS[path.stem]
    assert printed in capsys.readouterr().out
    assert {file.name for file in tmp_path.iterdir()} == files


def test_notebook_runs_cell_by_cell(tmp_path, monkeypatch, capsys):
    """Steps are reported one by one, a smaller target computes more, and the restored pipeline is the plain one."""
    small = {"height": 64, "width": 64, "num_inference_steps": 12, "max_sequence_length": 64}
    monkeypatch.setattr(demo, "demo_arguments", lambda folder: small)
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples" / "dit_accel.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in cells] == [[]] * len(cells), "commit the notebook without outputs"
    names = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), f"dit_accel.ipynb[{cell['id']}]", "exec"), names)
    printed = capsys.readouterr().out
    assert re.search(r"^[fud]{12}$", printed, flags=re.MULTILINE) and "identical: True" in printed
    computed = [int(share) for share in re.findall(r"(\d+)% computed", printed)]
    assert len(computed) == 3 and computed[0] > computed[-1]
    assert {file.name for file in tmp_path.iterdir()} == {"timeline.png"}
