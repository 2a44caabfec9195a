"""Files that appear whole or not at all."""

import os
import threading

import pytest

from dit_accel.errors import OutputError
from dit_accel.tools import files
from dit_accel.tools.files import difference_of, write_whole


@pytest.mark.parametrize("content", ["é\n", b"\x00\r\n"])
def test_a_file_is_replaced_as_a_whole(content, tmp_path):
    path = tmp_path / "report.json"
    path.write_text("before")
    write_whole(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert os.listdir(tmp_path) == ["report.json"]


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [(OSError("full"), OutputError, r"json can't be written: full"), (KeyboardInterrupt(), KeyboardInterrupt, None)],
    ids=["full disk", "interrupt"],
)
def test_what_fails_leaves_the_file_of_before(error, raised, message, tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    path.write_text("before")
    monkeypatch.setattr(files.os, "replace", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(raised, match=message):
        write_whole(path, "after")
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["report.json"]


def test_a_link_and_a_long_name_are_written_to(tmp_path):
    long, link = tmp_path / f"{'é' * 125}.json", tmp_path / "link.json"
    link.symlink_to(long)
    write_whole(link, "after")
    assert link.is_symlink() and long.read_text() == "after" and len(os.listdir(tmp_path)) == 2


PRESET = {"description": "a loop", "schedule": {"order": 1, "warmup": 2}}


@pytest.mark.parametrize(
    ("now", "difference"),
    [
        (PRESET, None),
        (PRESET | {"schedule": {"order": 2, "warmup": 2}}, "preset (preset.schedule.order: 1 there, 2 now)"),
        ({"description": "another", "schedule": {"order": 1}}, "preset (preset.schedule.warmup: 2 there, None now)"),
        (PRESET | {"description": "another"}, "preset (preset.description: 'a loop' there, 'another' now)"),
        (None, "preset (preset: 'a loop' there, None now)"),
    ],
    ids=["equal", "inside", "removed", "description", "none"],
)
def test_a_difference_names_the_key_inside_a_preset(now, difference):
    """A whole preset in a message would hide the key that differs."""
    assert difference_of({"seed": 1, "preset": PRESET}, {"seed": 1, "preset": now}) == difference


def test_a_pipe_is_written_to(tmp_path):
    """For example /dev/stdout, which no file may replace."""
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, "facts")
    reader.join(60)
    assert found == [b"facts"]
