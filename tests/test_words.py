"""The project's prose uses the field's words: docstrings, comments, messages, help texts and pages.

Code between backticks, code blocks, options and file names are not prose.
"""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("dit_accel", "scripts", "examples", "integrations")
PAGES = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
PAGES = [path for path in PAGES if path.parent.name != "results"]
CODE = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

# Words that do not belong, and words to use instead.
WORDS = {
    r"judg(?:e|es|ed|ing)": "compare, measure, check",
    r"told(?! apart)|tells(?! apart)": "given, shows, says",
    r"reckon\w*": "counts, estimates",
    r"(?:run|runs|ran|running) densely": "uses dense attention, falls back to dense attention",
    r"beside": "with, next to, compared with",
    r"ma(?:de|kes?) good": "corrects",
    r"pictures?": "image, video, output",
    r"clips?": "video",
    r"peers?": "other methods",
    r"the like": "name it",
}
BEGINNINGS = re.compile(r"(What|Those|Of|Whether|Likewise)\b")
TECHNICAL = re.compile(  # a scheduler's operation, an argument's name, and templates of prompts
    r"clips? or (?:threshold|adds noise)|clip must be|a (?:picture|clip) of \{"
)
NO_PROSE = re.compile(r"``[^`]*``|`[^`]*`|--[\w-]+|\S*[_/.=\"']\S*|\[[^\]]*\]\([^)]*\)|^    .*$", re.M)


@functools.cache
def prose_of(path: Path) -> list[tuple[int, str]]:
    """The prose of a file, with the lines where it begins."""
    return [(line, NO_PROSE.sub("", TECHNICAL.sub("", text))) for line, text in texts(path)]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a page, or comments and strings of a Python file that hold several words."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, re.sub(r"```.*?```", "", text, flags=re.S)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 2:
            yield node.lineno, node.value


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, kinds) and (found := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), found


@pytest.mark.parametrize("word", WORDS)
def test_prose_has_no_private_words(word):
    """Each hit is a line of the message, with words to use instead."""
    pattern = re.compile(rf"\b(?:{word})\b")
    found = [
        f"{path.relative_to(ROOT)}:{line}: …{prose[max(0, hit.start() - 30) : hit.end() + 20]}…".replace("\n", " ")
        for path in [*PAGES, *CODE]
        for line, prose in prose_of(path)
        for hit in pattern.finditer(prose)
    ]
    assert found == [], f"instead of these write: {WORDS[word]}"


def test_docstrings_begin_with_a_verb_or_a_noun():
    found = [
        f"{path.relative_to(ROOT)}:{line}" for path in CODE for line, text in docstrings(path) if BEGINNINGS.match(text)
    ]
    assert found == []


NAMES = {"given", "each", "own", "made", "told"}  # they say where a value comes from, not what it is


def names_in(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and names of the functions, arguments, attributes and variables that a Python file defines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def test_names_say_what_a_value_is():
    found = [(path, *name) for path in CODE if path.is_relative_to(ROOT / "dit_accel") for name in names_in(path)]
    assert [f"{path}:{line}: {name}" for path, line, name in found if name.strip("_") in NAMES] == []


def test_functions_fit_on_a_screen():
    """Kernels are programs of their own."""
    long = [
        f"{path}: {node.name}"
        for path in CODE
        if path.is_relative_to(ROOT / "dit_accel") and "_triton" not in path.parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 61
    ]
    assert long == []
