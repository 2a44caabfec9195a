"""Tables and plot of the study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dit_accel.tools.figures import new_figure, tidy_axes

Result = dict[str, Any]
MOST_LINES = 6  # in the plot


def tables(document: dict[str, Any]) -> str:
    """Format a table per source with the paper's and the measured figures, and the table of the masks."""
    columns = ["setting", "sparsity: claimed", "measured", "PSNR dB: claimed", "measured", "worst"]
    columns += ["SSIM: claimed", "measured"]
    lines: list[str] = []
    results = document["results"]
    for source in dict.fromkeys(each["source"] for each in results):
        lines += [f"{source}:", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        lines += [_line(each) for each in results if each["source"] == source]
        lines.append("")
    if flips := document.get("flips"):
        steps = list(dict.fromkeys(each["steps"] for each in flips))
        lines += [
            "FG-Attn, figure 9: share of skipped single keys that are no longer skipped five steps later:",
            "",
        ]
        lines += [f"| queries in a slice | {' | '.join(steps)} |", "|---|" + "---|" * len(steps)]
        for size in dict.fromkeys(each["slice"] for each in flips):
            shares = {each["steps"]: each["flipped"] for each in flips if each["slice"] == size}
            lines.append(f"| {size} | {' | '.join(f'{shares[each]:.1%}' for each in steps)} |")
        lines.append("")
    return "\n".join(lines)


def _line(result: Result) -> str:
    claimed = result["claimed"]
    cells = [
        result["name"],
        _told(claimed.get("sparsity"), ".0%"),
        f"{result['sparsity']:.1%}",
        _told(claimed.get("psnr"), ".1f"),
        f"{result['psnr']:.1f}",
        f"{min(result['psnr_each']):.1f}",
        _told(claimed.get("ssim"), ".3f"),
        f"{result['ssim']:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def _told(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def density_plot(results: list[Result], path: Path) -> None:
    """Plot FlashOmni's figure 7: the share of computed attention pairs by step; nothing without its rows."""
    first = [each for each in results if "table 1" in each["source"] or each["name"].startswith("tuned")]
    if not first:
        return
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for each in first[:MOST_LINES]:
        axes.plot(each["attended"], label=each["name"], linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("share of pairs computed")
    axes.set_ylim(0, 1.05)
    axes.legend(fontsize=7)
    tidy_axes(axes, "y")
    figure.savefig(path)
