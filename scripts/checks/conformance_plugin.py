"""Pytest plugin that accelerates every pipeline of a test before its first call, for `conformance.py`.

    python -m pytest -p scripts.checks.conformance_plugin --accelerate exact tests/…

The pipeline stays accelerated, as in users' code. Pipelines that ``accelerate_pipeline`` refuses run plainly. Each
test's properties name the classes of its pipelines, those that ran plainly with the reason, and the forecast steps.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
from diffusers import DiffusionPipeline

from dit_accel import Preset, accelerate_pipeline, load_preset
from dit_accel.errors import DitAccelError, UnsupportedError
from dit_accel.models.families import family_of

EVERY_SECOND = {"control": "interval", "warmup": 0, "interval": 2, "cooldown": 0}  # tests run two or three steps
FORECAST = {"level": "output", "method": "newton", "order": 1}
FLASHOMNI = {"flux": "flux-flashomni-paper", "hunyuan_video": "hunyuan-flashomni-paper", "wan": "wan21-flashomni"}
KINDS = ("exact", "balanced", "forecast", "flashomni")


def preset_of(pipe: Any, kind: str) -> Preset | str:
    """Return the preset of a kind: `forecast` computes every second step, and so does `flashomni`, inside the blocks.

    Raises:
        UnsupportedError: no preset of this kind fits the pipeline.
    """
    if kind == "forecast":
        return load_preset("balanced", schedule=EVERY_SECOND, forecast=FORECAST)
    if kind == "flashomni":
        family = family_of(pipe)
        if family not in FLASHOMNI:
            raise UnsupportedError(f"no FlashOmni preset fits; families with one: {', '.join(FLASHOMNI)}")
        return load_preset(FLASHOMNI[family], schedule=EVERY_SECOND, blocks={"size": 64})
    return kind


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accelerate", choices=["plain", *KINDS], default="plain")


def pytest_configure(config: pytest.Config) -> None:
    if (kind := config.getoption("accelerate")) != "plain":
        config.pluginmanager.register(Accelerating(kind))


class Accelerating:
    """Routes the calls of every pipeline class through :meth:`_call`, starting with its first instance."""

    def __init__(self, kind: str) -> None:
        self._kind, self._patch, self._notes = kind, pytest.MonkeyPatch(), {}
        register, plugin = DiffusionPipeline.register_modules, self

        def register_modules(pipe: Any, **modules: Any) -> None:
            call = type(pipe).__call__
            if not hasattr(call, "accelerates"):

                @functools.wraps(call)
                def accelerating(pipe: Any, *args: Any, **kwargs: Any) -> Any:
                    return plugin._call(call, pipe, *args, **kwargs)

                accelerating.accelerates = True
                plugin._patch.setattr(type(pipe), "__call__", accelerating)
            register(pipe, **modules)

        self._patch.setattr(DiffusionPipeline, "register_modules", register_modules)

    @pytest.fixture(autouse=True)
    def noted(self, record_property: Any) -> Any:
        self._notes = {}
        yield
        for name, note in self._notes.items():
            record_property(name, note)

    def pytest_unconfigure(self) -> None:
        self._patch.undo()

    def _call(self, call: Any, pipe: Any, *args: Any, **kwargs: Any) -> Any:
        name = type(pipe).__name__
        if "dit_accel" not in vars(pipe):
            try:
                accelerate_pipeline(pipe, preset_of(pipe, self._kind))
            except DitAccelError as error:
                self._notes[name] = str(error)
        output = call(pipe, *args, **kwargs)
        if "dit_accel" in vars(pipe):
            with warnings.catch_warnings(action="ignore"):
                steps = pipe.dit_accel.report().steps
            self._notes[name] = f"accelerated, {sum(step.mode == 'dispatch' for step in steps)} forecast steps"
        return output
