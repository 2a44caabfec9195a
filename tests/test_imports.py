"""Import rules: arrows have one direction, heavy packages stay in their place, and imports have no side effects."""

import ast
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import dit_accel

PACKAGE = Path(dit_accel.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# The packages of dit_accel; each imports only packages of an earlier line, or itself.
LAYERS = [
    {"constants", "errors"},
    {"presets", "kernels"},
    {"loop"},
    {"sparse"},
    {"models"},
    {"stages"},
    {"sla", "pipeline"},
    {"cache_config", "modular_block", "modular_call", "streaming"},
    {"tools"},
    {"serving"},
    {"cli"},
    {"__main__"},
]
RANK = {unit: rank for rank, units in enumerate(LAYERS) for unit in units}
MAY_IMPORT_DIFFUSERS = {"models", "stages", "pipeline", "cli", "serving", "tools"}
MAY_IMPORT_DIFFUSERS |= {"cache_config", "modular_block", "modular_call"}
# Beyond their rank: kernels take tensors and numbers, whatever preset or clock those came from.
KERNELS_MAY_IMPORT = {"errors", "kernels"}


class Import(NamedTuple):
    """One imported module, and whether that happens when the file is imported."""

    module: str
    at_import: bool


def unit_of(path: Path) -> str:
    """The top-level module or package that a file belongs to; empty for the package's own ``__init__``."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


@functools.cache
def imports(path: Path) -> list[Import]:
    """Every import of a file, at any depth; ``from package import name`` counts as ``package.name``."""

    def walk(node: ast.AST, at_import: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, at_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                yield from (Import(f"{child.module}.{alias.name}", at_import) for alias in child.names)
            else:
                typing = isinstance(child, ast.If) and not child.orelse and ast.unparse(child.test) == "TYPE_CHECKING"
                deferred = typing or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                yield from walk(child, at_import and not deferred)

    return list(walk(ast.parse(path.read_text(encoding="utf-8")), True))


def imported_units(path: Path) -> set[str]:
    """Top-level modules of dit_accel that a file imports; a public name counts as the module it lives in."""
    units = set()
    for module, _ in imports(path):
        package, *rest = module.split(".")
        if package == "dit_accel" and rest != ["__version__"]:
            first = rest[0] if rest else "pipeline"  # `import dit_accel` offers all public names
            units.add(dit_accel._HOMES.get(first, first).split(".")[0])
    return units


def module_of(path: Path) -> str:
    """The dotted name of a file, which for an ``__init__`` is its package's."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def packages(path: Path, *, at_import: bool = False) -> set[str]:
    """Top-level packages that a file imports anywhere, or when it is imported."""
    return {module.split(".")[0] for module, early in imports(path) if early or not at_import}


def wrong_arrows(path: Path) -> set[str]:
    """Modules of dit_accel that a file may not import: those at or below its own place in LAYERS."""
    unit, imported = unit_of(path), imported_units(path)
    if unit == "":  # the package's own __init__ imports nothing until a name is used
        return {module for module, at_import in imports(path) if at_import and module.startswith("dit_accel")}
    if unit == "kernels":
        return imported - KERNELS_MAY_IMPORT
    return {other for other in imported - {unit} if RANK[other] >= RANK[unit]}


def test_arrows_point_one_way():
    """A module imports only modules above it, or its own package."""
    assert {unit_of(path) for path in FILES} - {""} == RANK.keys(), "LAYERS names each module"
    assert {str(path): wrong for path in FILES if (wrong := wrong_arrows(path))} == {}


def test_kernels_stand_on_their_ground():
    """Implementations import no page of an op, and pages only those of their own room or of plans."""
    rooms, wrong = {"plans", "attention", "blocks", "decoder"}, set()
    for path in (path for path in FILES if unit_of(path) == "kernels" and path.parent.name != "kernels"):
        allowed = set() if path.parent.name.startswith("_") else {path.parent.name, "plans"}
        names = (module.split(".") for module, _ in imports(path) if module.startswith("dit_accel.kernels."))
        wrong |= {(module_of(path), parts[2]) for parts in names if parts[2] in rooms - allowed}
    assert wrong == set()


def test_no_circles():
    """No file imports itself through others; imports inside functions and for type checking count too."""
    modules, graph = {module_of(path): path for path in FILES}, {}
    for name, path in modules.items():
        # a name that is no file lives in the module before its last dot
        imported = {module if module in modules else module.rpartition(".")[0] for module, _ in imports(path)}
        graph[name] = imported & modules.keys() - {name}
    TopologicalSorter(graph).prepare()  # its error names the files of a circle


def test_heavy_packages_stay_where_they_belong():
    """Only code that drives diffusers imports it; functions import Triton and collectives, which torch may lack."""
    drives = [str(path) for path in FILES if packages(path) & {"diffusers", "transformers"}]
    assert [path for path in drives if unit_of(Path(path)) not in MAY_IMPORT_DIFFUSERS] == []
    others = [path for path in FILES if "_triton" not in path.parts]
    assert [str(path) for path in others if "triton" in packages(path, at_import=True)] == []
    lacking = ("torch.distributed._functional_collectives", "torch.distributed.distributed_c10d")
    early = {path.name for path in FILES for module, now in imports(path) if now and module.startswith(lacking)}
    assert early == {"collectives.py"}


def test_public_names_exist():
    """Every name that the package offers can be had, and others are refused with the list."""
    assert {name for name in dit_accel.__all__ if not hasattr(dit_accel, name)} == set()
    assert set(dir(dit_accel)) == set(dit_accel.__all__)
    with pytest.raises(AttributeError, match="no attribute 'acelerate'; it offers accelerate_pipeline"):
        dit_accel.acelerate  # noqa: B018


def test_type_checkers_see_the_public_names():
    seen = {module for module, at_import in imports(PACKAGE / "__init__.py") if not at_import}
    assert seen == {f"dit_accel.{home}.{name}" for name, home in dit_accel._HOMES.items()}


IMPORT_IN_STAGES = """
import importlib, json, sys, time

def stage(*modules):
    started = time.process_time()
    for module in modules:
        importlib.import_module(module)
    seconds = time.process_time() - started
    return {"seconds": seconds, "loaded": sorted(sys.modules)}

report = {"package": stage("dit_accel"), "kernels": stage("dit_accel.kernels")}
report["all"] = stage(*sys.argv[1:])
import torch
report["cuda"] = torch.cuda.is_initialized()
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """A fresh interpreter in an empty home that imports the package, its kernels, then every module."""
    home = tmp_path_factory.mktemp("home")
    modules = [module_of(path) for path in FILES if path.name != "__main__.py"]
    environment = os.environ | dict.fromkeys(("HOME", "TMPDIR"), str(home))
    environment |= {"PYTHONPATH": str(PACKAGE.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    for variable in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR", "HF_HOME", "TRITON_CACHE_DIR"):
        environment.pop(variable, None)
    command = [sys.executable, "-c", IMPORT_IN_STAGES, *modules]
    result = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    report["files"] = sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())
    return report


LIGHT = {  # by stage: packages that it must not load
    "package": {"torch", "diffusers", "transformers", "triton", "pydantic", "matplotlib"},
    "kernels": {"triton", "diffusers", "transformers"},
    "all": {"matplotlib", "imageio", "imageio_ffmpeg", "gradio"},  # functions import extras
}


def test_imports_are_light_and_leave_no_trace(stages):
    """``import dit_accel.kernels`` needs torch and compiles nothing; all modules together write no file."""
    for stage, packages in LIGHT.items():
        assert packages.isdisjoint(stages[stage]["loaded"]), stage
    assert stages["package"]["seconds"] < 0.5
    assert "torch" in stages["kernels"]["loaded"] and "diffusers" in stages["all"]["loaded"]
    assert not any("_triton" in name for name in stages["kernels"]["loaded"] if name.startswith("dit_accel"))
    assert stages["cuda"] is False and stages["files"] == []
