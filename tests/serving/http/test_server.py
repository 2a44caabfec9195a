"""The HTTP server: images through OpenAI's interface, limits, the queue, cancellation, keys and metrics."""

import asyncio
import base64
import io
import json
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from multiprocessing import resource_tracker
from types import SimpleNamespace
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from PIL import Image

from dit_accel import accelerated
from dit_accel.errors import BatchError, OutOfMemoryError
from dit_accel.presets import load_preset
from dit_accel.serving import pipelines
from dit_accel.serving.deadlines import Busy
from dit_accel.serving.engine import Made
from dit_accel.serving.http.api import Limits
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.worker import Worker
from dit_accel.tools.media import preview

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
requests = pytest.importorskip("dit_accel.serving.http.requests")
dispatching = pytest.importorskip("dit_accel.serving.dispatcher")
server = pytest.importorskip("dit_accel.serving.http.server")
bodies = pytest.importorskip("dit_accel.serving.http.bodies")
server_errors = pytest.importorskip("starlette.requests")

PATH = "/v1/images/generations"
LIMITS = Limits(side=64, steps=12, images=2, body=4096, seconds=60.0, upload=16_384)
GOOD = {"prompt": "a fox", "size": "32x48", "steps": 6, "seed": 3}
KEYS = ["a-long-enough-key", "another-long-key-ü"]


@pytest.fixture(scope="module")
def worker(saved):
    return Worker(Setup(str(saved("flux"))))


class Held:
    """Worker whose steps follow each other until it is released or cancelled, and fail for some prompts."""

    def __init__(self):
        self.release, self.begun, self.made = threading.Event(), threading.Event(), []

    def restart(self):
        pass

    def run(self, jobs, preset, suffix, tell):
        (job,) = jobs
        self.begun.set()
        prompt = job.settings["prompt"]
        if prompt == "memory":
            raise OutOfMemoryError("out of memory: use less")
        if prompt == "secret":
            raise RuntimeError("a secret path")
        if prompt == "broken":
            raise BatchError("the process died")
        for step in range(10_000):
            tell(step, 10_000)
            if self.release.wait(0.002):
                break
        self.made.append(prompt)
        file = io.BytesIO()
        Image.new("RGB", (16, 16)).save(file, "png")
        return [Made(file.getvalue(), 0.5, None, [job.index], {"denoising": 0.5}, (5, 48, 32))]


def released():
    (held := Held()).release.set()
    return held


@contextmanager
def running(
    worker, *, most=4, limits=LIMITS, keys=(), hosts=(), preset="balanced", form=None, videos=None, size=1, others=()
):
    """An application and its dispatcher; ends its thread afterwards."""
    dispatcher = dispatching.Dispatcher([worker], most, size)
    served = server.Served("tiny", preset and load_preset(preset), limits, form)
    try:
        yield server.build_app(dispatcher, served, keys, hosts, videos or server.VideoStore(limits), others), dispatcher
    finally:
        dispatcher.stop(10.0)
        assert not any(thread.is_alive() for thread in dispatcher._threads)


def client(app, **more):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here", timeout=60, **more)


def send(app, method, path, **request):
    async def ask():
        async with client(app) as http:
            return await http.request(method, path, **request)

    return asyncio.run(ask())


def post(app, body, **headers):
    """The answer to a request for images; a body that is no bytes is sent as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return send(app, "POST", PATH, content=content, headers=headers)


def get(app, path, **headers):
    return send(app, "GET", path, headers=headers)


def image(entry):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(entry["b64_json"]))))


def metric(app, name):
    lines = dict(line.rsplit(" ", 1) for line in get(app, "/metrics").text.splitlines() if line[:1] != "#")
    return float(lines[name])


def called(worker, preset=None, overrides=None, seed=3, **arguments):
    """The first image or video of a call of the worker's own pipeline, plain without a preset."""
    worker.use(None)
    with accelerated(worker.pipe, preset, **overrides or {}) if preset else nullcontext():
        (made,) = worker.pipe(**arguments, generator=torch.Generator().manual_seed(seed), return_dict=False)
    return np.asarray(made[0])


