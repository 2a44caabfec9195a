"""Code in the README and the docs works as shown."""

import functools
import re
import shlex
from pathlib import Path

import pytest
import torch
import typer

from dit_accel.cli import app
from dit_accel.presets import preset_names
from dit_accel.tools import demo

ROOT = Path(__file__).parents[1]
SHELVES = ("guide", "reference", "notes")
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *(page for shelf in SHELVES for page in sorted((ROOT / "docs" / shelf).glob("*.md"))),
]


def blocks(page, language):
    """Code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


COMMANDS = [
    line.split(" #")[0].strip()
    for page in PAGES
    for block in blocks(page, "bash")
    for line in block.splitlines()
    if line.startswith("dit-accel ")
]


def why_not(line: str) -> str | None:
    """Return the error of a command line, or None if the command and its options exist."""
    words, command = shlex.split(line)[1:], typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    if words and hasattr(command, "commands") and not words[0].startswith("-"):
        return f"no command {words[0]}"
    try:
        command.make_context("dit-accel", words)
    except Exception as error:
        return str(error)
    return None


def test_shown_commands_parse():
    assert len(COMMANDS) > 30
    assert {line: error for line in COMMANDS if (error := why_not(line))} == {}


@pytest.mark.filterwarnings("error::FutureWarning")
def test_shown_python_runs_with_the_demo_model(monkeypatch, tmp_path):
    """The README's example with the shipped model runs as it stands, here at a toy size."""
    monkeypatch.chdir(tmp_path)
    small = {"height": 64, "width": 64, "num_inference_steps": 2, "max_sequence_length": 64}
    monkeypatch.setattr(demo, "demo_arguments", lambda folder: small)
    (example,) = (block for block in blocks(ROOT / "README.md", "python") if "demo-flux" in block)
    exec(compile(example, "README.md", "exec"), {})
    assert (tmp_path / "stars.png").is_file()


def test_shown_compiled_model_runs(monkeypatch):
    """The snippet with kernels in a compiled model, here without code generation."""
    compile_model = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compile_model)
    (example,) = (block for block in blocks(ROOT / "docs" / "reference" / "api.md", "python") if "fullgraph" in block)
    shown = {}
    exec(compile(example, "api.md", "exec"), shown)
    assert all(parameter.grad is not None for parameter in shown["block"].parameters())


def test_shown_python_has_no_names_of_the_past():
    """Snippets, examples and model cards say `dtype`; `torch_dtype` warns since diffusers 0.40."""
    cards = (ROOT / "dit_accel" / "tools" / "assets").glob("*/README.md")
    shown = [block for page in (*PAGES, *cards) for block in blocks(page, "python")]
    shown += [path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")]
    assert len(shown) > 20 and not any("torch_dtype=" in text for text in shown)


def linked(page):
    """Files inside the repository that a page links to or shows."""
    targets = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    return [page.parent / target for target in targets]


def test_links_and_pictures_exist():
    assert [(page.name, str(path)) for page in PAGES for path in linked(page) if not path.exists()] == []


def test_every_result_stands_on_a_page():
    files = (ROOT / "docs" / "results").rglob("*")
    results = {path.resolve() for path in files if path.is_file() and path.suffix != ".md"}  # git ignores tables
    named = {path.resolve() for page in PAGES for path in linked(page)}
    assert sorted(path.name for path in results - named) == [] and len(results) > 20


def test_contributing_names_files_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"(?<![\w/])((?:configs|dit_accel|docs|examples|scripts|tests)/[\w./]*)", text)
    assert len(paths) > 20 and [path for path in paths if not (ROOT / path).exists()] == []


def test_every_preset_is_documented():
    text = (ROOT / "docs" / "reference" / "presets.md").read_text(encoding="utf-8")
    missing = [n for n in preset_names() if n not in text and f"`-{n.rsplit('-', 1)[-1]}`" not in text]
    assert missing == []
