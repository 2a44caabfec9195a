"""dit-accel report on a tiny pipeline: what it writes, and which changes its check notices."""

import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace

from PIL import Image

from dit_accel.cli import compare
from dit_accel.tools.measure import kit


def sealed(change):
    """A change to a report whose digest is computed anew."""

    def forge(folder, document):
        change(document)
        document["digest"] = kit._digest_of(document)

    return forge


def other_image(folder, document):
    Image.new("RGB", (32, 32)).save(folder / "report-images/000-turbo.png")


def other_image_and_digest(folder, document):
    other_image(folder, document)
    kit.seal(folder)
    document |= json.loads((folder / "report.json").read_text())


def row(document, name="turbo"):
    return next(row for row in document["results"] if row["name"] == name)


def better(document):
    row(document)["psnr_db_each"] = [decibels + 3 for decibels in row(document)["psnr_db_each"]]
    row(document)["psnr_db"] += 3


FORGED = {  # change, and what the check says of it
    "another figure": (lambda _, document: row(document).update(psnr_db=50.0), "was changed after"),
    "unfinished": (lambda _, document: document.pop("digest"), "is not finished"),
    "another schema": (lambda _, document: document.update(schema="1"), "this version checks"),
    "missing image": (lambda folder, _: (folder / "report-images/000-plain.png").unlink(), "is missing"),
    "another image": (other_image, "000-turbo.png is missing or was changed"),
    "another image, sealed": (other_image_and_digest, "turbo: PSNR of prompt 0"),
    "better figures, sealed": (sealed(better), "turbo: PSNR of prompt 0"),
    "better mean, sealed": (sealed(lambda document: row(document).update(psnr_db=50.0)), "not the mean"),
    "no device, sealed": (sealed(lambda document: document["origin"].pop("device")), "device of the run"),
    "no time, sealed": (sealed(lambda document: row(document).update(seconds_each=[0.0])), "must be positive"),
    "missing preset, sealed": (sealed(lambda document: document["results"].remove(row(document))), "turbo was not"),
    "missing prompt, sealed": (sealed(lambda document: row(document)["psnr_db_each"].pop()), "figures of 1 of 2"),
}


def test_a_report_is_whole_until_something_is_changed(run, model, tmp_path, monkeypatch):
    """A run measures what fits into its time, and another the rest; a changed figure, image or digest is named."""
    monkeypatch.setattr(kit, "RUNS", 10**9)  # the fewest prompts
    monkeypatch.setattr(kit, "PEERS", "fewer-steps")
    folder, file = tmp_path / "report", tmp_path / "report/report.json"
    asked = ("report", "-m", model, "--steps", "6", "--height", "32", "--width", "32", "--minutes", "2")
    with monkeypatch.context() as patch:
        clock = count(step=40)  # seconds between two looks at it
        patch.setattr(compare, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        assert (result := run(*asked)).exit_code == 0, result.output
    assert "3 steps, because 2 minutes were over" in result.stdout and "No column call" not in result.stdout
    assert run("report", "--check", folder).stdout.startswith("whole")  # presets alone
    assert run(*asked).exit_code == 0
    document, images = file.read_text(), {path: path.read_bytes() for path in folder.glob("report-images/*")}
    assert [row["name"] for row in json.loads(document)["results"]] == ["quality", "balanced", "turbo", "3 steps"]
    assert {"report-sheet.png", "report.md", "report.png"} <= {path.name for path in folder.iterdir()}
    file.write_text(document.replace('"seed": 0', '"seed": 0, "offload": "group", "quantize": "int8"', 1))
    assert ", offload group, quantize int8 | " in kit.row(file)
    file.write_text(document)
    assert run("report", "--check", folder).stdout.endswith(f"{kit.row(file)}\n")
    for name, (change, message) in FORGED.items():
        changed = json.loads(document)
        change(folder, changed)
        file.write_text(json.dumps(changed))
        result = run("report", "--check", folder)
        assert result.exit_code == 1 and message in result.stdout, (name, result.stdout)
        for path, content in images.items():
            path.write_bytes(content)
    file.write_text("[1")
    assert "is no report" in run("report", "--check", folder).stdout
    assert "can't be read" in run("report", "--check", tmp_path / "nowhere").stdout


def test_reports_of_others_are_in_the_table():
    guide = Path(__file__).parents[2] / "docs" / "guide" / "comparing.md"
    for file in guide.parents[1].glob("results/community/*.json"):
        assert kit.row(file) in guide.read_text(encoding="utf-8")
