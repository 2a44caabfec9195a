#!/usr/bin/env python3
"""Run diffusers' own tests plainly and accelerated, and list the tests that pass only plainly.

Needs a checkout of diffusers for its ``tests`` folder; the installed diffusers is tested. Every pipeline that a test
calls is accelerated before its first call, in each of five kinds: the preset `exact`, the same with blocks `fused` as
on a GPU, `balanced` (a pipeline's default preset), `forecast` (every second step, at level `output`) and `flashomni`
(inside the blocks of every second step, if a preset exists). Kind `autoencoders` runs diffusers' tests of autoencoders
instead, and decodes with the reference code of fused kernels. Models from the Hub are replaced with small ones, unless
`--hub` asks for the Hub's own.

    git clone --depth 1 --branch v0.42.1 https://github.com/huggingface/diffusers
    python -m scripts.checks.conformance diffusers --output conformance
    python -m scripts.checks.conformance diffusers --output conformance --families flux wan --kinds exact forecast
    python -m scripts.checks.conformance diffusers --output conformance-autoencoders --kinds autoencoders

Writes STEM.json and STEM.md after each process; families that are already in the file are replaced, the others stay.
Both name each family of the checkout that has no result, and why: its tests need a package or a model of the Hub, its
pipelines have a UNet, or it was not run. The tests need the packages parameterized and requests-mock.
``conformance_study/kinds.py`` describes the classes of failures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dit_accel.stages.vae import PAGES
from dit_accel.tools.origin import describe_run
from scripts.checks.conformance_study import stand_ins
from scripts.checks.conformance_study.kinds import AUTOENCODERS, FAILURES, KINDS
from scripts.checks.conformance_study.report import Test, left_out, markdown, read, summary
from scripts.tables import write_table

ROOT = Path(__file__).parents[2]
PIPELINES, MODELS = "tests/pipelines", "tests/models/autoencoders"
PLAIN = "plain"


def families_of(checkout: Path, kinds: list[str]) -> dict[str, str]:
    """Paths of a checkout's tests by family: a folder of pipelines, or an autoencoder's class."""
    place = MODELS if AUTOENCODERS in kinds else PIPELINES
    if not (checkout / place).is_dir():
        raise SystemExit(f"checkout must hold {place}, as one of diffusers does; {checkout} does not")
    if place == PIPELINES:
        return {path.parent.name: str(path.parent.relative_to(checkout)) for path in _tests(checkout / place, "*/")}
    texts = {str(path.relative_to(checkout)): path.read_text() for path in _tests(checkout / place)}
    return {name: file for name in PAGES for file, text in texts.items() if re.search(rf"\b{name}\b", text)}


def _tests(folder: Path, below: str = "") -> list[Path]:
    return sorted(folder.glob(f"{below}test_*.py"))


def tests_of(families: dict[str, str], kind: str, options: argparse.Namespace, folder: Path) -> dict[str, Test]:
    """Run the tests of some families in their own process.

    Args:
        families: paths of the tests by family.
        folder: working directory, which holds the replacement models.

    Returns:
        The plugin's record of each test, by test id.
    """
    record = folder / f"{next(iter(families))}-{kind}.jsonl"
    command = [sys.executable, "-m", "pytest", *(str(options.checkout / path) for path in families.values())]
    command += [f"--rootdir={options.checkout}", "-q", "--continue-on-collection-errors"]
    command += ["-p", "no:cacheprovider", "-p", "scripts.checks.conformance_study.plugin"]
    command += [f"--conformance-kind={kind}", f"--conformance-record={record}"]
    command += [f"--conformance-seconds={options.seconds}", *(["-k", options.only] if options.only else [])]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if not options.hub:
        environment["HF_HUB_OFFLINE"] = "1"
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60 * options.minutes
        )
        ending = (done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""])[-1]
    except subprocess.TimeoutExpired:
        ending = f"ended after {options.minutes:g} minutes"
    print(f"{time.monotonic() - started:5.0f} s  {', '.join(families)}, {kind}: {ending}", flush=True)
    return read(record)


def _below(path: str, tests: dict[str, Test]) -> dict[str, Test]:
    return {test: told for test, told in tests.items() if test.startswith((f"{path}/", f"{path}::"))}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of a checkout of diffusers")
    parser.add_argument("--output", type=Path, required=True, help="stem of the JSON and Markdown files")
    parser.add_argument("--families", nargs="+", help="folders of tests/pipelines, or classes; all by default")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, AUTOENCODERS], default=list(KINDS))
    parser.add_argument("--only", help="expression of pytest's -k, which chooses among the tests")
    parser.add_argument("--tests", default="the checkout", help="origin of the tests, for the table")
    parser.add_argument("--hub", action="store_true", help="load the tests' models from the Hub")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of one test")
    parser.add_argument("--together", type=int, default=1, help="families whose tests run in one process")
    parser.add_argument("--minutes", type=float, default=30.0, help="time limit of one process")
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel processes")
    options = parser.parse_args(arguments)
    options.checkout = options.checkout.resolve()
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if AUTOENCODERS in options.kinds and len(options.kinds) > 1:
        raise SystemExit(f"--kinds {AUTOENCODERS} runs other tests than the other kinds, so it must be the only one")
    known = families_of(options.checkout, options.kinds)
    unknown = sorted(set(options.families or ()) - set(known))
    if unknown:
        raise SystemExit(f"--families names {', '.join(unknown)}, and the checkout has {', '.join(known)}")
    written = options.output.with_suffix(".json")
    families = json.loads(written.read_text())["families"] if written.exists() else {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        if not options.hub:
            stand_ins.write(Path(folder))
        wanted = options.families or list(known)
        for start in range(0, len(wanted), options.together):
            named = {family: known[family] for family in wanted[start : start + options.together]}
            kinds = [PLAIN, *options.kinds]
            found = pool.map(lambda kind, named=named: tests_of(named, kind, options, Path(folder)), kinds)
            tests = dict(zip(kinds, found, strict=True))
            for family, path in named.items():
                own = {kind: _below(path, each) for kind, each in tests.items()}
                chosen = {"chosen": options.only} if options.only else {}
                families[family] = chosen | summary(own.pop(PLAIN), own)
            told = {"run": describe_run("cpu"), "tests": options.tests}
            not_run = sorted(set(known) - set(families))
            document = {**told, "families": dict(sorted(families.items())), "not_run": not_run}
            written.write_text(json.dumps(document, indent=1) + "\n")
            write_table(options.output.with_suffix(".md"), markdown(document))
    failures = [each for family in families.values() for each in family["only"] if each["class"] in FAILURES]
    for family, why in left_out(document).items():
        print(f"{family}: {why}")
    print(f"{len(failures)} failures only when accelerated")


if __name__ == "__main__":
    main()
