"""The site of docs/ builds, and no link in it is broken."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from scripts import tables
from scripts.site_links import on_page_markdown

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built so that a warning fails."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]  # --quiet would find nothing
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_is_in_the_site(site):
    """Each page of docs/ is built, and the menu names each page of the three shelves."""
    pages = [page.relative_to(ROOT / "docs").with_suffix("") for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page.name != "index" and not (site / page / "index.html").is_file()] == []
    menu = re.findall(r": (\w+/\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    shelves = [page for name in ("guide", "reference", "notes") for page in (ROOT / "docs" / name).glob("*.md")]
    assert sorted(menu) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in shelves)


def test_the_reference_has_docstrings(site):
    """The page on Python shows the docstrings, including arguments and errors."""
    text = (site / "reference" / "api" / "index.html").read_text(encoding="utf-8")
    assert "Make a diffusers pipeline faster, in place." in text and "UnsupportedError" in text


def test_results_have_pages_of_tables(site):
    """The tables of each JSON file whose script makes some are a page, and links to the JSON lead there."""
    stems = re.compile("|".join(tables.RENDERERS))
    paths = [path for path in (ROOT / "docs" / "results").glob("*.json") if stems.fullmatch(path.stem)]
    assert len(paths) > 50
    assert [path for path in paths if not (site / "results" / path.stem / "index.html").is_file()] == []
    text = (site / "results" / "speed-flux" / "index.html").read_text(encoding="utf-8")
    assert "14 of 50 steps computed" in text and 'href="../speed-flux.json"' in text
    notes = (site / "notes" / "results" / "index.html").read_text(encoding="utf-8")
    assert 'href="../../results/speed-flux/"' in notes and 'href="../../results/gpu-check-h200.json"' in notes


def test_tables_of_other_files_are_refused(capsys, monkeypatch):
    """The command says which files have tables, where one does not exist or has none."""
    for name, expected in (("nothing.json", "file must exist"), ("multistep.json", "file must have the name of")):
        monkeypatch.setattr(sys, "argv", ["tables", str(ROOT / "docs" / "results" / name)])
        with pytest.raises(SystemExit):
            tables.main()
        assert expected in capsys.readouterr().err


def test_links_out_of_docs_lead_to_the_repository():
    """Files outside of docs/ are not in the site: links to them become addresses, and broken ones stay to be found."""
    page = SimpleNamespace(file=SimpleNamespace(src_uri="guide/using.md"))
    url = "https://example.org/repository"
    config = SimpleNamespace(docs_dir=str(ROOT / "docs"), repo_url=url)
    shown = "[a](../../examples/own_loop.py) [b](../../CONTRIBUTING.md#pages) [c](../../nothing.py) [d](tuning.md#x)"
    assert on_page_markdown(shown, page=page, config=config, files=None) == (
        f"[a]({url}/blob/main/examples/own_loop.py) [b]({url}/blob/main/CONTRIBUTING.md#pages) [c](../../nothing.py) "
        "[d](tuning.md#x)"
    )


def test_the_build_looks_for_every_kind_of_broken_link():
    """Anchors, absolute links and links that lead nowhere are warnings, which --strict makes failures."""
    text = re.sub(r"!!python/\S+ \{.*?\}\}", "null", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert {"anchors", "absolute_links", "unrecognized_links"} <= yaml.safe_load(text)["validation"].keys()
