"""Pipelines of SGLang's and vLLM-Omni's diffusers backends are accelerated where the engine loads them.

Stubs stand for the engines: the places of SGLang 0.5.23 and vLLM-Omni 0.30.0 that the hooks use.
"""

import sys
import tomllib
from enum import Enum
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from dit_accel.errors import UnsupportedError
from dit_accel.serving import engines
from tests.tiny import tiny_inputs, tiny_pipeline

ROOT = Path(__file__).parents[2]


@pytest.fixture
def sglang(monkeypatch):
    """Hooks registered in a stub of SGLang's registry, by target."""
    hooks, stub = {}, ModuleType("plugins")
    stub.HookType = Enum("HookType", ["BEFORE", "AFTER"])

    class HookRegistry:
        @staticmethod
        def register(target, hook, hook_type):
            assert hook_type is stub.HookType.AFTER
            hooks[target.removeprefix(f"{engines.SGLANG}.")] = hook

    stub.HookRegistry = HookRegistry
    monkeypatch.setitem(sys.modules, "sglang.multimodal_gen.runtime.platforms.plugins", stub)
    return hooks


def entry_point():
    """The function that SGLang finds in the metadata of the installed package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ((name, value),) = project["entry-points"]["sglang.multimodal_gen.plugins"].items()
    return EntryPoint(name, value, "sglang.multimodal_gen.plugins").load()


def generate(pipe):
    with torch.inference_mode():  # as vLLM-Omni calls it
        return pipe(**tiny_inputs("flux", steps=8))


def test_sglang_accelerates_what_it_loads(sglang, monkeypatch, caplog):
    """The hooks accelerate the backend's pipeline by the variable's preset, and log the report of each request."""
    monkeypatch.setenv("DIT_ACCEL_PRESET", "turbo")
    entry_point()()
    backend = SimpleNamespace(diffusers_pipe=tiny_pipeline("flux"))
    assert sglang["DiffusersPipeline.__init__"](None, backend, "folder", server_args=None) is None
    assert backend.diffusers_pipe.dit_accel.preset.name == "turbo"
    with caplog.at_level("INFO", logger=engines.__name__):
        output = generate(backend.diffusers_pipe)
        assert sglang["DiffusersExecutionStage.forward"](output, backend, None) is None, "SGLang keeps its own result"
    assert "steps              8" in caplog.text and backend.diffusers_pipe.dit_accel.report().computed_fraction < 1


def test_sglang_stays_plain_without_a_preset(sglang, monkeypatch):
    """An installed dit-accel changes nothing in a server that does not ask for it."""
    monkeypatch.delenv("DIT_ACCEL_PRESET", raising=False)
    entry_point()()
    assert sglang == {}


class OmniWorker:
    def __init__(self, model):
        self._model = model
        self.load_model(load_format="diffusers")

    def load_model(self, load_format):
        self.model_runner = SimpleNamespace(pipeline=self._model)

    def execute_model(self, request, config):
        return generate(self.model_runner.pipeline._pipeline)


Extended = type("Extended", (engines.VllmOmniWorker, OmniWorker), {})  # as vLLM-Omni makes its class


def test_vllm_omni_accelerates_what_it_loads(pipe, monkeypatch, caplog):
    """The worker accelerates the adapter's pipeline by `balanced` or the variable's preset, and logs each report."""
    monkeypatch.delenv("DIT_ACCEL_PRESET", raising=False)
    with caplog.at_level("INFO", logger=engines.__name__):
        Extended(SimpleNamespace(_pipeline=pipe)).execute_model(None, None)
    assert pipe.dit_accel.preset.name == "balanced"
    assert "steps              8" in caplog.text and pipe.dit_accel.report().computed_fraction < 1
    monkeypatch.setenv("DIT_ACCEL_PRESET", "exact")
    Extended(SimpleNamespace(_pipeline=pipe))
    assert pipe.dit_accel.preset.name == "exact"


def test_vllm_omni_native_pipelines_are_refused():
    """The error names the option that loads a pipeline of diffusers."""
    with pytest.raises(UnsupportedError, match="--diffusion-load-format diffusers"):
        Extended(torch.nn.Linear(1, 1))
