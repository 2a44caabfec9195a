"""Shared fixtures. Without a GPU Triton kernels run in its interpreter, chosen here before triton is imported."""

import functools
import gc
import os
import sys
from pathlib import Path

import pytest

if sys.dont_write_bytecode and "PYTHONPYCACHEPREFIX" not in os.environ:
    # Each process that a test starts would compile torch and diffusers again, which takes longer than most tests.
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parents[1] / ".pytest_cache/bytecode")
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import torch

from tests.triton_interpreter import spare_repetition

gc.disable()  # until the tests are collected: nothing of what imports make is garbage
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    spare_repetition()


# Tests of what changes seldom: what a release ships besides the library, and the tiny pipelines of the other tests.
# They run with --release, or if a command names them.
RELEASE = [
    Path(__file__).parent / name
    for name in ("scripts", "test_examples.py", "test_packaging.py", "test_site.py", "test_tiny.py")
]
AT_EACH_CHANGE = Path(__file__).parent / "scripts/test_mutants.py"  # names code that changes


def pytest_addoption(parser):
    parser.addoption("--release", action="store_true", help="also run tests of what changes seldom")


def pytest_configure(config):
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    config.option.release |= any(path in (item, *item.parents) for item in named for path in RELEASE)
    for of_schedulers in ("__array__ implementation doesn't accept a copy", "__array_wrap__ must accept context"):
        config.addinivalue_line("filterwarnings", f"ignore:{of_schedulers}:DeprecationWarning")


def pytest_ignore_collect(collection_path, config):
    """Leave out the tests of a release."""
    if config.option.release or collection_path in (RELEASE[0], AT_EACH_CHANGE):
        return None
    return True if any(path in (collection_path, *collection_path.parents) for path in RELEASE) else None


# Fixtures of these start several processes. Workers share the last tests among them, so each would start its own.
FIRST = ("tests/test_parallel.py", "tests/stages/test_sharing.py", "tests/test_site.py")


def pytest_collection_modifyitems(items):
    """Run tests with costly fixtures first, where one worker has them all."""
    items.sort(key=lambda item: item.location[0] not in FIRST)


def pytest_collection_finish():
    """Collect garbage from here on, but look only at objects that tests make: a fifth of their time otherwise."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def shared_pipelines_stay_as_they_are():
    """No test changes what another one gets."""
    yield
    if (tiny := sys.modules.get("tests.models.tiny")) is not None:
        tiny.require_unchanged()


@pytest.fixture
def own_attention_backend():
    """Restore ``set_attention_backend``, whose setting is global to the process."""
    from diffusers.models.attention_dispatch import attention_backend

    with attention_backend("native"):
        yield


@pytest.fixture
def graph(monkeypatch):
    """Class of faked graphs that steps then use, with counts that other tests do not see."""
    from dit_accel.models import transformer
    from dit_accel.models.graphs.step_graphs import StepGraphs
    from tests.models.fake_graph import RecordedGraph

    counted = type("CountedGraph", (RecordedGraph,), {})
    monkeypatch.setattr(transformer, "StepGraphs", functools.partial(StepGraphs, graph=counted))
    return counted


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs dit-accel with arguments, inside an empty folder."""
    from typer.testing import CliRunner

    from dit_accel.cli import app

    monkeypatch.chdir(tmp_path)

    def invoke(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})

    return invoke


@pytest.fixture
def pipe():
    """A tiny FLUX pipeline of the test's own."""
    from tests.tiny import tiny_pipeline

    return tiny_pipeline("flux")


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Folders of saved tiny pipelines, by their names."""
    from tests.tiny import tiny_pipeline

    root = tmp_path_factory.mktemp("models")

    @functools.cache
    def save(name):
        tiny_pipeline(name).save_pretrained(root / name)
        return root / name

    return save
