"""Modes and errors of a run's steps as an SVG image, fast enough to update at each step.

:func:`~dit_accel.tools.figures.timeline_figure` plots a finished run, with its times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dit_accel.tools.figures import ERROR_COLOUR, MODE_COLOURS

WIDTH, HEIGHT = 720, 150
LEFT, TOP = 44, 24  # of the plot, below the legend
DECADES = (-4, 0)  # powers of ten at the ends of the error axis; errors outside are clamped


def timeline_svg(steps: Sequence[tuple[str, float | None]], total: int) -> str:
    """Return an SVG with one column per step, coloured by mode, and a dot for its forecast error on a log axis.

    Args:
        steps: mode and error of each step so far; None = no error was measured.
        total: number of steps of the whole run, which share the width.
    """
    least, greatest = DECADES
    plot = HEIGHT - TOP - 8
    slot = (WIDTH - LEFT) / max(total, len(steps), 1)

    def level(error: float) -> float:
        decade = min(max(math.log10(error), least), greatest) if error > 0 else least
        return TOP + plot * (greatest - decade) / (greatest - least)

    columns, dots = [], []
    for index, (mode, error) in enumerate(steps):
        left = LEFT + index * slot
        label = f"step {index + 1}: {mode}" + ("" if error is None else f", error {error:.4f}")
        columns.append(
            f'<rect x="{left:.1f}" y="{TOP}" width="{0.86 * slot:.1f}" height="{plot}" fill="{MODE_COLOURS[mode]}" '
            f'fill-opacity="0.55"><title>{label}</title></rect>'
        )
        if error is not None:
            dots.append((left + 0.43 * slot, level(error)))
    axis = []
    for power in range(least, greatest + 1):
        height = level(10**power)
        axis.append(
            f'<line x1="{LEFT}" x2="{WIDTH}" y1="{height:.1f}" y2="{height:.1f}" stroke="currentColor" '
            f'stroke-opacity="0.2"/>'
            f'<text x="{LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{10**power:g}</text>'
        )
    line = f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in dots)}" fill="none" stroke="{ERROR_COLOUR}"/>'
    circles = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{ERROR_COLOUR}"/>' for x, y in dots]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" font-size="11" fill="currentColor" role="img" '
        f'aria-label="step modes and errors">{"".join([*_legend(steps), *columns, *axis, line, *circles])}</svg>'
    )


def _legend(steps: Sequence[tuple[str, float | None]]) -> list[str]:
    """Return the legend: number of steps by mode, and the meaning of the dots."""
    entries = [(f"{sum(each == mode for each, _ in steps)} {mode}", colour) for mode, colour in MODE_COLOURS.items()]
    return [
        f'<rect x="{LEFT + 100 * place}" y="4" width="10" height="10" fill="{colour}"/>'
        f'<text x="{LEFT + 16 + 100 * place}" y="13">{text}</text>'
        for place, (text, colour) in enumerate([*entries, ("error of the forecast", ERROR_COLOUR)])
    ]
