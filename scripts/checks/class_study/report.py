"""Tables of the results of ``scripts/checks/every_class.py``."""

import textwrap
from typing import Any

KINDS = {"exact": "`exact`", "balanced": "`balanced`", "forecast": "every second step"}


def markdown(document: dict[str, Any]) -> str:
    """A row for each run, and the classes that did not run."""
    return f"{table(rows(document))}\n{left_out(document)}\n"


def rows(document: dict[str, Any]) -> list[list[str]]:
    """The head of the table, and a row for each run of a class; its modular pipelines share the first row."""
    found = [["class", "run in", *KINDS.values()]]
    for name, item in document["classes"].items():
        blocks = _accelerated(item.get("modular", []))
        for place, run in enumerate(_accelerated(item.get("runs", []))):
            others = blocks if place == 0 else []
            title = f"{run['ran']}, {len(others)} modular" if others else run["ran"]
            title += ", one sample" if "batch" in run else ""
            cells = (_cell([verdict for one in (run, *others) for verdict in one[kind]]) for kind in KINDS)
            found.append([name, title, *cells])
    return found


def table(rows: list[list[str]]) -> str:
    head, *others = rows
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [head, ["---"] * len(head), *others])


def left_out(document: dict[str, Any]) -> str:
    """A list of the classes and modular pipelines that were refused, not forecast or did not run, with the reasons."""
    facts = []
    for name, item in document["classes"].items():
        blocks = item.get("modular", [])
        refused = [run["exact"][0] | run for run in (*item.get("runs", []), *blocks) if _is_refused(run)]
        plain = [run["forecast"][0] | run for run in blocks if run["forecast"][0]["is"] == "plain"]
        facts += [
            f"- {name} ({run['ran']}): {run['reason'].removeprefix('rest of the run computed: ')}"
            for run in (*refused, *plain)
        ]
        if "runs" not in item:
            facts.append(f"- {name}: {item.get('refused', item.get('not run'))}")
    return "\n".join(textwrap.fill(line, 120, subsequent_indent="  ") for line in facts)


def _accelerated(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [run for run in runs if not _is_refused(run)]


def _is_refused(run: dict[str, Any]) -> bool:
    return run["exact"][0]["is"] == "refused"


def _cell(runs: list[dict[str, Any]]) -> str:
    """The outcome of a kind for all batches, with the largest error."""
    worst = max(runs, key=lambda run: run.get("error", 0.0))
    if "error" in worst:
        return f"{'far: ' if worst['is'] == 'beyond the bound' else ''}{worst['error']:.1%}"
    return f"{worst['is']}: {worst['reason']}" if worst.get("reason") else worst["is"]
