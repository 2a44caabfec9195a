#!/usr/bin/env python3
"""Write the tables of docs/guide/choosing.md from docs/results and configs/measured.json.

python -m scripts.choosing
"""

import json
import re
from pathlib import Path
from typing import Any

from dit_accel.cli.presets import span
from dit_accel.presets import measured
from dit_accel.presets.loading import LEVELS
from scripts.bench.call_speed.pipelines import CASES
from scripts.bench.call_speed.table import fastest, name_of
from scripts.bench.recommended import GPUS, placement

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "guide" / "choosing.md"
STAGES = ("denoising", "decoding")  # the others take less than a tenth of a second, or as long as before
OTHERS = {"compiled": "compiled blocks", "cache-dit": "cache-dit", "sparse": "half the tiles"}
OTHERS |= {"int8": "int8", "float8": "float8"}


def figures() -> str:
    """Figures of presets on small models."""
    lines = ["| small models | steps | `quality`: computed, PSNR dB | `balanced` | `turbo` |", "|---|---|---|---|---|"]
    for kind, form in (("images", ""), ("videos", "video-")):
        for runs in zip(*(measured(form + name) for name in LEVELS), strict=True):
            (steps,) = {run["steps"] for run in runs}
            cells = [f"{span(run['computed'], 2)}, {span(run['psnr'], 0)}" for run in runs]
            lines.append(f"| {kind} | {steps} | {' | '.join(cells)} |")
    return "\n".join(lines)


def calls() -> str:
    """Seconds of whole calls, and of their stages."""
    titles = ("call", "GPU", "computed", *(f"{name}, s" for name in (*STAGES, "whole call", *OTHERS.values())))
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    document = json.loads((DOCS / "results" / "calls.json").read_text(encoding="utf-8"))
    found, best = fastest(document), {}  # of the cards that a call was timed on, the one with most other ways
    for row in sorted(found, key=lambda row: len(row["others"])):
        best[name_of(row), row["gpus"]] = row
    for row in (row for row in found if row in best.values()):
        card = row["device"].removeprefix("NVIDIA ").split()[0]  # NVIDIA H100 80GB HBM3 is an H100
        cells = [name_of(row), f"{row['gpus']} {card}".removeprefix("1 "), f"{row['computed_steps']} of {row['steps']}"]
        cells += [f"{row['plain']['stages'][name]:.2f} → {row['stages'][name]:.2f}" for name in STAGES]
        few = f" ({row['plain']['timed_steps']} steps timed)" if "timed_steps" in row["plain"] else ""
        cells.append(f"{row['plain']['seconds']:.2f}{few} → **{row['seconds']:.2f}**")
        cells += [f"{row['others'][way]:.2f}" if way in row["others"] else "" for way in OTHERS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", "Source: [calls, on other cards too](../results/calls.json)."])


def cards() -> str:
    """Placements that `recommend` prints for small cards, with a measured call or the counted peak."""
    runs = json.loads((DOCS / "results" / "recommended.json").read_text(encoding="utf-8"))["runs"]
    rows = (row for run in runs for row in run["rows"] if "error" not in row)
    timed = {(row["case"], row["card_gib"], _place(row)): row for row in rows}
    lines = [f"| | {' | '.join(f'{gib} GiB' for gib in GPUS)} |", f"|{'---|' * (1 + len(GPUS))}"]
    others = ("flux-schnell", "minimax-h3", "wan-1.3b-few-steps")  # as FLUX.1-dev, too large, as Wan
    cases = {name: case for name, case in CASES.items() if name not in others}
    for name, case in cases.items():
        cells = [case.model]
        for facts in (placement(case, card) for card in GPUS):
            row = timed.get((name, facts["card_gib"], _place(facts)), facts)
            known = f": {row['seconds']:.1f} s, {row['peak_gib']:.1f} GiB" if "seconds" in row else ""
            cells.append(_place(facts) + (known or f" ({facts['counted_gib'] or 0:.1f})" * bool(facts["lines"])))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _place(facts: dict[str, Any]) -> str:
    """Say where the parts of a pipeline are by recommended lines, and if layers run in 8 bits."""
    signs = {"`text`": "transformer_2", "`model`": "enable_model_", "`group`": "enable_group_"}
    way = next((way for way, sign in signs.items() if sign in str(facts["lines"])), "whole")
    return f"{'8 bits, ' * ('8bit' in facts['preset'])}{way}" if facts["lines"] else "no"


def page() -> str:
    """The page with the tables of today between its marks."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in (("figures", figures()), ("calls", calls()), ("cards", cards())):
        begin, end = f"<!-- {name} -->\n\n", f"\n\n<!-- end of {name} -->"
        text = re.sub(f"{begin}.*{end}", lambda _, whole=f"{begin}{table}{end}": whole, text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
