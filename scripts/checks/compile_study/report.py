"""Table of the kernels."""

from __future__ import annotations

from typing import Any

HEAD = ["GPU", "op", "kernel", "warps", "registers", "shared KiB", "spilled bytes", "programs", "products", "copies"]
HEAD += ["tile loads"]


def fits(row: dict[str, Any]) -> bool:
    """Return True if a program of the kernel can run on its GPU."""
    return row["shared"] <= row["most_shared"] and row["programs"] > 0


def table(rows: list[dict[str, Any]]) -> str:
    """Format the rows, one line per kernel."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for row in rows:
        cells = [row["gpu"], row["op"], f"`{row['kernel'].lstrip('_')}`", row["warps"], row["registers"]]
        cells += [f"{row['shared'] / 1024:.0f}" + ("" if fits(row) else ", too much"), row["spilled"], row["programs"]]
        cells += [row["products"], row["copies"], row["tile_loads"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"
