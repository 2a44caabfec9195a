#!/usr/bin/env python3
"""Find plausible mistakes that the tests miss: one change at a time in a copy of the checkout, with the nearest tests.

`changes/` lists the changes, each with the property that it breaks and the nearest test files. A change is noticed if
one of these tests fails. All tests must pass on the unchanged copy first. The checkout itself is never modified.

    python -m scripts.checks.mutants                      # all of them, two hours on one core
    python -m scripts.checks.mutants --only NAME --only NAME
    python -m scripts.checks.mutants --jobs 4             # in four copies at a time

Prints a table and the share of noticed changes by folder, and exits with 1 if it is below 90% in total.
"""

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.checks.changes import MUTANTS
from scripts.checks.changes.mutant import Mutant

ROOT = Path(__file__).parents[2]
ENOUGH = 0.9  # required share of noticed changes
LIMIT_S = 600  # time limit of one change's tests
NOTICED, PASSED, TIMED_OUT = "noticed", "not noticed", "timed out"
PYTEST_OUTCOMES = {0: PASSED, 1: NOTICED, 2: NOTICED}  # 2: a test file can't be imported; other codes are usage errors


def copy_checkout(target: Path) -> None:
    """Copy the files that git tracks or would add, and link the environment."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_tests(tree: Path, tests: str, limit: float = LIMIT_S) -> tuple[str, str]:
    """Run test files in a copy until one fails; return the outcome and what pytest printed. Raises if it can't."""
    # Python detects stale bytecode by time in seconds and size; a change may keep both.
    bytecode = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": sys.pycache_prefix or ""}
    changes = {"PYTHONPATH": str(tree), **bytecode}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()]
    try:
        done = subprocess.run(
            command, cwd=tree, env=os.environ | changes, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return TIMED_OUT, ""
    printed = done.stdout + done.stderr
    if done.returncode not in PYTEST_OUTCOMES:
        raise RuntimeError(f"pytest {tests} ended with {done.returncode}:\n{printed[-4000:]}")
    return PYTEST_OUTCOMES[done.returncode], printed


def try_out(mutant: Mutant, tree: Path, limit: float = LIMIT_S) -> str:
    """Outcome of the nearest tests for one change in a copy; the change is undone afterwards."""
    path = tree / mutant.file
    source = path.read_text(encoding="utf-8")
    path.write_text(mutant.of(source), encoding="utf-8")
    try:
        return run_tests(tree, mutant.tests, limit)[0]
    finally:
        path.write_text(source, encoding="utf-8")


def try_all(mutants: Sequence[Mutant], jobs: int) -> list[str]:
    """Outcomes of all changes, with `jobs` copies at a time; raises if tests fail without any change."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees: queue.Queue[Path] = queue.Queue()
        for job in range(jobs):
            copy_checkout(Path(folder) / str(job))
            trees.put(Path(folder) / str(job))

        def outcome(mutant: Mutant) -> str:
            tree, begin = trees.get(), time.perf_counter()
            try:
                found = try_out(mutant, tree)
            finally:
                trees.put(tree)
            print(f"{time.perf_counter() - begin:5.0f} s  {found:11}  {mutant.name}", file=sys.stderr, flush=True)
            return found

        with ThreadPoolExecutor(jobs) as pool:
            tests = " ".join(sorted({test for mutant in mutants for test in mutant.tests.split()}))
            found, printed = run_tests(Path(folder) / "0", tests, limit=LIMIT_S * len(mutants))
            if found != PASSED:  # every change would seem noticed
                raise RuntimeError(f"the tests must pass without a change, got {found!r}:\n{printed[-4000:]}")
            return list(pool.map(outcome, mutants))


def table(mutants: Sequence[Mutant], outcomes: Sequence[str]) -> str:
    """Format a row per change, and the share of noticed changes by folder."""
    rows = ["| change | file | outcome | breaks |", "|---|---|---|---|"]
    folders: dict[str, list[bool]] = defaultdict(list)
    for mutant, outcome in zip(mutants, outcomes, strict=True):
        rows.append(f"| {mutant.name} | {mutant.file} | {outcome} | {mutant.breaks} |")
        folders[str(Path(mutant.file).parent)].append(outcome == NOTICED)
    rows += ["", "| folder | changes | noticed |", "|---|---|---|"]
    everything = [noticed for found in folders.values() for noticed in found]
    for folder, found in [*sorted(folders.items()), ("all", everything)]:
        rows.append(f"| {folder} | {len(found)} | {sum(found) / len(found):.0%} |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    known = {mutant.name: mutant for mutant in MUTANTS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=known, metavar="NAME", help="one change; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="number of copies in parallel")
    options = parser.parse_args(arguments)
    mutants = [known[name] for name in options.only or known]
    outcomes = try_all(mutants, options.jobs)
    print(table(mutants, outcomes))
    return int(outcomes.count(NOTICED) < ENOUGH * len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
