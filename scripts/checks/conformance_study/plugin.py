"""Pytest plugin that accelerates every pipeline or autoencoder of a test, and records the outcome of each test.

    python -m pytest -p scripts.checks.conformance_study.plugin --conformance-kind exact \
        --conformance-record found.jsonl tests/…

A pipeline is accelerated before its first call and stays accelerated, as in users' code. Pipelines that
``accelerate_pipeline`` refuses run plainly, and the record says why. With the kind ``autoencoders`` every autoencoder
decodes with the reference code of fused kernels, and the record says why if none of a test did. The kind ``plain`` only
records.
"""

from __future__ import annotations

import functools
import json
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
from diffusers import DiffusionPipeline

from dit_accel.errors import DitAccelError, shortened
from dit_accel.models.call_facts import CallReader
from dit_accel.stages.decode import FUSED, FusedDecode
from dit_accel.stages.vae import PAGES
from scripts.checks.conformance_study.kinds import AUTOENCODERS, KINDS, accelerate, cuts_padding, found, fuses_kernels


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--conformance-kind", choices=["plain", *KINDS, AUTOENCODERS], default="plain")
    group.addoption("--conformance-record", type=Path, help="file with one JSON object per test")
    group.addoption("--conformance-seconds", type=float, default=120.0, help="time limit of a test")


def pytest_configure(config: pytest.Config) -> None:
    if record := config.getoption("conformance_record"):
        config.pluginmanager.register(
            Study(config.getoption("conformance_kind"), record, config.getoption("conformance_seconds"))
        )


class Study:
    """State and findings of one process.

    Args:
        kind: kind of acceleration.
        record: file that gets a line when the tests are collected, and one for each test.
        seconds: time limit of a test.
    """

    def __init__(self, kind: str, record: Path, seconds: float) -> None:
        self._kind, self._record, self._seconds = kind, record, seconds
        self._test: dict[str, Any] = {}
        self._changed: list[tuple[type, str, Any]] = []  # classes, attribute names and original values
        if kind in KINDS:
            self._watch()
        if kind == AUTOENCODERS:
            for name in PAGES:
                self._fuse_decoders(getattr(diffusers, name))
        if kind == "fused":
            self._replace(CallReader, "fuses_kernels", fuses_kernels)
            self._replace(CallReader, "cuts_padding", cuts_padding)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write({"collected": [item.nodeid for item in session.items]})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # a file that can't be imported counts as one test
            reason = str(report.longrepr).strip().splitlines()[-1].removeprefix("E").strip()
            failed = {"test": report.nodeid, "outcome": "failed", "class": "crash", "reason": shortened(reason)}
            self._write({**failed, "pipelines": {}, "forecast": 0})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._test = {"test": item.nodeid, "outcome": "passed", "pipelines": {}, "forecast": 0}
        signal.signal(signal.SIGALRM, _give_up)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._write(self._test)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[Any]:
        report = yield
        if report.outcome != "passed":
            self._test["outcome"] = report.outcome
        if report.skipped and isinstance(report.longrepr, tuple):
            self._test["reason"] = shortened(report.longrepr[-1])
        if report.failed and call.excinfo is not None:
            error = call.excinfo.value
            line = next(iter(str(error).strip().splitlines()), "") or str(call.excinfo.traceback[-1].statement)
            self._test["class"] = found(error, str(call.excinfo.traceback[-1].statement), self._kind)
            self._test["reason"] = shortened(f"{type(error).__name__}: {line.strip()}")
        return report

    def pytest_unconfigure(self) -> None:
        for changed, name, original in reversed(self._changed):
            setattr(changed, name, original)

    def _watch(self) -> None:
        """Route the calls of every pipeline class through :meth:`_call`, starting with its first instance."""
        register, study = DiffusionPipeline.register_modules, self

        def register_modules(pipe: Any, **modules: Any) -> None:
            call = type(pipe).__call__
            if not hasattr(call, "accelerates"):

                @functools.wraps(call)
                def accelerating(pipe: Any, *args: Any, **kwargs: Any) -> Any:
                    return study._call(call, pipe, *args, **kwargs)

                accelerating.accelerates = True
                study._replace(type(pipe), "__call__", accelerating)
            register(pipe, **modules)

        self._replace(DiffusionPipeline, "register_modules", register_modules)

    def _fuse_decoders(self, kind: type) -> None:
        """Fuse the decoder of each autoencoder of a class, and record how it decodes."""
        init, study = kind.__init__, self

        class Recording(FusedDecode):
            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, value)
                if name == "remark" and value is not None:
                    classes = study._test["pipelines"]
                    if classes.get(kind.__name__, "") is not None:  # None = it has decoded with them
                        classes[kind.__name__] = None if value == FUSED else value

        @functools.wraps(init)
        def fusing(autoencoder: Any, *args: Any, **kwargs: Any) -> None:
            init(autoencoder, *args, **kwargs)
            # As from_pretrained does. In training mode fewer decodes would be fused, and tests that compare such an
            # autoencoder with a loaded one in half precision would see that the two round differently.
            autoencoder.decoder.eval()
            Recording(autoencoder, "reference")

        self._replace(kind, "__init__", fusing)

    def _replace(self, changed: type, name: str, value: Any) -> None:
        self._changed.append((changed, name, getattr(changed, name)))
        setattr(changed, name, value)

    def _call(self, call: Any, pipe: Any, *args: Any, **kwargs: Any) -> Any:
        left_plain = None
        if "dit_accel" not in vars(pipe):
            try:
                accelerate(pipe, self._kind)
            except DitAccelError as error:
                left_plain = str(error)
        self._test["pipelines"][type(pipe).__name__] = left_plain
        output = call(pipe, *args, **kwargs)
        if left_plain is None and "dit_accel" in vars(pipe):
            with warnings.catch_warnings(action="ignore"):
                report = pipe.dit_accel.report()
            self._test["forecast"] += sum(step.mode == "dispatch" for step in report.steps)
        return output

    def _write(self, line: dict[str, Any]) -> None:
        with self._record.open("a") as record:
            record.write(json.dumps(line) + "\n")


def _give_up(*_: Any) -> None:
    raise TimeoutError("the test took too long")
