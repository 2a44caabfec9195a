#!/usr/bin/env python3
"""Check every kernel on a CUDA GPU against float64 at real sizes, then FLUX.1-dev's transformer in every step mode.

    python -m scripts.checks.gpu --output gpu_check.json [--quick]
    compute-sanitizer --tool memcheck python -m scripts.checks.gpu --small
    compute-sanitizer --tool racecheck --kernel-name kernel_name=attention \
        python -m scripts.checks.gpu --small --racecheck --checks attention --backends cuda
    compute-sanitizer --tool racecheck --kernel-name kernel_name=slices \
        python -m scripts.checks.gpu --racecheck --tests tests/kernels/test_attention.py -k "hopper and key"

A kernel's case passes if its largest error is at most twice the error of the dense low-precision computation plus the
rounding of the largest value, and if everything that the symbols mark as reused is unchanged. DISPATCH steps must not
make the host wait. Exits with 1 on a failure. For timings use `python -m scripts.bench.kernels`.
"""

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from dit_accel.kernels import backend_status
from dit_accel.kernels._cuda import runtime
from dit_accel.tools.measure.origin import describe_run
from scripts.bench.kernels.cases import make_inputs
from scripts.bench.kernels.gate import (
    ALL_CHECKS,
    CASES,
    QUICK_CASES,
    SMALL_CASES,
    available_backends,
    check_kernels,
    check_no_host_wait,
)
from scripts.tables import write_result


class ProductsOnTheHost(TorchDispatchMode):
    """Run torch's matrix products on the CPU: racecheck fails with an internal error at cuBLAS's Hopper kernels."""

    OPS = ("mm", "bmm", "addmm", "baddbmm", "_int_mm")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ not in self.OPS:
            return func(*args, **kwargs)
        device = args[0].device
        args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.cpu, (args, kwargs))
        return func(*args, **kwargs).to(device)


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
    size.add_argument("--quick", action="store_true", help="three cases per kernel, and no transformer")
    size.add_argument("--small", action="store_true", help="two cases of at most 700 tokens, for compute-sanitizer")
    checks = {check.__name__.removeprefix("check_"): check for check in ALL_CHECKS}
    parser.add_argument("--checks", nargs="+", choices=checks, help="only these kernel checks, without the transformer")
    parser.add_argument("--racecheck", action="store_true", help="replace operations that racecheck does not support")
    parser.add_argument("--tests", nargs=argparse.REMAINDER, help="run pytest with all remaining arguments instead")
    names = [name for name in backend_status() if name != "reference"]
    parser.add_argument("--backends", nargs="+", choices=names, default=names, help="only these, if they run here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check needs a CUDA GPU, and torch finds none", file=sys.stderr)
        return 2
    backends = [name for name in available_backends() if name in arguments.backends]
    if not backends:
        print(f"gpu_check finds no kernels that run here: {backend_status()}", file=sys.stderr)
        return 2
    cases = SMALL_CASES if arguments.small else QUICK_CASES if arguments.quick else CASES
    chosen = [checks[name] for name in arguments.checks or checks]
    with ExitStack() as stack:
        if arguments.racecheck:
            runtime.DEBUG_DEFINES = (("EVERY_LANE_ARRIVES", 1),)
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(ProductsOnTheHost())
        if arguments.tests is not None:
            import pytest

            return pytest.main(["-p", "no:cacheprovider", *arguments.tests])
        kernel_checks = check_kernels("cuda", cases, backends, chosen)
    if not (arguments.checks or arguments.racecheck):
        kernel_checks += check_no_host_wait(make_inputs(cases[0], "cuda"), backends)
    results = {"kernels": kernel_checks, "flux": []}
    print_table(results["kernels"])
    if not (arguments.quick or arguments.small or arguments.checks or arguments.racecheck):
        from scripts.checks.gpu_flux import check_flux

        results["flux"] = check_flux()
        for row in results["flux"]:
            print(json.dumps(row))
    rows = results["kernels"] + results["flux"]
    failures = sum(not row["passed"] for row in rows)
    print(f"\n{len(rows) - failures} of {len(rows)} checks passed")
    write_result(arguments.output, describe_run("cuda") | results)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
