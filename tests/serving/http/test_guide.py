"""The guide's curl lines as they stand, against servers of tiny pipelines."""

import base64
import io
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from dit_accel.serving.pipelines import Setup
from dit_accel.serving.worker import Worker
from tests.serving.http.test_edits import PNG
from tests.serving.http.test_server import Limits
from tests.serving.http.test_videos import listening, making

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "serving.md"
LINES = re.findall(r"^curl .*", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
MODELS = {"/v1/images/generations": "flux", "/v1/images/edits": "flux-fill", "/v1/videos": "wan"}


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize(("line", "path"), [*zip(LINES, MODELS, strict=True)], ids=MODELS)
def test_a_line_of_the_guide_runs(saved, tmp_path, line, path):
    """It gets an image, or a job; curl's own settings lead to another port."""
    worker = Worker(Setup(str(saved(MODELS[path]))))
    for name in ("in.png", "mask.png"):
        (tmp_path / name).write_bytes(PNG[1])
    with making(worker, limits=Limits(), form=worker.loaded.form, preset=None) as (app, _), listening(app) as url:
        (tmp_path / ".curlrc").write_text(f"fail\nconnect-to = localhost:8000:{url.removeprefix('http://')}\n")
        home = os.environ | {"HOME": str(tmp_path)}
        run = subprocess.run(line, shell=True, cwd=tmp_path, env=home, capture_output=True, check=False)
    assert path in line and run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    if path == "/v1/videos":
        assert (answer["object"], answer["size"], answer["num_frames"]) == ("video", "320x192", 17)
    else:
        assert Image.open(io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"]))).size == (256, 256)
