"""The wheel holds what the checkout runs on: code, presets and demo models."""

import re
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of this checkout, built without downloading anything."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run([*command, "--wheel-dir", folder, ROOT], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("dit_accel-*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel):
    """What a package index reads."""
    (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(wheel.read(path))


def _files(folder: str) -> set[str]:
    """Files below ``folder`` of the checkout, as paths from it."""
    paths = (path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*") if path.is_file())
    return {path.as_posix() for path in paths if "__pycache__" not in path.parts}


def test_wheel_holds_every_preset(wheel):
    """configs/ of the checkout is dit_accel/presets/configs/ of the wheel, byte for byte."""
    presets = _files("configs")
    assert "balanced.yaml" in presets
    for name in presets:
        assert wheel.read(f"dit_accel/presets/configs/{name}") == (ROOT / "configs" / name).read_bytes()


def test_wheel_holds_the_package_and_its_demo_models(wheel):
    """Every file of the package ships, weights of the demo model included, and nothing beside package and presets."""
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = {f"dit_accel/{name}" for name in _files("dit_accel")}
    assert names == package | {f"dit_accel/presets/configs/{name}" for name in _files("configs")}
    assert "dit_accel/tools/assets/demo-flux/model_index.json" in names
    assert any(name.startswith("dit_accel/tools/assets/demo-flux/") and name.endswith(".safetensors") for name in names)


def test_wheel_installs_the_command(wheel):
    """The `dit-accel` script, the licence and the version of the package are in the metadata."""
    import dit_accel

    (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    assert info == f"dit_accel-{dit_accel.__version__}.dist-info"
    assert "dit-accel = dit_accel.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert "Apache License" in wheel.read(f"{info}/licenses/LICENSE").decode()


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


def test_wheel_says_that_it_is_typed(wheel, metadata):
    """Type checkers read the annotations of an installed package that has the marker."""
    assert "dit_accel/py.typed" in wheel.namelist()
    assert "Typing :: Typed" in metadata.get_all("Classifier")


def test_description_has_no_relative_link(metadata):
    """A package index shows the README without the repository: every link is a whole address, of this version's tag."""
    description = metadata.get_payload(decode=True).decode()
    targets = re.findall(r"\]\(([^)]+)\)", description)
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", description)
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    assert pictures and "src=" not in description and "href=" not in description
    tag = f"v{metadata['Version']}"
    repository = dict(url.split(", ") for url in metadata.get_all("Project-URL"))["Repository"]
    raw = repository.replace("github.com", "raw.githubusercontent.com")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:|#)([^)]+)\)", readme):
        whole = f"{raw}/{tag}/{target}" if target.endswith(".png") else f"{repository}/blob/{tag}/{target}"
        assert whole in targets


def test_changelog_names_this_version():
    """CHANGELOG.md has a section for the version that is built."""
    import dit_accel

    assert f"## [{dit_accel.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_requirement_is_pinned_for_the_scripts():
    """scripts/test and scripts/demo install exact versions: each requirement of pyproject.toml has its pin."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    required = [
        *project["project"]["dependencies"],
        *extras["plots"],
        *extras["video"],
        *extras["docs"],
        *extras["dev"],
    ]
    required += project["build-system"]["requires"]
    names = {re.match(r"[\w.-]+", requirement).group().lower() for requirement in required}
    names -= {"dit-accel"}  # extras of its own
    assert names <= _pins().keys()


def test_hooks_run_the_pinned_ruff_and_admit_the_demo_models():
    """A commit is checked as scripts/test checks it, and no file of the package is too large for the hooks."""
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (ruff,) = (each for each in repositories if each["repo"].endswith("/ruff-pre-commit"))
    assert ruff["rev"] == f"v{_pins()['ruff']}"
    hooks = {hook["id"]: hook for each in repositories for hook in each["hooks"]}
    (limit,) = hooks["check-added-large-files"]["args"]
    largest = max(path.stat().st_size for path in (ROOT / "dit_accel").rglob("*") if path.is_file())
    assert largest <= 1024 * int(limit.removeprefix("--maxkb="))


def _pins() -> dict[str, str]:
    """The versions in constraints.txt, by lower-case name."""
    pins = re.findall(r"^([\w.-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    return {name.lower(): version for name, version in pins}
