"""Every program in examples/ runs as its docstring says, here with few steps.

All but serve_ray.py, which runs until it is told to end: tests/scripts/test_serve_load.py holds that one.
"""

import ast
import runpy
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.stem != "serve_ray")
FEW = {"--steps": "2", "--tokens": "512"}  # in place of what the docstring shows
PRINTS = {  # and the files that it leaves
    "compare_methods": ("flux-taylorseer", set()),
    "image": ("PSNR to the plain image", {"plain.png", "accelerated.png"}),
    "own_loop": ("steps              2", set()),
    "parallel": ("steps              2", {"video.gif"}),
    "sparse_attention": ("of the tiles", set()),
    "video": ("steps              2", {"video.gif"}),
}
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


@pytest.mark.filterwarnings("error::FutureWarning")
@every_example
def test_example_runs(path, tmp_path, monkeypatch, capsys):
    """The shown command with fewer steps or tokens ends well, prints its figures and writes no file but its own."""
    option, _ = shown_command(path)[2:]
    monkeypatch.setattr(sys, "argv", [str(path), option, FEW[option]])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    printed, files = PRINTS[path.stem]
    assert printed in capsys.readouterr().out
    assert {file.name for file in tmp_path.iterdir()} == files
