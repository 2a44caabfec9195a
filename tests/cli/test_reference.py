"""docs/reference/cli.md: every command and option, as their help has it.

python -m tests.cli.test_reference      # writes the page anew
"""

import html
import re
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
    return f"{examples.strip()}\n"


def test_the_page_is_what_help_says():
    """A new option shows on the page, and one that is gone does not."""
    assert PAGE.read_text(encoding="utf-8") == page()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
