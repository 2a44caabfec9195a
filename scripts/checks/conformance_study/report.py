"""Count the processes' records by file and kind, and format them as Markdown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.checks.conformance_study.kinds import APART, AUTOENCODERS, FAILURES, KINDS

Test = dict[str, Any]


def read(record: Path) -> dict[str, Test]:
    """Tests of one process by id; collected tests without a result are lost."""
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    tests = {line["test"]: line for line in lines if "test" in line}
    for test in (test for line in lines for test in line.get("collected", ())):
        if test not in tests:
            lost = {"class": "lost", "reason": "the process ended without a result"}
            tests[test] = {"test": test, "outcome": "failed", "pipelines": {}, "forecast": 0, **lost}
    return tests


def summary(plain: dict[str, Test], by_kind: dict[str, dict[str, Test]]) -> dict[str, Any]:
    """Summarise one family: tests by file, tests that fail only when accelerated, and outcomes of pipelines.

    Returns:
        ``files``: for each file the tests that ran plainly (``ran``), that passed plainly (``passed``), and the passed
        ones that also pass with each kind; ``only``: tests that pass plainly and fail with a kind; ``accelerated``: by
        kind the numbers of tests with an accelerated pipeline and with a forecast step, and the plain pipelines with
        reasons; ``idle``: why no test says anything, or None.
    """
    passed = {test for test, told in plain.items() if told["outcome"] == "passed"}
    files = {}
    for file in sorted({_file(test) for test in plain}):
        ran = [test for test, told in plain.items() if _file(test) == file and told["outcome"] != "skipped"]
        counts = {"ran": len(ran), "passed": sum(test in passed for test in ran)}
        for kind, tests in by_kind.items():
            counts[kind] = sum(test in passed and _outcome(tests, test) == "passed" for test in ran)
        files[file] = counts
    only = [
        {"test": test, "kind": kind, "class": tests[test].get("class", "crash"), "reason": tests[test].get("reason")}
        for kind, tests in by_kind.items()
        for test in tests
        if test in passed and _outcome(tests, test) == "failed"
    ]
    accelerated = {kind: _accelerated(tests.values()) for kind, tests in by_kind.items()}
    return {"files": files, "only": only, "accelerated": accelerated, "idle": _why_idle(plain, passed, by_kind)}


def _why_idle(plain: dict[str, Test], passed: set[str], by_kind: dict[str, dict[str, Test]]) -> str | None:
    """Return why no test of a family compares an accelerated pipeline with the plain one, or None."""
    if not plain:
        return "no test was collected"
    called = [(test, why) for tests in by_kind.values() for test in tests for why in tests[test]["pipelines"].values()]
    if any(test in passed for test, why in called if why is None):
        return None
    if reasons := [why for _, why in called if why is not None]:
        return reasons[0]
    for outcome in ("failed", "skipped"):
        if reasons := [told.get("reason", outcome) for told in plain.values() if told["outcome"] == outcome]:
            return f"no test of a pipeline passes plainly: {Counter(reasons).most_common(1)[0][0]}"
    return "no test calls a pipeline"


def left_out(document: dict[str, Any]) -> dict[str, str]:
    """Families of which no test says anything, with the reasons."""
    idle = {name: why for name, found in document["families"].items() if (why := found.get("idle"))}
    return idle | dict.fromkeys(document.get("not_run", ()), "not run")


def markdown(document: dict[str, Any]) -> str:
    """Tables of families, files, tests that fail only when accelerated, and pipelines that ran plainly."""
    run, kinds = document["run"], _kinds(document)
    parts = [
        f"diffusers {run['diffusers']}, tests of {document['tests']}, torch {run['torch']}, {run['device']}.",
        _table(_totals(document, kinds), ["family", "ran", "passed plainly", *kinds, *FAILURES, *APART]),
        *_chosen(document),
        "## Families without a result",
        _table([[*row] for row in left_out(document).items()], ["family", "why"]),
        "## By file",
        _table(_by_file(document, kinds), ["file", "ran", "passed plainly", *kinds]),
        "## Tests that fail only when accelerated",
        _table(_only(document), ["test", "kinds", "class", "reason"]),
        "## Pipelines and autoencoders that ran plainly in a test",
        _table(_plain(document), ["kinds", "classes", "reason"]),
    ]
    return "\n\n".join(parts) + "\n"


def _kinds(document: dict[str, Any]) -> list[str]:
    """Kinds with which some family's tests ran."""
    ran = {kind for found in document["families"].values() for kind in found["accelerated"]}
    return [kind for kind in (*KINDS, AUTOENCODERS) if kind in ran]


