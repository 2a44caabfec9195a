"""``dit-accel serve`` as its own process, with curl's requests and OpenAI's client, and its options."""

import base64
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dit_accel.cli import serve
from dit_accel.errors import ArgumentError
from dit_accel.serving import pipelines, remote_worker
from tests.forked import fork_server, free_port, run_command, until
from tests.tiny import tiny_pipeline

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")

KEY = "a-long-enough-key"
GOOD = {"prompt": "a fox", "size": "32x32", "steps": 4, "seed": 3}
LONG = GOOD | {"size": "64x64", "steps": 40, "preset": "none"}


def start(folder, *options, change=None):
    """A server of the folder's model in its own process, and its port."""
    tiny_pipeline("flux").save_pretrained(folder / "flux")
    command = ("serve", "--model", "flux", "--port", port := free_port(), *options)
    process = fork_server().Process(target=run_command, args=(folder, command, change))
    process.start()
    return process, port


def processes_of(server):
    return pytest.importorskip("psutil").Process(server.pid).children()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serving")
    (folder / "keys.txt").write_text(f"{KEY}\n")
    process, port = start(folder, "--api-key-file", "keys.txt", "--queue", "1")
    log, errors = folder / "output.txt", folder / "errors.txt"
    try:
        until(lambda: not process.is_alive() or (log.exists() and log.read_text().endswith("\n")))
        assert log.read_text() == f"ready at http://127.0.0.1:{port} (stop with Ctrl-C)\n", errors.read_text()
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}", process=process, log=log, errors=errors)
    finally:
        process.kill()
        process.join()


@pytest.fixture
def http(site):
    with httpx.Client(base_url=site.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as http:
        yield http


def running(http):
    state = http.get("/health").json()
    return state["running"], state["waiting"]


def ask_twice(http):
    """Send a request that runs and one that waits; return their threads and the list of their answers."""
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(http.post("/v1/images/generations", json=LONG)))
        for _ in range(2)
    ]
    for place, thread in enumerate(threads):
        thread.start()
        until(lambda place=place: running(http) == (1, place))
    return threads, answers


def test_openais_client_makes_images(site, http):
    """Fields that OpenAI has not go into `extra_body`; errors have the client's classes."""
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{site.url}/v1", api_key=KEY, max_retries=0)
    assert [model.id for model in client.models.list()] == ["flux"]
    own = {"steps": 4, "seed": 3, "target_error": 0.5}
    made = client.images.generate(model="flux", prompt="a fox", size="32x32", extra_body=own)
    assert made.data[0].b64_json == http.post("/v1/images/generations", json=GOOD | own).json()["data"][0]["b64_json"]
    four = client.images.generate(prompt="a fox", size="32x32", n=4, extra_body=own).data
    assert four[0].b64_json == made.data[0].b64_json and len({image.b64_json for image in four}) == 4
    stream = client.images.generate(prompt="a fox", size="32x32", stream=True, extra_body=own)
    *steps, last = stream
    assert len(steps) == 5 and last.type == "image_generation.completed" and last.b64_json == made.data[0].b64_json
    with pytest.raises(openai.BadRequestError, match="size must have sides") as failure:
        client.images.generate(prompt="a fox", size="33x32")
    assert failure.value.param == "size"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another-long-key").models.list()


