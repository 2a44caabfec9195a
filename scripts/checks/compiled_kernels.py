#!/usr/bin/env python3
"""Compile the Triton kernels for GPUs that are not available, and list their registers, spills and shared memory.

Every op runs its launcher on CPU tensors with a driver that names another GPU, so that tiles, warps and stages are
chosen for that GPU. The ptxas that comes with Triton compiles the kernels to machine code; none is launched. Shows that
a kernel compiles, fits the GPU's shared memory, spills little and uses its matrix units, but not how fast it is.

    python -m scripts.checks.compiled_kernels --output docs/results/architectures     # ten minutes on a CPU
    python -m scripts.checks.compiled_kernels --gpus sm89 --ops attention --output /tmp/compiled

Writes STEM.json and STEM.md, with the worst figures over a kernel's variants; exits with 1 if a kernel breaks a limit.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported

from dit_accel.tools.measure.origin import describe_run
from scripts.checks.compile_study.compiling import GPUS, compiled
from scripts.checks.compile_study.ops import OPS, SINCE
from scripts.tables import write_result, write_table

# Bytes of a thread: 18 registers. Attention's loop over tiles of 64 keys then has 5 of 558 instructions for them; tiles
# of 32 keys spill nothing and have 45% more instructions for each product.
MOST_SPILLED = 72
MEASURED = "sm90"  # sizes are chosen by time there, also among those that spill
UNMENDED = ("row_gradients",)  # of SLA's training: all sizes spill 1000 bytes and more outside of sm90 and sm100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="stem of the .json and .md files")
    parser.add_argument("--gpus", nargs="+", choices=list(GPUS), default=list(GPUS))
    parser.add_argument("--ops", nargs="+", choices=list(OPS), default=list(OPS))
    options = parser.parse_args()
    rows, broken = [], []
    for name in options.gpus:
        for op in (op for op in options.ops if GPUS[name].capability >= SINCE.get(op, 0)):
            print(f"{name}, {op}", flush=True)
            try:
                rows += [{"gpu": name, "op": op, **item} for item in compiled(GPUS[name], OPS[op])]
            except RuntimeError as error:  # of Triton's passes
                broken.append(f"{name}, {op}: does not compile ({error})")
    broken += [f"{row['gpu']}, {row['op']}: {row['kernel']} {limit}" for row in rows if (limit := why_broken(row))]
    worst = [worst_of(list(some)) for _, some in groupby(sorted(rows, key=_kernel_and_gpu), _kernel_and_gpu)]
    # the page shows kernels with products; the others are checked like them
    with_products = {row["kernel"] for row in worst if row["products"]}
    shown = [row for row in worst if row["kernel"] in with_products]
    write_result(options.output.with_suffix(".json"), describe_run("cpu") | {"checked": len(rows), "kernels": shown})
    write_table(options.output.with_suffix(".md"), table(shown))
    print("\n".join([table(shown), *broken]))
    return 1 if broken else 0


def why_broken(row: dict[str, Any]) -> str | None:
    """Return the limit of its GPU that a kernel breaks, or None."""
    most = GPUS[row["gpu"]].shared
    if row["shared"] > most or row["programs"] < 1:
        return f"does not fit: {row['shared']} of {most} KiB of shared memory, {row['programs']} programs"
    if row["spilled"] > MOST_SPILLED and row["gpu"] != MEASURED and row["kernel"] not in UNMENDED:
        return f"spills {row['spilled']} bytes of a thread's registers, and at most {MOST_SPILLED} are allowed"
    return None


def _kernel_and_gpu(row: dict[str, Any]) -> tuple[str, str]:
    return row["kernel"], row["gpu"]


def worst_of(variants: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a kernel's worst figures on a GPU."""
    most = {name: max(row[name] for row in variants) for name in ("registers", "shared", "spilled")}
    least = {name: min(row[name] for row in variants) for name in ("programs", "products")}
    kernel, gpu = _kernel_and_gpu(variants[0])
    return {"kernel": kernel, "gpu": gpu, "variants": len(variants), **most, **least}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows: a line for each kernel, a column for each GPU."""
    gpus = [gpu for gpu in GPUS if any(row["gpu"] == gpu for row in rows)]
    lines = [f"| kernel | {' | '.join(gpus)} |", "|---" * (1 + len(gpus)) + "|"]
    for kernel, some in groupby(rows, lambda row: row["kernel"]):
        cells = dict.fromkeys(gpus, "") | {
            row["gpu"]: "{registers} / {shared:.0f} / {spilled} / {programs} / {products:.1%}".format(**row)
            for row in some
        }
        lines.append(f"| `{kernel}` | {' | '.join(cells.values())} |")
    lines += ["", "Registers / KiB of shared memory / spilled bytes / programs a multiprocessor / matrix instructions."]
    limits = ", ".join(f"{GPUS[gpu].shared} KiB on {gpu}" for gpu in gpus)
    return "\n".join([*lines, f"Limits of shared memory: {limits}.", ""])


if __name__ == "__main__":
    sys.exit(main())