def _chosen(document: dict[str, Any]) -> list[str]:
    """Sentences on families that ran only some of their tests."""
    families: dict[str, list[str]] = {}
    for family, found in document["families"].items():
        families.setdefault(found.get("chosen", ""), []).append(family)
    return [f'{", ".join(names)}: only tests that `-k "{only}"` chooses.' for only, names in families.items() if only]


def _totals(document: dict[str, Any], of_kinds: list[str]) -> list[list[Any]]:
    rows = []
    for family, found in document["families"].items():
        counts = sum((Counter(file) for file in found["files"].values()), Counter())
        classes = Counter(each["class"] for each in found["only"])
        kinds = [counts[kind] if kind in found["accelerated"] else "" for kind in of_kinds]
        rows.append([family, counts["ran"], counts["passed"], *kinds, *(classes[name] for name in (*FAILURES, *APART))])
    return [*rows, ["all", *(sum(filter(None, column)) for column in list(zip(*rows, strict=True))[1:])]]


def _by_file(document: dict[str, Any], kinds: list[str]) -> list[list[Any]]:
    return [
        [f"{family}/{Path(file).name}", counts["ran"], counts["passed"], *(counts.get(kind, "") for kind in kinds)]
        for family, found in document["families"].items()
        for file, counts in found["files"].items()
        if counts["passed"]
    ]


def _only(document: dict[str, Any]) -> list[list[str]]:
    kinds: dict[tuple[str, str, str], list[str]] = {}
    order = [*FAILURES, *APART]
    for found in document["families"].values():
        for each in sorted(found["only"], key=lambda each: order.index(each["class"])):
            test = "::".join([Path(_file(each["test"])).name, *each["test"].split("::")[1:]])
            kinds.setdefault((test, each["class"], each["reason"]), []).append(each["kind"])
    return [[f"`{test}`", ", ".join(names), kind, reason] for (test, kind, reason), names in kinds.items()]


def _plain(document: dict[str, Any]) -> list[list[str]]:
    """Rows of reasons, each with its kinds and pipelines."""
    told: dict[str, tuple[list[str], list[str]]] = {}
    for found in document["families"].values():
        for kind, each in found["accelerated"].items():
            for pipeline, reason in each["left_plain"].items():
                kinds, pipelines = told.setdefault(reason, ([], []))
                kinds.append(kind)
                pipelines.append(pipeline)
    return [
        [", ".join(dict.fromkeys(each)) for each in (kinds, pipelines)] + [why]
        for why, (kinds, pipelines) in told.items()
    ]


def _accelerated(tests: Iterable[Test]) -> dict[str, Any]:
    tests = list(tests)
    left_plain = {name: why for test in tests for name, why in test["pipelines"].items() if why}
    return {
        "tests": sum(any(why is None for why in test["pipelines"].values()) for test in tests),
        "tests_with_forecasts": sum(test["forecast"] > 0 for test in tests),
        "left_plain": left_plain,
    }


def _file(test: str) -> str:
    return test.partition("::")[0]


def _outcome(tests: dict[str, Test], test: str) -> str:
    return tests[test]["outcome"] if test in tests else "failed"


def _table(rows: list[list[Any]], head: list[str]) -> str:
    if not rows:
        return "None."
    lines = [head, ["---"] * len(head), *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
