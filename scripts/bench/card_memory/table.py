"""Tables of transformers on small cards."""

from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]
MODELS = {"flux": "FLUX.1-dev", "wan-14b": "Wan 2.1 14B", "qwen-image": "Qwen-Image", "hunyuan": "HunyuanVideo"}
MODELS |= {"ltx2": "LTX-2"}
FORMS = {
    "cast": "stored in float8",
    "int8": "int8 (torchao)",
    "float8": "float8 (torchao)",
    "q4": "4 bits (GGUF)",
    "nf4": "NF4 (bitsandbytes)",
}
TITLES = (
    *("model", "weights", "offload", "card, GiB", "computed step, s", "forecast step, s", "denoising, s", "speed-up"),
    *("peak, GiB", "copies to the GPU in a forecast step, ms"),
)
UNFIT = "does not fit"
MEANING = """\
Arrows: plain diffusers, then `balanced`. Denoising: calculated from the seconds of a step, with the move of all weights
to the GPU before the first step under offload `model`. The memory is limited to the card's, less 0.75 GiB for driver
and context; the GPU and its bus are those above."""


def markdown(document: Row) -> str:
    """Table of all models, weights, ways and cards, with the devices above it and failures below."""
    runs = document["runs"]
    versions = {f"torch {run['torch']}, diffusers {run['diffusers']}: `{run['command']}`  " for run in runs}
    lines = [f"# Small cards, on {', '.join(sorted({run['device'] for run in runs}))}", "", *sorted(versions), ""]
    lines += [f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|"]
    rows = [row for run in runs for row in run["rows"]]
    lines += [f"| {' | '.join(cells)} |" for cells in _lines(rows)]
    failed = [f"- {_name(row)}: {row['error']}" for row in rows if "error" in row]
    return "\n".join([*lines, "", *failed, *[""] * bool(failed), MEANING]) + "\n"


def _lines(rows: list[Row]) -> Iterator[list[str]]:
    """Yield the cells of each model, form of weights, way and card, from the rows of both runs."""
    pairs: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        if "error" not in row:
            key = row["case"], tuple(row["latents"]), row["weights"], row.get("way", ""), row["card_gib"]
            pairs.setdefault(key, {})[row["run"]] = row
    for (*_, card), pair in pairs.items():
        plain, ours = pair.get("plain", {}), pair.get("balanced", {})
        row = ours or plain
        frames = f", {4 * row['latents'][2] - 3} frames" if len(row["latents"]) == 5 else ""
        cells = [MODELS[row["case"]] + frames, FORMS.get(row["weights"], row["weights"]), row["way"], str(card)]
        if all(row.get("fits") is False for row in (plain, ours)):  # a run that was not measured has no row
            yield [*cells, *[UNFIT] * 3, "", "", ""]
            continue
        cells += [_both(plain, ours, "computed_seconds"), _figure(ours, "forecast_seconds", 4)]
        cells += [_both(plain, ours, "seconds", 1)]
        both = plain.get("fits") and ours.get("fits")
        cells += [f"{plain['seconds'] / ours['seconds']:.2f}×" if both else "", _both(plain, ours, "peak_gib", 1)]
        yield [*cells, "" if ours.get("copies", {}).get("ms") is None else f"{ours['copies']['ms']:.3f}"]


def _both(plain: Row, ours: Row, key: str, digits: int = 3) -> str:
    return f"{_figure(plain, key, digits)} → {_figure(ours, key, digits)}"


def _figure(row: Row, key: str, digits: int) -> str:
    if not row.get("fits"):
        return UNFIT if row else ""
    return "" if row[key] is None else f"{row[key]:.{digits}f}"


def _name(row: Row) -> str:
    return ", ".join(filter(None, [MODELS[row["case"]], FORMS.get(row["weights"], row["weights"]), row.get("way", "")]))