def test_a_stream_arrives_step_by_step_and_its_end_cancels(http):
    """The first step arrives long before the last; the server drops the run when the client leaves."""
    with http.stream("POST", "/v1/images/generations", json=LONG | {"stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: image_generation.progress" and running(http) == (1, 0)
    until(lambda: running(http) == (0, 0))
    assert 'dit_accel_requests_total{outcome="cancelled"} 1.0' in http.get("/metrics").text
    made = http.post("/v1/images/generations", json=GOOD).json()["data"][0]["b64_json"]
    assert base64.b64decode(made).startswith(b"\x89PNG")


def test_a_process_that_dies_costs_no_request(site, http):
    """The running request and a waiting one get their images from a new process."""
    threads, answers = ask_twice(http)
    (worker,) = processes_of(site.process)
    worker.kill()
    for thread in threads:
        thread.join()
    first, second = (answer.json()["data"][0]["b64_json"] for answer in answers)
    assert first == second and http.get("/health").status_code == 200
    assert "died, attempt 1 of 2" in site.errors.read_text()


def test_sigterm_ends_it_after_the_running_request(site, http):
    """The running request gets its image, the waiting one 503; the process ends with 0, and its log shows no key."""
    threads, answers = ask_twice(http)
    site.process.terminate()
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [503, 200]
    site.process.join(60)
    assert site.process.exitcode == 0 and KEY not in site.errors.read_text() + site.log.read_text()


def hang():
    pipelines.load_pipeline = lambda *_: Path("loading").touch() or time.sleep(1000)


def hang_once_started():
    """Get the signal before the start of the model's process has returned, too."""
    hang()
    start_process = remote_worker.LocalProcess.__init__

    def start_late(*setup):
        start_process(*setup)
        until(lambda: signal.SIGTERM in signal.sigpending())

    remote_worker.LocalProcess.__init__ = start_late


@pytest.mark.parametrize("change", [hang, hang_once_started], ids=["loads", "starts"])
def test_sigterm_ends_it_while_the_model_loads(tmp_path, change):
    """Both processes end within seconds, with status 0."""
    server, _ = start(tmp_path, change=change)
    try:
        until((tmp_path / "loading").exists)
        (worker,) = processes_of(server)
        server.terminate()
        server.join(60)
        # An orphan stays a zombie until the system's first process takes notice.
        assert server.exitcode == 0 and (not worker.is_running() or worker.status() == "zombie")
        assert (tmp_path / "output.txt").read_text() + (tmp_path / "errors.txt").read_text() == ""
    finally:
        server.kill()


def test_a_taken_port_is_an_error_before_the_model_loads(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", "--model", "missing", "--port", port)
    assert result.exit_code == 2 and f"error: --port: can't listen on 127.0.0.1:{port}" in result.stderr


def test_other_machines_without_a_key_are_noted(run, reached):
    """Binding to another address prints a note, which a file of keys avoids."""
    assert "--api-key-file restricts access" in run("serve", "-m", "pictures", "--host", "0.0.0.0").output
    assert "restricts" not in run("serve", "-m", "pictures").output


def test_videos_are_deleted_at_the_end(run, reached):
    """The server knows the frame rate of the model."""
    assert run("serve", "-m", "some/clips").exit_code == 0 and reached["form"].fps == 16.0
    assert not reached["store"].new_file().parent.exists()


def devices_of_workers(monkeypatch):
    """The devices of all workers that the command starts from now on."""
    opened, worker = [], serve.RemoteWorker
    monkeypatch.setattr(
        serve,
        "RemoteWorker",
        lambda setup, *more, **others: opened.append(setup.loading.device) or worker(setup, *more, **others),
    )
    return opened


@pytest.mark.parametrize(
    ("given", "there", "devices"),
    [
        ((), 2, ["cuda:0", "cuda:1"]),
        (("--gpus", 1), 2, ["cuda:0"]),
        (("--device", "cuda:1"), 2, ["cuda:1"]),
        ((), 0, [None]),
    ],
    ids=["all", "some", "one by its name", "none"],
)
def test_each_gpu_has_a_process(run, reached, monkeypatch, given, there, devices):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    opened = devices_of_workers(monkeypatch)
    result = run("serve", "-m", "pictures", *given)
    assert result.exit_code == 0, result.output
    signal.raise_signal(signal.SIGUSR1)
    assert opened == devices and reached["closed"] and reached["reloaded"] == len(devices)


def test_with_ray_each_gpu_of_the_cluster_has_an_actor(run, reached, monkeypatch):
    """The GPUs of this machine do not matter, and the cluster of this process stays up. An actor has one model."""
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 3.0, "CPU": 8.0})
    monkeypatch.setattr(ray, "shutdown", pytest.fail)
    opened = devices_of_workers(monkeypatch)
    result = run("serve", "-m", "pictures", "--engine", "ray")
    assert result.exit_code == 0, result.output
    assert opened == ["cuda"] * 3 and reached["closed"]
    assert "--max-models: must be 1" in run("serve", "-m", "pictures", "--engine", "ray", "--max-models", 2).stderr


def test_models_have_the_names_that_clients_use(saved):
    """Of a folder its last part, so that its path stays hidden. All are there, and no two have the same name."""
    folder = str(saved("flux"))
    names = {Path(folder).name: folder, "a": folder, "demo-flux": "demo-flux", "owner/name": "owner/name"}
    assert serve.named_models([folder, f"a={folder}", "demo-flux", "owner/name"]) == names
    for texts, message in (
        ([folder, folder], "names that differ"),
        (["=x", "demo-flux"], "names that differ"),
        (["demo-flux", "b=./nowhere"], "is not a pipeline's folder"),
    ):
        with pytest.raises(ArgumentError, match=message):
            serve.named_models(texts)


@pytest.mark.parametrize(
    ("given", "message"),
    [(("--gpus", 3), "must be at most 2"), (("--gpus", 1, "--device", "cpu"), "needs CUDA GPUs, but --device is cpu")],
)
def test_missing_gpus_are_an_error(run, reached, monkeypatch, given, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    result = run("serve", "-m", "pictures", *given)
    assert result.exit_code == 2 and f"error: --gpus: {message}" in result.stderr
