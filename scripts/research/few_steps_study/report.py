"""Tables of the variants: gains over the loop at equal work, and the choice that each model would get from the others.

A cell's gain is the mean over computed fractions. The score of a variant is the mean of the gains of the mean prompt
and of the worst one.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from scripts.research.conditions_study.cells import Cell
from scripts.research.conditions_study.report import Row, at, best_rival, by_cell

from .variants import LOOP, VARIANTS

FRACTIONS = {8: (0.5, 0.6, 0.7), 12: (0.35, 0.4, 0.5), 20: (0.25, 0.3, 0.35, 0.4), 28: (0.2, 0.25, 0.3, 0.4)}
MANY = (0.15, 0.2, 0.25, 0.3)  # of more steps

Gain = tuple[float, float]  # in dB: of the mean prompt, of the worst one


def tables(rows: Sequence[Row]) -> str:
    """Return all tables in Markdown."""
    names = [name for name in VARIANTS if name != LOOP and any(row["series"] == name for row in rows)]
    gains = {name: gains_of(rows, name) for name in names}
    return "\n".join([*_cells(rows, names), "", *_by_steps(rows, gains), "", *_left_out(rows, gains)]) + "\n"


def gain(own: Sequence[Row], name: str, share: float) -> Gain | None:
    """Return a variant's gain in a cell at a computed fraction; None where it or the loop was not measured."""
    found = [(at(own, share, statistic, name), at(own, share, statistic, LOOP)) for statistic in (mean, min)]
    differences = [a - b for a, b in found if a is not None and b is not None]
    return (differences[0], differences[1]) if len(differences) == 2 else None


def gains_of(rows: Sequence[Row], name: str) -> dict[str, Gain]:
    """Return a variant's gain by cell, mean over fractions."""
    found = {}
    for cell, own in by_cell(rows).items():
        shares = [each for share in _fractions(own) if (each := gain(own, name, share)) is not None]
        if shares:
            found[cell] = (mean(a for a, _ in shares), mean(b for _, b in shares))
    return found


def _cells(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Each cell at each fraction: the loop's PSNR, its lead over other methods, and the gain of every variant."""
    lines = [_row("cell", "fraction", "loop", "lead", *names), _row(*["---"] * (len(names) + 4))]
    for cell, own in by_cell(rows).items():
        others = [row for row in own if row["series"] not in VARIANTS]
        for share in _fractions(own):
            ours = [at(own, share, statistic, LOOP) for statistic in (mean, min)]
            if ours[0] is None or ours[1] is None:
                continue
            best = [best_rival(others, share, statistic) for statistic in (mean, min)]
            lead = "" if None in best else _pair(ours[0] - (best[0] or 0.0), ours[1] - (best[1] or 0.0))
            gains = [gain(own, name, share) for name in names]
            entries = ["" if each is None else _pair(*each) for each in gains]
            lines.append(_row(cell, f"{share:g}", f"{ours[0]:.1f} / {ours[1]:.1f}", lead, *entries))
    return lines


def _by_steps(rows: Sequence[Row], gains: dict[str, dict[str, Gain]]) -> list[str]:
    """Mean gain by number of steps, and the least cell's."""
    counts = sorted({_steps(own) for own in by_cell(rows).values()})
    steps = {cell: _steps(own) for cell, own in by_cell(rows).items()}
    heads = [f"{count} steps{part}" for count in counts for part in (": gain", ", least cell")]
    lines = [_row("variant", *heads), _row(*["---"] * (len(heads) + 1))]
    for name, found in gains.items():
        entries = []
        for count in counts:
            own = [each for cell, each in found.items() if steps[cell] == count]
            entries += [_pair(*map(of, zip(*own, strict=True))) if own else "" for of in (mean, min)]
        lines.append(_row(name, *entries))
    return lines


def _left_out(rows: Sequence[Row], gains: dict[str, dict[str, Gain]]) -> list[str]:
    """By number of steps and model: the best variant of the other models, and its gain on this one."""
    lines = [_row("steps", "model left out", "choice of the others", "gain", "its own best"), _row(*["---"] * 5)]
    cells = {cell: (_steps(own), own[0]["cell"]["model"]) for cell, own in by_cell(rows).items()}
    none: dict[str, Gain] = dict.fromkeys(cells, (0.0, 0.0))
    for count, model in sorted(set(cells.values())):
        here = [cell for cell, place in cells.items() if place == (count, model)]
        others = [cell for cell, place in cells.items() if place[0] == count and place[1] != model]
        if not others:
            continue
        known = {LOOP: none, **gains}
        choice, best = (max(known, key=lambda name: _score(known[name], of)) for of in (others, here))
        own = [known[choice][cell] for cell in here if cell in known[choice]]
        made = _pair(*map(mean, zip(*own, strict=True))) if own else ""
        lines.append(_row(count, model, choice, made, best))
    return lines


def _score(found: dict[str, Gain], cells: Sequence[str]) -> float:
    return mean([mean(found[cell]) for cell in cells if cell in found] or [float("-inf")])


def _fractions(own: Sequence[Row]) -> Sequence[float]:
    return FRACTIONS.get(_steps(own), MANY)


def _steps(own: Sequence[Row]) -> int:
    return Cell(**own[0]["cell"]).steps or 50


def _pair(mean_prompt: float, worst: float) -> str:
    return f"{mean_prompt:+.1f} / {worst:+.1f}"


def _row(*entries: object) -> str:
    return f"| {' | '.join(map(str, entries))} |"
