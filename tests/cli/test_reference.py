"""docs/reference/cli.md: every command and option, as their help has it.

python -m tests.cli.test_reference      # writes the page anew
"""

import html
import re
from collections import Counter
from pathlib import Path

import typer
from typer.cli import get_docs_for_click

from dit_accel.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


def page() -> str:
    command = typer.main.get_command(app)
    for group in (command, *(each for each in command.commands.values() if hasattr(each, "commands"))):
        for each in group.commands.values():
            each.short_help = each.help.partition("\n\n")[0].replace("\n", " ")  # which would be cut to a few words
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="dit-accel", title="Command line")
    examples = re.sub(r"^(dit-accel .*)$", r"`\1`", html.unescape(text), flags=re.MULTILINE)
    return f"{once(examples).strip()}\n"


def once(text: str) -> str:
    """The page with options of three or more commands in a last section, and without usage that says nothing."""
    text = re.sub(r"\*\*Usage\*\*:\n\n```console\n[^\n]* \[OPTIONS\]\n```\n\n", "", text)
    head, *parts = re.split(r"\n+(?=##)", text)
    commands = [re.sub(r"(\*\*Options\*\*:\n\n)?\* `--help`[^\n]*\n", "", part + "\n").split("\n") for part in parts]
    counts = Counter(line for command in commands for line in command if line.startswith("* `-"))
    shared = [line for line, count in counts.items() if count >= 3]
    sections = []
    for command in commands:
        section = re.sub(r"\n{3,}", "\n\n", "\n".join(line for line in command if line not in shared)).strip()
        if here := [line for line in shared if line in command]:
            names = "all" if here == shared else ", ".join(f"`{re.search('--[a-z-]+', line)[0]}`" for line in here)
            section += f"\n\n[Options of several commands](#options-of-several-commands): {names}"
        sections.append(section)
    return "\n\n".join([head, *sections, "## Options of several commands", "\n".join(shared)])


def test_the_page_is_what_help_says():
    """A new option shows on the page, and one that is gone does not."""
    assert PAGE.read_text(encoding="utf-8") == page()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