def expected(worker, preset=None, overrides=None, seed=3):
    arguments = {"prompt": "a fox", "num_inference_steps": 6, "width": 32, "height": 48}
    return called(worker, preset, overrides, seed, **arguments)


def test_an_image_equals_that_of_the_command_generate(worker, run, tmp_path, monkeypatch):
    """The PNG file has the same bytes as that of `generate` with the same options."""
    with running(worker) as (app, _):
        answer = post(app, GOOD).json()
    (entry,) = answer["data"]
    options = ("--prompt", "a fox", "--width", "32", "--height", "48", "--steps", "6", "--seed", "3")
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *_: worker.pipe)  # weights elsewhere may round differently
    result = run("generate", "--model", worker._setup.model, *options, "--output", "fox.png")
    assert result.exit_code == 0, result.output
    assert base64.b64decode(entry["b64_json"]) == (tmp_path / "fox.png").read_bytes()
    assert (entry["size"], entry["seed"], entry["preset"]) == ("32x48", 3, "balanced")
    assert answer["output_format"] == "png" and entry["seconds"]["denoising"] > 0


@pytest.mark.parametrize(
    ("fields", "preset", "overrides"),
    [
        ({"preset": "none"}, None, {}),
        ({"target_error": 0.9}, "balanced", {"target_error": 0.9}),
        ({"preset": "quality", "target_error": 0.5}, "quality", {"target_error": 0.5}),
    ],
    ids=["plain", "a target", "both"],
)
def test_each_request_has_its_own_preset(worker, fields, preset, overrides):
    """Requests with other presets before and after it do not change its image."""
    with running(worker) as (app, _):
        first, own, last = (post(app, GOOD | each).json()["data"][0] for each in ({}, fields, {}))
    np.testing.assert_array_equal(image(own), expected(worker, preset, overrides))
    assert first["b64_json"] == last["b64_json"]
    assert (own["computed_fraction"] == 1.0) == (preset is None)


