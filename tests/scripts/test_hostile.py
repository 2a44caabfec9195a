"""Hostile requests to servers on sockets: a few hundred of them, and what the check calls a fault."""

import json

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("imageio_ffmpeg")

from dit_accel.serving.http import bodies
from scripts.checks import hostile
from scripts.checks.hostile_requests import IMAGES, Attacks, Hostile


def test_hostile_requests_are_refused(monkeypatch, tmp_path):
    """Every kind was sent; each answer is allowed, and nothing was read, written, left over or logged."""
    monkeypatch.setattr(bodies, "SLOWEST_BODY", 0.5)
    output = tmp_path / "hostile.json"
    hostile.main(["--output", str(output), "--requests", "300"])
    found = json.loads(output.read_text())
    assert found["faults"] == [] and len(found["statuses"]) >= 12
    assert sum(sum(counts.values()) for counts in found["statuses"].values()) == 300


def test_a_seed_gives_the_same_requests():
    """So that a fault can be found again."""
    first, second, other = (Attacks(seed, "/outside", "key") for seed in (1, 1, 2))
    assert [first.one() for _ in range(50)] == [second.one() for _ in range(50)] != [other.one() for _ in range(50)]


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (400, b"{}", None),
        (500, b"{}", "status 500"),
        (hostile.HANGS, b"", "status -1"),
        (200, b'{"type": "server_error"}', "status 200"),
        (400, b"the key is 0123", "a secret in the answer"),
        (400, b"a" * 9999, "9999 bytes"),
    ],
)
def test_what_is_wrong_is_told(status, body, problem):
    found = hostile.Findings()
    found.add(Hostile("fields", IMAGES, (b"POST",), frozenset({200, 400})), status, body, 0.1, [b"0123"])
    assert found.statuses == {"fields": {status: 1}}
    assert [fault.split(": ")[1] for fault in found.faults] == ([] if problem is None else [problem])


def test_files_that_are_opened_elsewhere_are_told(tmp_path, monkeypatch):
    """Reading Python's modules and writing temporary files is allowed, and no file that a request names."""
    monkeypatch.setattr(hostile.tempfile, "tempdir", str(tmp_path))
    opened = hostile.Opened()
    outside = tmp_path / "outside.txt"
    with opened:
        (tmp_path / "a.txt").write_text("a")
        outside.write_text("a")
        open("/etc/hostname").close()
        open(hostile.__file__).close()
    (tmp_path / "a.txt").read_text()
    assert opened.foreign(str(outside)) == ["/etc/hostname", str(outside)]
