#!/usr/bin/env python3
"""Compile the kernels for GPUs that are not available, and list registers, spills and instructions.

Every op runs its launcher on CPU tensors with a driver that names another GPU, so that tiles, warps and stages are
chosen for that GPU. The ptxas that comes with Triton compiles the kernels to machine code; none is launched. Needs no
GPU. Shows that a kernel compiles, fits the GPU's shared memory and uses its matrix units, but not how fast it is.

    python -m scripts.checks.compiled_kernels --output docs/results/compiled-kernels     # a few minutes on a CPU
    python -m scripts.checks.compiled_kernels --gpus sm89 --ops attention --output /tmp/compiled

Writes STEM.json and STEM.md; exits with 1 if a kernel does not fit its GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported

from dit_accel.tools.measure.origin import describe_run
from scripts.checks.compile_study.compiling import GPUS, compiled
from scripts.checks.compile_study.ops import OPS, SINCE
from scripts.checks.compile_study.report import fits, table
from scripts.tables import as_json, write_table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="stem of the .json and .md files")
    parser.add_argument("--gpus", nargs="+", choices=list(GPUS), default=list(GPUS))
    parser.add_argument("--ops", nargs="+", choices=list(OPS), default=list(OPS))
    options = parser.parse_args()
    rows = []
    for name in options.gpus:
        for op in (op for op in options.ops if GPUS[name].capability >= SINCE.get(op, 0)):
            rows += [{"gpu": name, "op": op, **item} for item in compiled(GPUS[name], OPS[op])]
            print(f"{name}, {op}: {sum(row['gpu'] == name and row['op'] == op for row in rows)} kernels", flush=True)
    document = {**describe_run("cpu"), "kernels": rows}
    options.output.with_suffix(".json").write_text(as_json(document), encoding="utf-8")
    write_table(options.output.with_suffix(".md"), table(rows))
    print(table(rows))
    return 0 if all(map(fits, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