@pytest.mark.parametrize("form", ["png", "jpeg", "webp"])
def test_an_image_has_the_requested_format(worker, form):
    with running(worker) as (app, _):
        (entry,) = post(app, GOOD | {"output_format": form}).json()["data"]
    assert Image.open(io.BytesIO(base64.b64decode(entry["b64_json"]))).format.lower() == form


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"model": "other"}, "model", "this server has tiny"),
        ({"negative_prompt": "red", "guidance": 0.5}, "negative_prompt", "only with guidance above 1"),
        ({"preset": "wan21-sparge"}, "preset", "is for wan models"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(worker, change, param, message):
    """The status is 4xx, and the error has OpenAI's shape and names the field."""
    with running(worker) as (app, _):
        answer = post(app, GOOD | change)
        assert answer.status_code == (404 if param == "model" else 400)
        assert metric(app, 'dit_accel_requests_total{outcome="invalid"}') == 1
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"] == param and message in error["message"] and "--" not in error["message"]


OPENAIS = {"quality": "hd", "style": "vivid", "moderation": "low", "background": "opaque", "output_compression": 100}


def test_fields_that_openais_clients_send_change_nothing():
    """Null is an absent field, and a note names each field that has no effect."""
    optional = [name for name, field in requests.ImageRequest.model_fields.items() if not field.is_required()]
    plain, held = {"prompt": "a fox"}, released()
    with running(held) as (app, _):
        bodies = {}, dict.fromkeys(optional), {**OPENAIS, "n": None}
        bare, null, noted = (post(app, plain | more).json() for more in bodies)
    assert "notes" not in bare and "notes" not in null and len(null["data"]) == len(noted["data"]) == 1
    assert [note.split()[0] for note in noted["notes"]] == ["quality", "style", "moderation"]


def test_a_url_holds_the_file_itself():
    """OpenAI's older clients ask for a URL and read it."""
    with running(released()) as (app, _):
        answer = post(app, {"prompt": "a fox", "response_format": "url"}).json()
    (entry,) = answer["data"]
    assert "b64_json" not in entry and "data URL" in answer["notes"][0]
    with urlopen(entry["url"]) as file:
        assert Image.open(io.BytesIO(file.read())).size == (16, 16)


@pytest.mark.parametrize("stream", [False, True], ids=["answer", "event"])
def test_a_rounded_size_is_noted(stream):
    held = released()
    held.run, run = lambda *call: [replace(each, note="the pipeline rounded") for each in run(*call)], held.run
    with running(held) as (app, _):
        text = post(app, {"prompt": "a fox", "stream": stream}).text
    answer = list(events(text))[-1][1] if stream else json.loads(text)
    assert answer["notes"] == ["the pipeline rounded"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "must be a JSON object"),
        (b"[]", 400, "must be a JSON object"),
        (b'{"prompt": "\\ud800"}', 400, "must be a JSON object"),
        (b"\xff\xfe", 400, "must be a JSON object"),
        (b"[" * 4000, 400, "must be a JSON object"),
        (b" " * 4097, 413, "at most 4,096 bytes"),
    ],
    ids=["empty", "a list", "half a character", "no UTF-8", "nested", "too long"],
)
def test_a_body_that_is_no_request_is_refused(body, status, message):
    with running(Held()) as (app, _):
        answer = post(app, body)
    assert answer.status_code == status and message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", PATH, 405), ("POST", "/v1/images/variations", 404), ("GET", "/../../etc/passwd", 404)],
)
def test_unknown_routes_have_errors_in_the_same_shape(method, path, status):
    with running(Held()) as (app, _):
        answer = send(app, method, path)
    error, is_known = answer.json()["error"], status == 405
    assert answer.status_code == status and set(error) == {"message", "type", "param", "code"}
    assert error["code"] == ("method_not_allowed" if is_known else "not_found") and error["param"] is None
    assert ("allow" in answer.headers) == is_known


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def test_a_full_queue_refuses_at_once():
    """One request runs and two wait; a fourth gets 503 with Retry-After, and the others their images."""
    held = Held()

    async def ask(app, dispatcher):
        async with client(app) as http:
            accepted = [asyncio.create_task(http.post(PATH, json=GOOD | {"seed": seed})) for seed in range(3)]
            await until(lambda: (dispatcher.running, dispatcher.waiting) == (1, 2))
            assert "dit_accel_queue_length 2.0" in (await http.get("/metrics")).text
            refused = await http.post(PATH, json=GOOD)
            assert (await http.get("/health")).json() == {"status": "ok", "waiting": 2, "running": 1}
            held.release.set()
            return refused, [await each for each in accepted]

    with running(held, most=2) as (app, dispatcher):
        refused, accepted = asyncio.run(ask(app, dispatcher))
        assert metric(app, 'dit_accel_requests_total{outcome="busy"}') == 1
        assert metric(app, 'dit_accel_requests_total{outcome="ok"}') == 3
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "server_error"
    assert [answer.json()["data"][0]["seed"] for answer in accepted] == [0, 1, 2]


async def leave(app, body, condition, **message):
    messages, gone = [{"type": "http.request", "body": body, **message}], asyncio.Event()

    async def receive():
        if messages:
            return messages.pop()
        await (gone.wait() if condition is None else until(condition))
        return {"type": "http.disconnect"}

    async def send(message):
        if message.get("body") and condition is None:  # the client reads no event
            gone.set()
            await asyncio.sleep(60)

    scope = {"type": "http", "method": "POST", "path": PATH, "headers": [], "query_string": b"", "root_path": ""}
    await app(scope | {"asgi": {"spec_version": "2.3"}, "server": ("here", 80)}, receive, send)


@pytest.mark.parametrize("is_whole", [False, True], ids=["in its body", "while an event is sent"])
def test_a_client_that_disconnects_is_counted(is_whole):
    """Half of a body is no invalid request."""
    body, when = (json.dumps(GOOD | {"stream": True}).encode(), None) if is_whole else (b'{"prompt": ', lambda: True)
    with running(Held()) as (app, dispatcher):
        asyncio.run(leave(app, body, when, more_body=not is_whole))
        assert metric(app, 'dit_accel_requests_total{outcome="cancelled"}') == 1
        assert is_whole or not dispatcher.running


