"""The example that serves images: its answers one by one, and under a few seconds of load."""

import asyncio
import io
import json
import sys
from pathlib import Path

import pytest
from PIL import Image
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError

from dit_accel.serving import worker
from scripts.checks import serving

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import serve_ray  # noqa: E402

GOOD = {"prompt": "a yellow ring", "steps": 2, "height": 64, "width": 64}


class Replica:
    """Replaces the deployment that makes images."""

    def __init__(self, error=None):
        self.error = error

    async def remote(self, wanted):
        if self.error:
            raise self.error
        return b"image", 0.25


def answer(front, wanted):
    body = wanted if isinstance(wanted, bytes) else json.dumps(wanted).encode()
    return asyncio.run(front.generate(body))


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (b"{", "Invalid JSON"),
        (GOOD | {"prompt": ""}, "prompt: String should have at least 1 character"),
        (GOOD | {"steps": 51}, "steps: Input should be less than or equal to 50"),
        (GOOD | {"height": 1024}, "height: Input should be less than or equal to 512"),
        (GOOD | {"width": 65}, "width: Input should be a multiple of 16"),
        (GOOD | {"hight": 64}, "hight: Extra inputs are not permitted"),
    ],
    ids=["no JSON", "no prompt", "too many steps", "too large", "odd size", "unknown key"],
)
def test_what_is_out_of_bounds_is_told_in_a_line(wanted, told):
    reply = answer(serve_ray.Front.func_or_class(Replica()), wanted)
    assert reply.status_code == 422
    assert reply.body.decode().startswith(told) and reply.body.count(b"\n") == 1


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (None, 200, "image"),
        (BackPressureError(num_queued_requests=16, max_queued_requests=16), 503, "busy: 16 requests are waiting"),
        (ActorDiedError(), 500, "failed: ActorDiedError"),
    ],
    ids=["an image", "a full queue", "a replica that died"],
)
def test_every_request_has_an_answer(error, status, told):
    reply = answer(serve_ray.Front.func_or_class(Replica(error)), GOOD)
    assert reply.status_code == status and reply.body.decode().strip() == told


def test_a_server_that_closes_accepts_no_more():
    front = serve_ray.Front.func_or_class(Replica())
    asyncio.run(front.close())
    assert answer(front, GOOD).status_code == 503


def test_a_call_holds_one_shape(monkeypatch):
    """Images of two shapes come back in the order of their requests, and each shape is one call."""
    images = serve_ray.Images.func_or_class("demo-flux", "cpu")
    calls, call = [], worker.timed_call

    def counted(pipe, arguments, seeds):
        calls.append(1 if isinstance(arguments["prompt"], str) else len(arguments["prompt"]))
        return call(pipe, arguments, seeds)

    monkeypatch.setattr(worker, "timed_call", counted)
    heights = [64, 128, 64]
    made = images.make([serve_ray.Wanted(**GOOD | {"height": height, "seed": height}) for height in heights])
    assert [Image.open(io.BytesIO(file)).size for file, _ in made] == [(64, height) for height in heights]
    assert calls == [2, 1] and made[0][0] == made[2][0]


def test_too_much_load_is_refused_and_nothing_is_lost(tmp_path):
    """Far above the capacity: images, and "busy" for the rest; the server counts the same and ends well."""
    output = tmp_path / "serving.json"
    options = ["--capacity", "1", "--half", "1.5", "--overload", "2", "--factor", "20", "--steps", "1"]
    serving.main(["--output", str(output), *options])
    found = json.loads(output.read_text())
    assert found["failures"] == []
    assert set(found["phases"]["overload"]["answers"]) == {"200", "503"}
    assert found["phases"]["end"]["answers"] == {"200": serving.CLIENTS}
    assert found["phases"]["capacity"]["p99_seconds"] > found["phases"]["capacity"]["p50_seconds"] > 0


def test_what_is_wrong_is_told():
    """A request without an answer, a count that differs, memory that grows, and processes that stay."""
    good = {"answers": {"200": 9}, "counted_by_the_server": {"200": 9}, "exit_code": 0, "processes_left": []}
    good |= {"phases": {"half": {"answers": {"200": 9, "503": 2}}}, "memory_mib": [500] * 30 + [100, 101, 100] * 20}
    assert serving.failures(good) == []
    bad = {
        "phases": {"half": {"answers": {"200": 8, "no answer": 1}}},
        "counted_by_the_server": {"200": 8},
        "memory_mib": [100] * 40 + [120] * 20,
        "processes_left": ["raylet"],
    }
    assert serving.failures(good | bad) == [
        "half: 1 answers of no answer",
        "the server counted {'200': 8}, and gave {'200': 9}",
        "memory grew from 100 to 120 MiB",
        "the server ended with 0 and left ['raylet']",
    ]
