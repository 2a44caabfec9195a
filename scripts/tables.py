"""Print the tables of a result, rendered from its JSON.

    python -m scripts.tables docs/results/speed-flux.json

The scripts write the same tables next to the JSON, and the site has a page for each.
"""

import argparse
import importlib
import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

RENDERERS = {  # stem of the JSON: module, function, and the arguments taken from the document; none = the document
    r"architectures": ("scripts.checks.compiled_kernels", "table", ["kernels"]),
    r"budgets": ("scripts.research.conditions_study.report", "budgets", ["rows"]),
    r"calls": ("scripts.bench.call_speed.table", "markdown", []),
    r"(compiled|kernel-times|papers-speed|speed)-.+": ("scripts.bench.model_speed.table", "markdown", []),
    r"conditions": ("scripts.research.conditions_study.report", "tables", ["rows"]),
    r"every-class": ("scripts.checks.class_study.report", "markdown", []),
    r"kernels|masks|sla|slices|sparge": ("scripts.bench.kernels.report", "table", []),
    r"eight-bits|few-steps-.+": ("scripts.research.conditions_study.report", "every_setting", ["rows"]),
    r"(flashomni-presets|papers-demo|tile-sparsity)-.+|layers-in-8-bits": (
        "scripts.research.settings",
        "table",
        ["results"],
    ),
    r"parallel.*": ("scripts.bench.ranks", "markdown", []),
    r"pareto-.+": ("dit_accel.tools.measure.compare.report", "table", []),
    r"sla-(features-)?demo-.+": ("scripts.research.finetuning.table", "table", ["rows"]),
    r"small-cards.*": ("scripts.bench.card_memory.table", "markdown", []),
}


def rendered(file: Path) -> str | None:
    """Tables of a JSON file as Markdown; None if no script renders files with its name."""
    for stem, (module, function, parts) in RENDERERS.items():
        if re.fullmatch(stem, file.stem):
            document = json.loads(file.read_text(encoding="utf-8"))
            render = getattr(importlib.import_module(module), function)
            return render(*([document[part] for part in parts] or [document])).strip() + "\n"
    return None


def as_json(document: Any) -> str:
    """JSON of a result, with one row of a list a line."""
    return _json(document, "\n") + "\n"


def _json(value: Any, line: str) -> str:
    """Format a value; a list of rows, and what holds one, has a line for each part; ``line`` is the line break."""
    if not _has_rows(value):
        return json.dumps(value, ensure_ascii=False)
    parts = (
        [f"{json.dumps(key, ensure_ascii=False)}: {_json(part, line + ' ')}" for key, part in value.items()]
        if isinstance(value, dict)
        else [_json(part, line + " ") for part in value]
    )
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}{line} " + f",{line} ".join(parts) + f"{line}{closing}"


def _has_rows(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_rows, value.values()))
    return isinstance(value, list) and any(isinstance(part, dict) for part in value)


def write_result(file: Path | None, document: Any, table: str | None = None) -> None:
    """Write a result to a JSON file, or with ``table`` to the .json and .md files of a stem; None = write nothing.

    Floats are rounded to seven significant digits.
    """
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    if table is not None:  # not with_suffix: names such as wan-1.3b have a dot
        file.with_name(f"{file.name}.md").write_text(table, encoding="utf-8")
        file = file.with_name(f"{file.name}.json")
    rounded = json.loads(json.dumps(document), parse_float=lambda text: float(f"{float(text):.7g}"))
    file.write_text(as_json(rounded), encoding="utf-8")


def write_rows(
    file: Path | None, facts: dict[str, Any], rows: Iterable[dict[str, Any]], shown: Collection[str]
) -> dict[str, Any]:
    """Print the ``shown`` parts of each row, and write it as it comes, after the runs of earlier commands."""
    earlier = json.loads(file.read_text(encoding="utf-8"))["runs"] if file and file.exists() else []
    facts = facts | {"rows": []}
    for row in rows:
        facts["rows"].append(row)
        print(json.dumps({key: value for key, value in row.items() if key in shown}), flush=True)
        write_result(file, {"runs": [*earlier, facts]})
    return facts


def write_table(file: Path, text: str) -> None:
    """Write a Markdown file, which git ignores in docs/results, and print its path."""
    file.write_text(text, encoding="utf-8")
    print(f"wrote {file}")


def names_in(known: Any) -> Any:
    """Return an argument's type: a list of names among the known ones, separated by commas."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown {unknown[0]!r}; give names among {', '.join(known)}")
        return names

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSON file in docs/results")
    file = parser.parse_args().file
    if not file.is_file():
        parser.error(f"file must exist, got {file}; results are in docs/results")
    text = rendered(file)
    if text is None:
        parser.error(f"file must have the name of a result with tables ({', '.join(RENDERERS)}), got {file.name}")
    print(text, end="")


if __name__ == "__main__":
    main()