@pytest.mark.parametrize("stream", [False, True], ids=["one answer", "events"])
@pytest.mark.parametrize("place", ["running", "waiting"])
def test_a_client_that_disconnects_cancels_its_request(stream, place):
    """A running request ends at its next step, and a waiting one never begins; the next request is made."""
    held = Held()

    async def ask(app, dispatcher):
        async with client(app) as http:
            if place == "waiting":
                first = asyncio.create_task(http.post(PATH, json=GOOD | {"prompt": "first"}))
                await until(lambda: dispatcher.running)
            body = json.dumps(GOOD | {"prompt": "left", "stream": stream}).encode()
            before = dispatcher.running
            await leave(app, body, lambda: dispatcher.waiting if before else dispatcher.running)
            await until(lambda: dispatcher.running == (place == "waiting") and not dispatcher.waiting)
            held.release.set()
            if place == "waiting":
                await first
            assert (await http.post(PATH, json=GOOD | {"prompt": "next"})).status_code == 200

    with running(held) as (app, dispatcher):
        asyncio.run(ask(app, dispatcher))
        assert metric(app, 'dit_accel_requests_total{outcome="cancelled"}') == 1
    assert held.made == (["first"] if place == "waiting" else []) + ["next"]


def test_a_stream_that_never_begins_cancels_its_request():
    """Its client leaves before the head of the answer, so that nothing in the events can notice."""
    tasks = []

    async def left(scope, receive, send):
        scope["state"]["entry"].task = task = dispatching.AwaitedTask([], None, ".png")
        tasks.append(task)
        raise server_errors.ClientDisconnect

    noted, metrics = [], SimpleNamespace(take=lambda error, *_: noted.append(error))
    with suppress(server_errors.ClientDisconnect):
        asyncio.run(leave(server.logged(left, metrics), b"", lambda: True))
    assert tasks[0].is_cancelled and noted[0].outcome == "cancelled"


def test_time_is_limited():
    """A request that takes longer gets 504, and its run ends."""
    held = Held()
    with running(held, limits=Limits(seconds=0.2)) as (app, dispatcher):
        answer = post(app, GOOD)
        asyncio.run(until(lambda: not dispatcher.running))
        assert metric(app, 'dit_accel_requests_total{outcome="timeout"}') == 1
    assert answer.status_code == 504 and held.made == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("memory", "out of memory: use less"), ("secret", "the server's log has"), ("broken", "the process died")],
)
def test_a_failure_has_status_500(prompt, message):
    """Errors of the library are shown; others only in the log. The server stays healthy."""
    with running(Held()) as (app, _):
        answer = post(app, GOOD | {"prompt": prompt})
        assert get(app, "/health").status_code == 200
        assert metric(app, 'dit_accel_requests_total{outcome="failed"}') == 1
    assert answer.status_code == 500 and message in answer.json()["error"]["message"]
    assert "path" not in answer.text


