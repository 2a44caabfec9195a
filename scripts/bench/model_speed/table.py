"""Speed-ups of a benchmark's rows, and its Markdown tables."""

from typing import Any

COLUMNS = {
    "ms": ("ms", "{:.1f}"),
    "speedup_over_plain": ("over plain", "{:.2f}×"),
    "speedup_over_baseline": ("over the baseline", "{:.2f}×"),
    "peak_gib": ("peak GiB", "{:.1f}"),
    "peak_over_plain": ("peak / plain", "{:.3f}"),
    "gpu_busy_ms": ("GPU busy ms", "{:.1f}"),
    "gpu_idle": ("GPU idle", "{:.1%}"),
    "relative_error": ("relative error", "{:.1e}"),
}
MEANING = """\
ms: per computed step, all branches; for a run of 50 steps per average step. Baseline: blocks compiled one by one
({attention} attention). GPU busy: time with any kernel running, in a computed step. GPU idle: share of
consecutive computed steps without a kernel. Both are measured under the profiler, which slows launches. Relative
error: ‖v − v_plain‖ / ‖v_plain‖ of one velocity."""
LISTED_KERNELS = 16
MEANING_ALONE = "ms: per step, all branches."
DISPATCH_MEANING = """\
Transformer: GPU time of its calls alone. Step: with the scheduler, and with the control net, which runs when the
transformer reads its outputs. The host waits for the GPU after every step, so the time of a DISPATCH step includes
Python overhead."""


def compare(rows: list[dict[str, Any]]) -> None:
    """Add each row's speed-up over the plain and the baseline row, and its peak memory over the plain row's, where both
    were measured. Rows of DISPATCH steps have their own models and stay unchanged.
    """
    references = {row["run"]: row for row in rows if row["run"] in ("plain", "baseline")}
    for row in rows:
        if "dispatch_share" in row or "ms" not in row:
            continue
        for name, reference in references.items():
            if "ms" in reference and name != row["run"]:
                row[f"speedup_over_{name}"] = reference["ms"] / row["ms"]
        if row["peak_gib"] is not None:
            row["peak_over_plain"] = row["peak_gib"] / references["plain"]["peak_gib"]


def markdown(results: dict[str, Any]) -> str:
    """Results as Markdown: model and device, the rows, and the DISPATCH steps."""
    rows = results["rows"]
    baseline = next((row for row in rows if row["run"] == "baseline"), {})
    lines = [
        f"# {results['model']}, {results['seconds']:.0f} s",
        "",
        f"{results['device']}, torch {results['torch']}, triton {results['triton']}, latents {results['latents']}, "
        f"random weights: `{results['command']}`",
        "",
        f"| | {' | '.join(title for title, _ in COLUMNS.values())} |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    for row in rows:
        if "dispatch_share" not in row:
            figures = (form.format(row[key]) if row.get(key) is not None else "" for key, (_, form) in COLUMNS.items())
            lines.append(f"| {row['run']} | {' | '.join(figures)} |")
    lines += ["", MEANING.format(attention=baseline["attention"]) if baseline.get("attention") else MEANING_ALONE]
    failed = [f"- {what} failed: {error}" for row in rows for what, error in row.get("failed", {}).items()]
    lines += ["", *failed] if failed else []
    for row in rows:
        lines += _kernel_table(row) if row.get("kernels") else []
    dispatched = [row for row in rows if "dispatch_share" in row]
    if dispatched:
        lines += ["", *_dispatch_table(dispatched), "", DISPATCH_MEANING]
    return "\n".join(lines) + "\n"


def _kernel_table(row: dict[str, Any]) -> list[str]:
    """Table of the kernels with the most time in a step, and the total of all others."""
    kernels, busy = row["kernels"], sum(item["ms"] for item in row["kernels"])
    lines = [
        "",
        f"{row['run']}: {busy:.1f} ms of kernels a step",
        "",
        "| kernel | launches | ms | share |",
        "|---|---|---|---|",
    ]
    for item in kernels[:LISTED_KERNELS]:
        name = item["kernel"] if len(item["kernel"]) <= 70 else f"{item['kernel'][:67]}..."
        lines.append(f"| `{name}` | {item['launches']:g} | {item['ms']:.2f} | {item['ms'] / busy:.1%} |")
    others = kernels[LISTED_KERNELS:]
    if others:
        launches, ms = (sum(item[key] for item in others) for key in ("launches", "ms"))
        lines.append(f"| {len(others)} others | {launches:g} | {ms:.2f} | {ms / busy:.1%} |")
    return lines


def _dispatch_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| | transformer: computed ms | DISPATCH ms | share | step: computed ms | DISPATCH ms | share |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["run"]]
        for part, share in (("transformer_ms_by_mode", "dispatch_share"), ("ms_by_mode", "dispatch_step_share")):
            cells += [f"{row[part]['update']:.1f}", f"{row[part]['dispatch']:.2f}", f"{row[share]:.2%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
