#!/usr/bin/env python3
"""Run diffusers' own pipeline tests plainly and accelerated, and list the tests that pass only plainly.

Needs a checkout of diffusers for its ``tests`` folder; the installed diffusers is tested. The kinds of acceleration are
the presets `exact` and `balanced`, `forecast` (every second step, at level `output`) and `flashomni` (inside the blocks
of every second step, where a preset exists). Models from the Hub are replaced with small ones.

    git clone --depth 1 --branch v0.42.1 https://github.com/huggingface/diffusers
    python -m scripts.checks.conformance diffusers --output conformance
    python -m scripts.checks.conformance diffusers --output conformance --families flux wan --kinds exact forecast

Writes STEM.json and STEM.md after each family; families that are already in the file are replaced, the others stay. A
test that passes plainly and fails with a kind is *refused* by an error of this plugin, differs in its *values* with a
kind that changes outputs, or is a *failure*. The tests need the packages parameterized and requests-mock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from dit_accel.tools.measure.origin import describe_run
from scripts.checks import stand_ins
from scripts.checks.conformance_plugin import KINDS
from scripts.tables import as_json, write_table

ROOT = Path(__file__).parents[2]
PLAIN = "plain"
COUNTS = ("ran", "passed", *KINDS, "fused", "autoencoders")  # the last two are of earlier files
Outcomes = dict[str, tuple[str, str]]  # by test: passed, failed or skipped; and the error


def families_of(checkout: Path) -> dict[str, Path]:
    """Folders of a checkout's pipeline tests, by name."""
    folder = checkout / "tests" / "pipelines"
    if not folder.is_dir():
        raise SystemExit(f"checkout must hold tests/pipelines, as one of diffusers does; {checkout} does not")
    return {path.parent.name: path.parent for path in sorted(folder.glob("*/test_*.py"))}


def outcomes(folder: Path, kind: str, options: argparse.Namespace, place: Path) -> Outcomes:
    """Run the tests of a family in a process of their own, in ``place``, which holds the replacement models."""
    written = place / f"{folder.name}-{kind}.xml"
    command = [sys.executable, "-m", "pytest", str(folder), f"--rootdir={options.checkout}", "-q"]
    command += ["-p", "no:cacheprovider", "-p", "scripts.checks.conformance_plugin", f"--accelerate={kind}"]
    command += ["--continue-on-collection-errors", f"--junitxml={written}"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    ends = 60 * options.minutes
    try:
        subprocess.run(command, cwd=place, env=environment, capture_output=True, timeout=ends, check=False)
    except subprocess.TimeoutExpired:
        print(f"{folder.name}, {kind}: ended after {options.minutes:g} minutes", flush=True)
    return read(written) if written.exists() else {}


def read(file: Path) -> Outcomes:
    """Read pytest's XML: the outcome of each test that ran, and its error."""
    found = {}
    for case in ElementTree.parse(file).iter("testcase"):
        wrong = next((item for item in case if item.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if wrong is None else "skipped" if wrong.tag == "skipped" else "failed"
        error = "" if wrong is None else f"{wrong.get('message', '')}\n{wrong.text}"
        found[f"{case.get('classname')}::{case.get('name')}"] = (outcome, error)
    return found


def compared(plain: Outcomes, by_kind: dict[str, Outcomes]) -> dict[str, Any]:
    """Counts of one family: tests that ran and passed plainly, of these the ones that pass with each kind; and the
    tests that do not.
    """
    passed = [test for test, (outcome, _) in plain.items() if outcome == "passed"]
    counts: dict[str, Any] = {"ran": sum(outcome != "skipped" for outcome, _ in plain.values()), "passed": len(passed)}
    only = []
    for kind, found in by_kind.items():
        lost = ("failed", "the process ended without a result")
        wrong = {test: found.get(test, lost)[1] for test in passed if found.get(test, lost)[0] != "passed"}
        counts[kind] = len(passed) - len(wrong)
        only += [
            {"test": test, "kind": kind, "class": class_of(error, kind), "reason": error.partition("\n")[0]}
            for test, error in wrong.items()
        ]
    return counts | {"only": only}


def class_of(error: str, kind: str) -> str:
    """Return refused, values or failure."""
    if "dit_accel.errors" in error:
        return "refused"
    return "values" if kind != "exact" and error.startswith("AssertionError") else "failure"


def markdown(document: dict[str, Any]) -> str:
    """Table of the families, and of the tests that pass only plainly."""
    families, run = document["families"], document["run"]
    kinds = list(dict.fromkeys(key for found in families.values() for key in found if key in COUNTS))
    lines = [f"diffusers {run['diffusers']}, torch {run['torch']}, {run['device']}.", ""]
    lines += [f"| family | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|"]
    total = {kind: sum(found.get(kind, 0) for found in families.values()) for kind in kinds}
    for family, found in (families | {"all": total}).items():
        lines.append(f"| {family} | {' | '.join(str(found.get(kind, '')) for kind in kinds)} |")
    lines += ["", "| test | kind | class | reason |", "|---|---|---|---|"]
    for item in (item for found in families.values() for item in found["only"]):
        reason = str(item["reason"]).replace("|", "\\|")
        lines.append(f"| `{item['test']}` | {item['kind']} | {item['class']} | {reason} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of a checkout of diffusers")
    parser.add_argument("--output", type=Path, required=True, help="stem of the JSON and Markdown files")
    parser.add_argument("--families", nargs="+", help="folders of tests/pipelines; all by default")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--minutes", type=float, default=30.0, help="time limit of one process")
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel processes")
    options = parser.parse_args(arguments)
    options.checkout = options.checkout.resolve()
    known = families_of(options.checkout)
    if unknown := sorted(set(options.families or ()) - set(known)):
        raise SystemExit(f"--families names {', '.join(unknown)}, and the checkout has {', '.join(known)}")
    written = options.output.with_suffix(".json")
    document = json.loads(written.read_text()) if written.exists() else {"families": {}}
    document["run"] = describe_run("cpu")
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(options.jobs) as pool:
        stand_ins.write(Path(place))
        for family in options.families or known:
            folder = known[family]
            ran = [pool.submit(outcomes, folder, kind, options, Path(place)) for kind in (PLAIN, *options.kinds)]
            plain, *others = (item.result() for item in ran)
            found = compared(plain, dict(zip(options.kinds, others, strict=True)))
            document["families"][family] = found
            print(family, {key: count for key, count in found.items() if key != "only"}, flush=True)
            written.write_text(as_json(document))
            write_table(options.output.with_suffix(".md"), markdown(document))
    failures = [item for found in document["families"].values() for item in found["only"] if item["class"] == "failure"]
    print(f"{len(failures)} failures only when accelerated")


if __name__ == "__main__":
    main()