def test_an_unexpected_error_has_openais_shape(monkeypatch):
    """An image that can't be read is a mistake of the server."""

    async def ask(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            return await http.post(PATH, json=GOOD)

    held = released()
    monkeypatch.setattr(server.Image, "open", lambda file: 1 / 0)
    with running(held) as (app, _):
        answer = asyncio.run(ask(app))
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"


HOSTS = ("localhost", "127.0.0.1", "::1", "images.example.com")


@pytest.mark.parametrize(
    ("hosts", "headers", "name"),
    [
        (HOSTS, {"Host": "localhost:8000"}, None),
        (HOSTS, {"Host": "[::1]:8000", "Origin": "http://LOCALHOST:3000"}, None),
        (HOSTS, {"Host": "images.example.com", "Origin": "https://images.example.com"}, None),
        (HOSTS, {"Host": "evil.com:8000"}, "Host 'evil.com:8000'"),
        (HOSTS, {"Host": "localhost@evil.com"}, "Host 'localhost@evil.com'"),
        (HOSTS, {"Host": "[::1"}, "Host '[::1'"),
        (HOSTS, {"Host": "localhost", "Origin": "https://evil.com"}, "Origin 'https://evil.com'"),
        (HOSTS, {"Host": "localhost", "Origin": "null"}, "Origin 'null'"),
        ((), {"Host": "10.0.0.5:8000", "Origin": "http://10.0.0.5:8000"}, None),
        ((), {"Host": "10.0.0.5:8000", "Origin": "https://evil.com"}, "Origin 'https://evil.com'"),
    ],
    ids=str,
)
def test_pages_of_other_sites_are_refused_without_keys(hosts, headers, name):
    """The worker gets no request of a browser's page of another site, and no site can pass as localhost."""
    held = released()
    with running(held, hosts=hosts) as (app, _):
        answers = [post(app, GOOD, **headers), *(get(app, path, **headers) for path in ("/v1/models", "/metrics"))]
        assert get(app, "/health", Host="10.0.0.5").status_code == 200
    assert {answer.status_code for answer in answers} == {200 if name is None else 403}
    for answer in answers if name is not None else ():
        error = answer.json()["error"]
        assert error["message"].startswith(f"{name} is not allowed: ") and error["code"] == "host_not_allowed"
        assert "--api-key-file" in error["message"] and held.made == []


def events(text):
    for block in text.strip().split("\n\n"):
        name, content = block.split("\n")
        assert json.loads(content.removeprefix("data: ")).get("type", "error") == name.removeprefix("event: ")
        yield name.removeprefix("event: "), json.loads(content.removeprefix("data: "))


def test_partial_images_are_events_between_steps(worker, monkeypatch):
    """They come after a third and two thirds of the steps, once an image of that size was made, and change nothing."""
    monkeypatch.setattr(preview, "UNEXPLAINED", float("inf"))  # an untrained decoder is no linear map
    asked = GOOD | {"stream": True, "partial_images": 2}
    with running(worker) as (app, _):
        post(app, GOOD | {"seed": 1})
        *steps, (_, content) = events(post(app, asked).text)
        whole = post(app, GOOD).json()["data"][0]["b64_json"]
    assert content["b64_json"] == whole
    order = [each["partial_image_index"] if name.endswith("partial_image") else each["step"] for name, each in steps]
    assert order == [0, 1, 2, 0, 3, 4, 1, 5, 6]
    partial = next(each for name, each in steps if name == "image_generation.partial_image")
    image = Image.open(io.BytesIO(base64.b64decode(partial["b64_json"])))
    assert image.format == "PNG" and f"{image.width}x{image.height}" == content["size"]


@pytest.mark.parametrize(
    ("header", "status"), [(f"Bearer {KEYS[0]}", 200), (f"bearer {KEYS[1]}", 200), (KEYS[0], 401), (None, 401)]
)
def test_keys_are_needed_where_there_are_some(header, status, caplog):
    """All routes but /health need one, from any page; neither answers nor logs show it."""
    headers = {"Host": "evil.com", "Origin": "null"} | ({} if header is None else {"Authorization": header.encode()})
    with running(released(), keys=KEYS, hosts=HOSTS) as (app, _):
        answers = [get(app, path, **headers) for path in ("/v1/models", "/metrics")] + [post(app, GOOD, **headers)]
        assert get(app, "/health").status_code == 200
    assert {answer.status_code for answer in answers} == {status}
    assert not any(key in answer.text for key in KEYS for answer in answers)
    assert not any(key in caplog.text for key in KEYS)


@pytest.mark.parametrize("end", ["made", "client", "time"])
def test_a_watched_request_ends_with_its_client_or_its_time(end):
    """Time in the queue counts; what watches the client ends with the block."""

    async def receive():
        if end != "client":
            await asyncio.sleep(20)
        return {"type": "http.disconnect"}

    async def watch():
        watching = server.ImageServer(None, server.Served("tiny", None, replace(LIMITS, seconds=50.0)), None)
        task = dispatching.AwaitedTask([], None, ".png")
        if end == "time":
            task.created -= 50
        state = SimpleNamespace(entry=SimpleNamespace())
        with suppress(server.RequestError):
            async with watching._watched(SimpleNamespace(receive=receive, state=state), task):
                await asyncio.sleep(20 if end == "time" else 0.01)
        await asyncio.sleep(0)
        return task.is_cancelled, len(asyncio.all_tasks())

    assert asyncio.run(watch()) == (end != "made", 1)


def test_partial_images_are_numbered_by_image():
    """Each of several images of a request has its own."""
    served = server.Served("tiny", None, LIMITS)

    async def stream():
        body = json.dumps(GOOD | {"n": 2, "stream": True, "partial_images": 2}).encode()
        wanted = requests.read(body, requests.ImageRequest, served)
        task = dispatching.AwaitedTask(jobs := wanted.jobs(), None, ".png")
        for place, partial in ((0, None), (0, b"a"), (1, b"b"), (0, b"c"), (1, b"d"), (1, b"e")):
            task.tell(dispatching.Step(jobs[place], 1, 2, partial))
        task.tell(None)
        serving = server.ImageServer(None, served, None)
        state = SimpleNamespace(entry=SimpleNamespace(results=[]))
        request = SimpleNamespace(receive=lambda: asyncio.sleep(20, {"type": "none"}), state=state)
        return "".join([event async for event in serving._events(request, wanted, task)])

    partial = [content for name, content in events(asyncio.run(stream())) if name.endswith("partial_image")]
    found = [(each["index"], each["partial_image_index"], base64.b64decode(each["b64_json"])) for each in partial]
    assert found == [(0, 0, b"a"), (1, 0, b"b"), (0, 1, b"c"), (1, 1, b"d"), (1, 2, b"e")]


def test_metrics_count_every_result_of_a_request():
    """With its own stages and share of the FLOPs; a plain result has all of them. A request waits once."""
    metrics = server.Metrics(SimpleNamespace(waiting=2, running=1))
    reports, stages = (None, {"computed_fraction": 0.25}), ({"decoding": 1.0}, {"decoding": 2.0, "other": 4.0})
    waits = [{"contract": {"queue_seconds": seconds}} for seconds in (3.0, 8.0)]  # the second call follows the first
    made = [Made(b"", 0.5, *each, **wait) for *each, wait in zip(reports, ([0], [1]), stages, waits, strict=True)]
    for end in [None, Busy("full", 1), dispatching.Cancelled(), TimeoutError(), RuntimeError(), GeneratorExit()]:
        metrics.take(end and server.answered(end, LIMITS), 1.0, [] if end else made)
    read = metrics.registry.get_sample_value
    assert read("dit_accel_computed_fraction_sum") == 1.25 and read("dit_accel_computed_fraction_count") == 2
    seconds = [read("dit_accel_stage_seconds_total", {"stage": stage}) for stage in ("decoding", "other", "queue")]
    outcomes = ("ok", "busy", "cancelled", "timeout", "failed")
    counts = [read("dit_accel_requests_total", {"outcome": outcome}) for outcome in outcomes]
    assert seconds == [3.0, 4.0, 3.0] and counts == [1, 1, 2, 1, 1]
    assert (read("dit_accel_queue_length"), read("dit_accel_running")) == (2, 1)


def test_signals_are_held_also_at_the_first_start_of_a_process(monkeypatch):
    """Which needs Python's tracker of resources; starting that lets the signals through."""
    tracker = resource_tracker.ResourceTracker()
    monkeypatch.setattr(resource_tracker, "ensure_running", tracker.ensure_running)
    with server.signals_held():
        tracker.getfd()
        held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    tracker._stop()
    assert {signal.SIGTERM, signal.SIGINT} <= held


def test_a_signal_during_an_import_ends_the_process_well():
    """Python runs the text of a dataclass then; a KeyboardInterrupt that leaves it would decide the exit status."""
    program = """
import signal
from dit_accel.serving.http.server import ended_by_signals
for number in (signal.SIGTERM, signal.SIGINT):
    with ended_by_signals():
        exec("signal.raise_signal(number)")
"""
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (made.returncode, made.stderr) == (0, "")
