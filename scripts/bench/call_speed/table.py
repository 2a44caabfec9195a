"""Rows of a benchmark of whole calls, and their tables."""

from collections.abc import Iterator
from typing import Any

KEY = ("case", "steps", "guidance", "gpus", "way")  # of a row
COLUMNS = ("text encoding", "denoising", "decoding", "other")
LABELS = {
    "eager": "diffusers",
    "compiled": "diffusers, compiled blocks",
    "cache-dit": "cache-dit, compiled blocks",
    "exact": "dit-accel `exact`",
    "balanced": "dit-accel `balanced`",
    "int8": "dit-accel, layers in int8",
    "float8": "dit-accel, layers in float8",
    "sla": "dit-accel, SLA and layers in float8",
    "sparse": "dit-accel, half of the tiles left out",
    "sparse-float8": "dit-accel, half of the tiles left out, layers in float8",
}
MEANING = """\
Seconds of one call with random weights in bf16. Denoising: from the first to the last transformer call. Speed-up: of
the whole call, over diffusers on one GPU of the same kind. Computed steps are fixed; tiles left out are random.
diffusers decodes HunyuanVideo in tiles, as the model's page advises, and dit-accel in one piece."""


def measured(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows with times of all runs, with the device, and the speed-up over diffusers if that was timed."""
    rows = [row | {"device": run["device"]} for run in document["runs"] for row in run["rows"] if "error" not in row]
    plain = {_call(row): row for row in rows if row["way"] == "eager"}
    for row in rows:
        if (over := plain.get(_call(row))) is None:
            yield row
        else:
            yield row | {"speed_up": over["seconds"] / row["seconds"], "plain": over}


def fastest(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the faster preset's row of each call, with the seconds of the other ways by their names in ``others``.

    Calls without diffusers' seconds are left out.
    """
    rows, found = list(measured(document)), {}
    for row in sorted(rows, key=lambda row: row["seconds"]):
        if row["way"] in ("exact", "balanced") and "plain" in row:
            same = [item for item in rows if _call(item) == _call(row)]
            others = {item["way"]: item["seconds"] for item in same if item["gpus"] == row["gpus"]}
            found.setdefault((*_call(row), row["gpus"]), row | {"others": others})
    return sorted(found.values(), key=_order)


def markdown(document: dict[str, Any]) -> str:
    """Table of all calls and ways, with the devices above it and failures below."""
    titles = ("call", "way", "GPUs", "computed steps", "whole call, s", *(f"{name}, s" for name in COLUMNS))
    lines = [
        f"# Whole calls, {', '.join(sorted({run['device'] for run in document['runs']}))}",
        "",
        *sorted(
            {f"torch {run['torch']}, diffusers {run['diffusers']}: `{run['command']}`  " for run in document["runs"]}
        ),
        "",
        f"| {' | '.join(titles)} | speed-up | peak GiB | decoded |",
        "|---" * (len(titles) + 3) + "|",
    ]
    for row in sorted(measured(document), key=_order):
        way = LABELS[row["way"]] + (f", {row['timed_steps']} steps timed" if "timed_steps" in row else "")
        cells = [name_of(row), way, str(row["gpus"]), f"{row['computed_steps']} of {row['steps']}"]
        cells += [f"{seconds:.2f}" for seconds in (row["seconds"], *(row["stages"][name] for name in COLUMNS))]
        cells.append(f"{row['speed_up']:.2f}×" if "speed_up" in row else "")
        cells += ["" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}", row.get("decoded") or ""]
        lines.append(f"| {' | '.join(cells)} |")
    failed = [row for run in document["runs"] for row in run["rows"] if "error" in row]
    lines += ["", *(f"- {name_of(row)}, {LABELS[row['way']]}: {row['error']}" for row in failed)] if failed else []
    return "\n".join([*lines, "", MEANING]) + "\n"


def name_of(row: dict[str, Any]) -> str:
    """Return a call's name, for example ``qwen-image, 1024×1024, 50 steps, guidance``."""
    size = "×".join(str(side) for side in row["size"] if side)
    return f"{row['model']}, {size}, {row['steps']} steps{', guidance' if row['guidance'] else ''}"


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    return (row["case"], -row["steps"], not row["guidance"], row["gpus"])


def _call(row: dict[str, Any]) -> tuple[Any, ...]:
    return (row["case"], row["steps"], row["guidance"], row["device"])
