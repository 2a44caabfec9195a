"""Steps of a run as bars and forecast errors as dots in HTML, fast enough to update at each step.

:func:`~dit_accel.tools.media.figures.timeline_figure` plots a finished run, with its times.
"""

import math
from collections.abc import Sequence

from dit_accel.tools.media.figures import ERROR_COLOUR, STEP_COLOURS, STEP_KINDS

EXPLANATION = (
    "One bar per step: a computed step runs the model, a forecast step extrapolates its earlier outputs. A dot is the "
    "error of a forecast, measured at a computed step on a log scale."
)
WIDTH, HEIGHT = 1000, 100  # units of the drawing, which stretches to the page's width
DECADES = (-4, 0)  # powers of ten at the ends of the error axis; errors outside are clamped
MARGIN = 6  # units above and below the error axis


def timeline(title: str, steps: Sequence[tuple[str, float | None]], total: int) -> str:
    """Return HTML with a legend and one bar per step, coloured by its kind, and a dot for its forecast error.

    ``steps`` has the mode and the error of each step so far, of ``total``; None = no error was measured. The title is
    HTML. Text is outside the stretched SVG, so that it is readable at each width; the page's style places it.
    """
    slot = WIDTH / max(total, len(steps), 1)
    bars, dots = [], []
    for index, (mode, error) in enumerate(steps):
        kind = STEP_KINDS[mode]
        label = f"step {index + 1}: {kind}" + ("" if error is None else f", error {error:.4f}")
        bars.append(
            f'<rect x="{index * slot:.1f}" y="0" width="{0.86 * slot:.1f}" height="{HEIGHT}" '
            f'fill="{STEP_COLOURS[kind]}" fill-opacity="0.6"><title>{label}</title></rect>'
        )
        if error is not None:
            dots.append(f"{(index + 0.43) * slot:.1f},{_level(error):.1f}")
    marks = [
        f'<line x1="0" x2="{WIDTH}" y1="{_level(10**power)}" y2="{_level(10**power)}" stroke="currentColor" '
        f'stroke-opacity="0.2" vector-effect="non-scaling-stroke"/>'
        for power in range(DECADES[0], DECADES[1] + 1)
    ]
    style = f'fill="none" stroke="{ERROR_COLOUR}" vector-effect="non-scaling-stroke"'
    line = f'<polyline points="{" ".join(dots)}" {style}/>'
    circles = [f'<path d="M{dot} h0" {style} stroke-width="7" stroke-linecap="round"/>' for dot in dots]
    return (
        f'<div class="steps"><p><b>{title}</b> {_legend(steps)}</p><div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="steps and forecast errors">{"".join([*bars, *marks, line, *circles])}</svg>'
        f"<small>{10 ** DECADES[1]:g}</small><small>{10 ** DECADES[0]:g}</small></div></div>"
    )


def _level(error: float) -> float:
    least, greatest = DECADES
    decade = min(max(math.log10(error), least), greatest) if error > 0 else least
    return MARGIN + (HEIGHT - 2 * MARGIN) * (greatest - decade) / (greatest - least)


def _legend(steps: Sequence[tuple[str, float | None]]) -> str:
    """Return the number of steps of each kind, and the meaning of the dots if there are any."""
    kinds = [STEP_KINDS[mode] for mode, _ in steps]
    entries = [(f"{kinds.count(kind)} {kind}", colour, "■") for kind, colour in STEP_COLOURS.items() if kind in kinds]
    if any(error is not None for _, error in steps):
        entries.append(("error", ERROR_COLOUR, "●"))
    return " ".join(f'<span><span style="color: {hue}">{sign}</span> {text}</span>' for text, hue, sign in entries)
