"""Record of a run: a JSON document, and its Markdown tables."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

Row = dict[str, Any]
Document = dict[str, Any]  # {"runs": [...], "gate": [...], "left_out": [...], "results": [...]}
SHARES = ("symbols", "sparge prediction")

Key = TypeVar("Key", bound=Hashable)


def failures(document: Document) -> list[Row]:
    """Failed checks of the gate and failed rows."""
    return [row for part in ("gate", "results") for row in document[part] if not row["passed"]]


def table(document: Document) -> str:
    """Results as Markdown, one table per op and shape."""
    sections = ["\n".join(_heading(document))]
    for (op, shape), rows in grouped(document["results"], lambda row: (row["op"], shape_label(row["shape"]))).items():
        sections.append("\n".join([f"## {op}, {shape}", "", *_lines(rows)]))
    if document["left_out"]:
        notes = [f"- {entry['who']} for {entry['what']}: {entry['reason']}" for entry in document["left_out"]]
        sections.append("\n".join(["## Left out", "", *notes]))
    return "\n\n".join(sections) + "\n"


def grouped(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """Group the rows by key, in order of first occurrence."""
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def shape_label(shape: dict[str, int]) -> str:
    """Label of a shape, such as ``tokens=4608 heads=24``."""
    return " ".join(f"{name}={length}" for name, length in shape.items() if name not in ("head_dim", "block"))


def _heading(document: Document) -> list[str]:
    lines = ["# Kernels", ""]
    for run in document["runs"]:
        versions = ", ".join(
            f"{name} {run[name]}" for name in ("driver", "torch", "triton", "cudnn", "flash-attn-4") if run.get(name)
        )
        lines.append(
            f"- {run['device']}, {versions}, commit {run['commit'][:12]}, {run['seconds']:.0f} s: `{run['command']}`"
        )
    checks = document["gate"] + document["results"]
    passed = sum(row["passed"] for row in checks)
    return [*lines, "", f"{passed} of {len(checks)} comparisons with float64 pass."]


def _lines(rows: Sequence[Row]) -> list[str]:
    """Format one table, with a column for every alternative that any row has."""
    names = list(dict.fromkeys(name for row in rows for name in row["speedup"]))
    unit, is_share = rows[0]["unit"], rows[0]["op"] in SHARES
    compared = [f"{'share of' if is_share else 'over'} {name}" for name in names]
    header = ["kind", "sparsity", "ideal", "backend", "ms", unit, *compared, "error / bound"]
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for row in rows:
        cells = [row["kind"], f"{row['sparsity']:.1%}", f"{row['ideal']:.2f}x", row["backend"]]
        if row["passed"]:
            cells += [f"{row['ms']:.4g}", "" if row["rate"] is None else f"{row['rate']:.0f}"]
        else:
            cells += ["FAILED", ""]
        ratios = (row["speedup"].get(name) for name in names)
        cells += ["" if ratio is None else f"{1 / ratio:.2%}" if is_share else f"{ratio:.2f}x" for ratio in ratios]
        cells.append(f"{row['error']:.1e} / {row['bound']:.1e}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines
