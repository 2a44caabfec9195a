"""Files that appear whole or not at all."""

import os
import threading

import pytest

from dit_accel.tools import files
from dit_accel.tools.files import write_whole


@pytest.mark.parametrize("content", ["é\n", b"\x00\r\n"])
def test_a_file_is_replaced_as_a_whole(content, tmp_path):
    path = tmp_path / "report.json"
    path.write_text("before")
    write_whole(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert os.listdir(tmp_path) == ["report.json"]


def test_what_fails_leaves_the_file_of_before(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    path.write_text("before")
    monkeypatch.setattr(files.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_whole(path, "after")
    assert path.read_text() == "before"


def test_a_pipe_is_written_to(tmp_path):
    """For example /dev/stdout, which no file may replace."""
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, "facts")
    reader.join(60)
    assert found == [b"facts"]
