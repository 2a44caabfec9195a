#!/usr/bin/env python3
"""Checks every kernel on a CUDA GPU against float64 at real sizes, then FLUX.1-dev's transformer in every step mode.

    python scripts/gpu_check.py --output gpu_check.json [--quick]
    compute-sanitizer --tool memcheck python scripts/gpu_check.py --small

A kernel's case passes when its largest error is at most twice that of the dense low-precision computation plus the
rounding of the largest value, and when everything that the symbols mark as reused is untouched. DISPATCH steps must not
make the host wait. Exits 1 on a failure. Times are what `dit-accel bench kernels` is for.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from dit_accel.kernels import backend_status
from dit_accel.tools.bench.cases import make_inputs
from dit_accel.tools.bench.gate import (
    CASES,
    QUICK_CASES,
    SMALL_CASES,
    available_backends,
    check_kernels,
    check_no_host_wait,
)
from dit_accel.tools.bench.origin import describe_run


def print_table(results: list[dict]) -> None:
    case = None
    for row in results:
        if row["case"] != case:
            case = row["case"]
            print(f"\n{case}\n  {'op':30}{'backend':10}{'error':>10}{'bound':>10}")
        error = "NaN" if row["error"] is None else f"{row['error']:.2e}"
        outcome = "ok" if row["passed"] else "FAILED " + (row.get("reason") or "")
        print(f"  {row['op']:30}{row['backend']:10}{error:>10}{row['bound']:10.2e}  {outcome}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="three cases a kernel, and no transformer")
    size.add_argument("--small", action="store_true", help="two cases of at most 700 tokens, for compute-sanitizer")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check needs a CUDA GPU, and torch finds none", file=sys.stderr)
        return 2
    backends = available_backends()
    if not backends:
        print(f"gpu_check finds no kernels that run here: {backend_status()}", file=sys.stderr)
        return 2
    cases = SMALL_CASES if arguments.small else QUICK_CASES if arguments.quick else CASES
    kernel_checks = check_kernels("cuda", cases, backends)
    kernel_checks += check_no_host_wait(make_inputs(cases[0], "cuda"), backends)
    results = {"kernels": kernel_checks, "flux": []}
    print_table(results["kernels"])
    if not (arguments.quick or arguments.small):
        from gpu_check_flux import check_flux

        results["flux"] = check_flux()
        for row in results["flux"]:
            print(json.dumps(row))
    rows = results["kernels"] + results["flux"]
    failures = sum(not row["passed"] for row in rows)
    print(f"\n{len(rows) - failures} of {len(rows)} checks passed")
    if arguments.output:
        arguments.output.write_text(json.dumps(describe_run("cuda") | results, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
