"""The wheels have the checkout's code and presets without demo models, and run after installation."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_bytes
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from readme_renderer import markdown

import dit_accel
from dit_accel.tools.demo import DEMOS

ROOT = Path(__file__).parent.parent
MEGABYTE = 1_000_000
ASSETS = "dit_accel/tools/assets"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the wheels and the source archive of this checkout, built without downloading anything."""
    folder = tmp_path_factory.mktemp("dist")
    for place, targets in ((ROOT, ()), (ROOT / "demos", ("-t", "wheel"))):
        command = [sys.executable, "-m", "hatchling", "build", "-d", folder, *targets]
        result = subprocess.run(command, cwd=place, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    return folder


def opened(built, pattern):
    (path,) = built.glob(pattern)
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def wheel(built):
    """The library's wheel."""
    with opened(built, "dit_accel-*.whl") as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel):
    """Metadata that a package index reads."""
    (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(wheel.read(path))


def _files(folder: str) -> set[str]:
    """Files below ``folder`` of the checkout, as paths from it."""
    paths = (path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*") if path.is_file())
    return {path.as_posix() for path in paths if "__pycache__" not in path.parts}


def test_wheel_holds_every_preset(wheel):
    presets = _files("configs")
    assert "balanced.yaml" in presets
    for name in presets:
        assert wheel.read(f"dit_accel/presets/configs/{name}") == (ROOT / "configs" / name).read_bytes()


def test_wheel_holds_the_package_without_demo_models(wheel, built):
    """The wheel has every file of the package except the models, and nothing but package and presets."""
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = {f"dit_accel/{name}" for name in _files("dit_accel")}
    package = {name for name in package if not name.startswith(f"{ASSETS}/demo-")}
    assert names == package | {f"dit_accel/presets/configs/{name}" for name in _files("configs")}
    assert f"{ASSETS}/prompts.txt" in names
    (path,) = built.glob("dit_accel-*.whl")
    assert path.stat().st_size < 12 * MEGABYTE


def test_wheel_of_demo_models_holds_all_of_them(built):
    """dit_accel/tools/assets/ of the checkout is dit_accel_demos/ there, byte for byte, and fits every index."""
    with opened(built, "dit_accel_demos-*.whl") as archive:
        names = {name.removeprefix("dit_accel_demos/") for name in archive.namelist() if ".dist-info/" not in name}
        models = {name for name in _files(ASSETS) if name.startswith("demo-")}
        assert names == models | {"__init__.py", "LICENSE"}
        for name in models:
            assert archive.read(f"dit_accel_demos/{name}") == (ROOT / ASSETS / name).read_bytes()
    assert {name.split("/")[0] for name in models} == set(DEMOS)
    (path,) = built.glob("dit_accel_demos-*.whl")
    assert path.stat().st_size < 100 * MEGABYTE


def test_source_archive_builds_and_tests(built):
    """The archive has code, presets, tests and their data, but not the demo models, which would be most of it."""
    (path,) = built.glob("dit_accel-*.tar.gz")
    assert path.stat().st_size < 20 * MEGABYTE
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    wanted = {"pyproject.toml", "README.md", "LICENSE", "constraints.txt", "configs/balanced.yaml", "tests/conftest.py"}
    assert wanted <= names and "integrations/comfyui/__init__.py" in names
    assert not any(name.startswith(f"{ASSETS}/demo-") for name in names)


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory):
    """Run commands in a fresh environment with the library's wheel and this environment's dependencies."""
    place = tmp_path_factory.mktemp("fresh")
    venv.create(place)
    (packages,) = place.glob("lib/python*/site-packages")
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n", encoding="utf-8")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def install(pattern):
        (wheel,) = built.glob(pattern)
        options = ["install", "--quiet", "--no-deps", "--no-index"]
        command = [sys.executable, "-m", "pip", "--python", place, *options, wheel]
        subprocess.run(command, check=True, env=clean, cwd=place)

    def run(command, *arguments):
        line = [place / "bin" / command, *arguments]
        return subprocess.run(line, cwd=place, env=clean, capture_output=True, text=True)

    install("dit_accel-*.whl")
    run.install = install
    return run


def test_an_installed_wheel_runs(environment):
    """Presets are found; the command says how to install the demo models, and then finds them."""
    listed = environment("dit-accel", "presets", "list")
    assert listed.returncode == 0 and "balanced" in listed.stdout, listed.stderr
    failed = environment("dit-accel", "generate", "--prompt", "a yellow ring")
    assert failed.returncode != 0 and "Traceback" not in failed.stderr
    assert "demo-flux is not installed: pip install -e . in a checkout" in " ".join(failed.stderr.split())
    environment.install("dit_accel_demos-*.whl")
    code = "from dit_accel.tools.demo import demo_names, demo_path; print(*map(demo_path, demo_names()), sep='\\n')"
    found = environment("python", "-c", code).stdout.splitlines()
    assert [Path(path).name for path in found] == sorted(DEMOS)
    assert {Path(path).parent.name for path in found} == {"dit_accel_demos"}


def test_wheel_installs_the_command(wheel):
    """The `dit-accel` script, the licence, the version, which the changelog has too, and the marker of types."""
    (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    assert info == f"dit_accel-{dit_accel.__version__}.dist-info"
    assert "dit-accel = dit_accel.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert "Apache License" in wheel.read(f"{info}/licenses/LICENSE").decode()
    assert f"## [{dit_accel.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "dit_accel/py.typed" in wheel.namelist()


def test_extras_hold_what_only_some_tools_need(metadata):
    """matplotlib and imageio-ffmpeg come with `[plots]`, `[video]`, `[all]` and `[dev]`, and not otherwise."""
    assert {"plots", "video", "all", "dev"} <= set(metadata.get_all("Provides-Extra"))
    extras = {package: set() for package in ("matplotlib", "imageio-ffmpeg")}
    for requirement in metadata.get_all("Requires-Dist"):
        what, _, condition = requirement.partition(";")
        for package, held_by in extras.items():
            if what.startswith((f"{package}>", f"{package} ")):
                held_by.add(condition.strip())
    for package, extra in (("matplotlib", "plots"), ("imageio-ffmpeg", "video")):
        assert f"extra == '{extra}'" in extras[package] and "" not in extras[package]


def test_description_has_no_relative_link(metadata):
    """A package index shows the README as HTML without the repository: every link is a whole address of this tag."""
    description = metadata.get_payload(decode=True).decode()
    page = markdown.render(description)
    assert min(page.count(tag) for tag in ("<table", "<pre", "<img", "<h2")) >= 2
    assert re.findall(r'(?:src|href)="(?!https://|#)[^"]*"', page) == []
    repository = dict(url.split(", ") for url in metadata.get_all("Project-URL"))["Repository"]
    raw, tag = repository.replace("github.com", "raw.githubusercontent.com"), f"v{metadata['Version']}"
    for target in re.findall(r"\]\((?!https?:|#)([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        whole = f"{raw}/{tag}/{target}" if target.endswith((".png", ".gif")) else f"{repository}/blob/{tag}/{target}"
        assert f"]({whole})" in description


def test_the_release_builds_what_the_extra_names():
    """The extra `demos` takes the version in demos/, and the workflow builds, tries and uploads both distributions.

    Before it uploads them, a small model of every transformer class runs.
    """
    demos = tomllib.loads((ROOT / "demos" / "pyproject.toml").read_text())["project"]
    (wanted,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["demos"]
    requirement = Requirement(wanted)
    assert requirement.name == demos["name"] and requirement.specifier.contains(demos["version"])
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    commands = "\n".join(step.get("run", "") for step in build["steps"])
    assert "dist/library ." in commands and "dist/demos demos" in commands and "twine check" in commands
    assert publish["needs"] == ["build", "test", "classes"] and publish["permissions"] == {"id-token": "write"}
    assert any("scripts.checks.every_class" in step.get("run", "") for step in workflow["jobs"]["classes"]["steps"])
    assert any("scripts/test --release" in step.get("run", "") for step in workflow["jobs"]["test"]["steps"])
    uploaded = {step["with"]["packages-dir"] for step in publish["steps"] if "pypi-publish" in step["uses"]}
    assert uploaded == {"dist/library/", "dist/demos/"}


def test_every_requirement_is_pinned_for_the_scripts():
    """scripts/test and scripts/demo install exact versions: each requirement of pyproject.toml has its pin."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    del extras["app"], extras["demos"]  # which no script installs
    required = [*project["project"]["dependencies"], *project["build-system"]["requires"], *chain(*extras.values())]
    names = {re.match(r"[\w.-]+", requirement).group().lower() for requirement in required}
    names -= {"dit-accel"}  # extras of its own
    assert names <= _pins().keys()


def test_hooks_run_the_pinned_ruff_and_admit_the_demo_models():
    """A commit is checked as scripts/test checks it, and no file of the package is too large for the hooks."""
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (ruff,) = (item for item in repositories if item["repo"].endswith("/ruff-pre-commit"))
    assert ruff["rev"] == f"v{_pins()['ruff']}"
    hooks = {hook["id"]: hook for item in repositories for hook in item["hooks"]}
    (limit,) = hooks["check-added-large-files"]["args"]
    largest = max(path.stat().st_size for path in (ROOT / "dit_accel").rglob("*") if path.is_file())
    assert largest <= 1024 * int(limit.removeprefix("--maxkb="))


def _pins() -> dict[str, str]:
    """The versions in constraints.txt, by lower-case name."""
    pins = re.findall(r"^([\w.-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    return {name.lower(): version for name, version in pins}
