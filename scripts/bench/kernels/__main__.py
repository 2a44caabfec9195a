"""Benchmark the sparse kernels: check each op against float64, then time it and its alternatives.

Writes NAME.json and NAME.md (tables). A backend that fails a check is not timed: the run writes no tables, and exits
with 1. Ratios compare figures of the same run only.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import torch

from dit_accel.kernels import backend_status
from dit_accel.tools.measure.origin import describe_run
from scripts.bench.kernels import gate
from scripts.bench.kernels.attention import bench_attention, bench_quantised
from scripts.bench.kernels.cases import Case, make_inputs
from scripts.bench.kernels.gemm import bench_gemm_o, bench_gemm_q
from scripts.bench.kernels.linear import bench_linear
from scripts.bench.kernels.recorder import Recorder
from scripts.bench.kernels.report import Document, failures, table
from scripts.bench.kernels.sizes import FULL, QUICK, TINY, Sizes
from scripts.bench.kernels.sla import bench_sla
from scripts.bench.kernels.symbol_path import bench_forecast, bench_lowering, bench_pooling, bench_symbols
from scripts.tables import as_json, names_in

Bench = Callable[[Recorder, Case, Sizes], None]  # benchmark of one size

_ATTENTION = gate.check_symbols, gate.check_attention
OPS: dict[str, tuple[Bench, tuple[gate.Check, ...]]] = {  # name: (benchmark, checks of the gate)
    "attention": (bench_attention, _ATTENTION),
    "quantised": (bench_quantised, _ATTENTION),
    "gemm_q": (bench_gemm_q, (gate.check_symbols, gate.check_gemm_q)),
    "gemm_o": (bench_gemm_o, (gate.check_symbols, gate.check_gemm_o)),
    "linear": (bench_linear, (gate.check_quantized_linear,)),
    "lowering": (bench_lowering, (gate.check_symbols,)),
    "pooling": (bench_pooling, (gate.check_pooling,)),
    "symbols": (bench_symbols, (gate.check_symbols, gate.check_pooling, gate.check_selection)),
    "forecast": (bench_forecast, (gate.check_symbols, gate.check_forecast)),
    "sla": (bench_sla, (*_ATTENTION, gate.check_linear_attention, gate.check_pooling)),
}
DEFAULT_OUTPUT = Path("kernels")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 success, 1 a check failed."""
    options = _options(arguments)
    return write(run(options), options.output)


def run(options: argparse.Namespace) -> Document:
    """Check and measure."""
    device, started = options.device, time.perf_counter()
    sizes, ops, backends = options.sizes, options.ops, options.backends
    lengths = sorted(map(int, options.shapes))
    todo = {(n, op): [case for case in sizes.cases[op] if case.tokens == n] for n, op in product(lengths, ops)}
    cases = gate.TINY_CASES if device == "cpu" else gate.QUICK_CASES
    checks = gate.check_kernels(device, cases, backends, [check for op in ops for check in OPS[op][1]])
    if device == "cuda" and "attention" in ops:
        checks += gate.check_no_host_wait(make_inputs(cases[0], device), backends)
    failed = {check["backend"] for check in checks if not check["passed"]}
    recorder = Recorder(device, [backend for backend in backends if backend not in failed])
    print(f"{time.perf_counter() - started:.0f} s: {sum(c['passed'] for c in checks)} of {len(checks)} checks passed")

    def document() -> Document:
        origin = describe_run(device) | {"seconds": time.perf_counter() - started}
        parts = {"gate": checks, "left_out": recorder.left_out, "results": recorder.rows}
        return {"runs": [origin], **{name: [row | {"run": 0} for row in rows] for name, rows in parts.items()}}

    for (tokens, op), of_op in todo.items():
        if not of_op or not recorder.backends:
            continue
        try:
            for case in of_op:
                OPS[op][0](recorder, case, sizes)
        except Exception as error:  # keep the rows measured so far; the run still fails
            traceback.print_exc()
            checks.append(gate.outcome(op, "", f"while it was timed at {tokens}", f"{type(error).__name__}: {error}"))
        print(f"{time.perf_counter() - started:.0f} s: {op} at {tokens} tokens done", flush=True)
        write_json(document(), options.output)  # an interrupted run keeps its rows
    return document()


def write_json(document: Document, output: Path) -> Path:
    """Write NAME.json and delete the tables of an earlier run, which no longer match it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_name(output.name + ".md").unlink(missing_ok=True)
    file = output.with_name(output.name + ".json")
    file.write_text(as_json(document), encoding="utf-8")
    return file


def write(document: Document, output: Path) -> int:
    """Write JSON, and tables if all checks pass, and return the exit code."""
    files = [write_json(document, output)]
    failed = failures(document)
    for row in failed:
        place = row.get("case") or f"{row['kind']} {row['shape']}"
        reason = row.get("reason") or f"error {row['error']}, bound {row['bound']:.3g}"
        print(f"FAILED: {row['op']} {row['backend']} {place}: {reason}")
    if failed:
        print(f"{len(failed)} checks failed: no tables. Results are in {files[0]}", file=sys.stderr)
        return 1
    files.append(output.with_name(output.name + ".md"))
    files[1].write_text(table(document), encoding="utf-8")
    print(f"wrote {', '.join(map(str, files))}")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, status = parser.add_argument, backend_status()
    add("--ops", type=names_in(OPS), default=list(OPS), help=f"any of {', '.join(OPS)}; all by default")
    add("--shapes", type=lambda text: text.split(","), help="numbers of tokens, comma-separated; all by default")
    add("--backends", type=names_in(status), help="backends, comma-separated; default: all that run here")
    add("--output", type=Path, default=DEFAULT_OUTPUT, help="stem of the files (default: %(default)s)")
    add("--force", action="store_true", help="replace files that exist")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--quick", action="store_true", help="one short sequence and two sparsities; on a CPU tiny sizes")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.quick:
        parser.error("--device cpu: only tiny sizes run on a CPU; add --quick")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("the benchmark needs a CUDA GPU, and torch finds none; `--quick --device cpu` checks references")
    options.sizes = TINY if options.device == "cpu" else QUICK if options.quick else FULL
    known = {str(case.tokens) for op in options.ops for case in options.sizes.cases[op]}
    options.shapes = options.shapes or sorted(known, key=int)
    if wrong := [length for length in options.shapes if length not in known]:
        parser.error(f"--shapes: must be among {', '.join(sorted(known, key=int))}, got {', '.join(wrong)}")
    if options.backends is None:
        options.backends = [*(["reference"] if options.device == "cpu" else []), *gate.available_backends()]
    if wrong := [f"{name!r} can't run here: {status[name]}" for name in options.backends if status[name] != "ok"]:
        parser.error(f"--backends: {wrong[0]}")
    if not options.backends:
        parser.error(f"--backends: none can run here: {status}")
    exist = [file for suffix in (".json", ".md") if (file := Path(f"{options.output}{suffix}")).exists()]
    if exist and not options.force:
        parser.error(f"--output: {exist[0]} exists; name another stem, or replace it with --force")
    return options


if __name__ == "__main__":
    sys.exit(main())
