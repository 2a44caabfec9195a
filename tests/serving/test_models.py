"""Several models in one server: which are loaded, which leave, and whose result a request gets."""

import asyncio
import random
from unittest.mock import Mock

import pytest

from dit_accel.errors import ArgumentError, DitAccelError, OutOfMemoryError
from dit_accel.serving.dispatcher import LONGEST_OVERTAKEN, Dispatcher
from dit_accel.serving.engine import Loaded, Made, VideoForm
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.prompts import Job
from dit_accel.serving.remote_worker import RemoteWorker
from tests.serving.http.test_edits import PNG
from tests.serving.http.test_server import GOOD, LIMITS, PATH, client
from tests.serving.http.test_videos import making
from tests.serving.test_dispatcher import Noted

JOB = Job(0, {})


class Device:
    """Starts processes of models in a memory of some units, of which a model takes one unless it is in ``units``."""

    def __init__(self, memory=100, **units):
        self.memory, self.units, self.run, self.loaded, self.starts = memory, units, 0, [], []
        self.lack = lambda: OutOfMemoryError("out of memory")

    def start(self, setup):
        self.starts.append(setup.model)
        return Process(self, setup.model)

    def worker(self, most, *models):
        setups = {model: Setup(model) for model in models}
        worker = RemoteWorker(setups[models[0]], None, self.start, models=setups, most=most)
        worker.wait()
        return worker

    def lacks(self, units):
        return units + sum(self.units.get(model, 1) for model in self.loaded) > self.memory


class Process:
    def __init__(self, device, model):
        self.device, self.model, self.is_ready, self.log = device, model, False, "its log is above"

    def send(self, message):
        self.is_ready = True

    def receive(self, patience):
        if self.model == "missing":
            return ArgumentError("model", "/secret/path can't be loaded")
        if self.device.lacks(self.device.run if self.is_ready else self.device.units.get(self.model, 1)):
            return self.device.lack()
        if self.is_ready:
            return [Made(PNG[1], 0.0, None, [0], {f"by {self.model}": 1.0}, (5, 48, 32))]
        self.device.loaded.append(self.model)
        return Loaded(VideoForm(16.0, 4) if self.model == "video" else None, None, ".png", None)

    def end(self):
        self.device.loaded = [model for model in self.device.loaded if model != self.model]


def test_the_models_used_last_stay():
    """At most so many are loaded, whatever the order; each run is of the model that was chosen."""
    draw, models = random.Random(0), ["a", "b", "c", "d"]
    for most in (1, 2, 3, 4):
        worker, used = (device := Device()).worker(most, *models), ["a"]
        for model in draw.choices(models, k=40):
            worker.choose(model)
            used = [*(name for name in used if name != model), model][-most:]
            assert sorted(device.loaded) == sorted(used)
            assert list(worker.run([JOB], None, ".png", None)[0].stages) == [f"by {model}"]
    assert sorted(device.starts) == models  # all fit: each loads once
    worker.close()
    assert device.loaded == []


def test_other_models_leave_where_memory_is_short():
    """For a model that loads, and for a run. A model that needs more than the whole memory fails by itself."""
    worker = (device := Device(10, a=4, b=4, c=5, huge=11)).worker(9, "a", "b", "c", "huge")
    worker.choose("b"), worker.choose("c")
    assert device.loaded == ["b", "c"]
    device.run = 5
    worker.run([JOB], None, ".png", None)
    assert device.loaded == ["c"]
    with pytest.raises(DitAccelError, match="huge can't be loaded"):
        worker.choose("huge")
    assert worker.choose("b") and device.loaded == ["b"]
    with pytest.raises(DitAccelError, match="huge can't be loaded"):
        worker.choose("huge")  # not tried again at once
    assert device.loaded == ["b"]


def test_another_model_leaves_if_a_run_has_no_memory_for_a_cuda_context():
    """The process dies without a message; the next attempt has the room of the model that left, and no other leaves."""
    worker = (device := Device(10, a=3, b=3, c=3)).worker(9, "a", "b", "c")
    worker.choose("b"), worker.choose("c")
    device.run, device.lack = 3, Mock(side_effect=EOFError)
    assert list(worker.run([JOB], None, ".png", None)[0].stages) == ["by c"]
    assert device.loaded == ["b", "c"] and device.starts == ["a", "b", "c", "c"]


def test_a_process_that_is_killed_while_it_loads_is_replaced():
    worker = (device := Device()).worker(1, "a", "b")
    device.lacks, device.lack = Mock(side_effect=[True, False]), Mock(side_effect=EOFError)
    assert worker.choose("b") and device.starts == ["a", "b", "b"]


def test_models_load_again_when_asked_to():
    """Each before its next jobs, and once."""
    worker = (device := Device()).worker(2, "a", "b")
    for model in ("b", "reload", "b", "b", "a"):
        worker.reload() if model == "reload" else worker.choose(model)
    assert device.starts == ["a", "b", "b", "a"] and sorted(device.loaded) == ["a", "b"]


@pytest.mark.parametrize(("waited", "order"), [(0.0, [0, 2, 1, 3]), (LONGEST_OVERTAKEN, [0, 1, 3, 2])])
def test_requests_for_the_latest_model_go_first_for_a_while(waited, order):
    """Models load less often then; a request that has waited for long is the next one."""
    dispatcher, begun, tasks = Dispatcher([], 99), [], []
    for number, model in enumerate("abab"):
        tasks.append(Noted())
        tasks[-1].model, tasks[-1].begin = model, lambda _, number=number: begun.append(number)
        dispatcher._waiting.append(tasks[-1])
    tasks[1].created -= waited
    dispatcher.hire(Device().worker(1, "a", "b"))
    assert all(task.ended.wait(60) for task in tasks)
    dispatcher.stop(10.0)
    assert begun == order


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"steps": 13}),
        (PATH, {"preset": "turbi"}),
        (PATH, {"loras": {"ring": 1.0}}),
        (PATH, {"target_error": 0.1, "computed_steps": 3}),
        ("/v1/videos", {"seconds": "1e3"}),
        ("/v1/videos", {"num_frames": 301}),
    ],
    ids=str,
)
def test_nothing_loads_for_a_body_that_is_refused(path, body):
    """A duration that a slow model allows is no such body, so that its model loads."""

    async def ask(app):
        async with client(app) as http:
            refused = await http.post(path, json={"prompt": "a", "model": "video"} | body)
            loaded = [*device.starts]
            return refused, loaded, await http.post("/v1/videos", json={"prompt": "a", "model": "video", "seconds": 9})

    worker, form = (device := Device()).worker(1, "tiny", "video"), VideoForm(100.0, 4)
    with making(worker, limits=LIMITS, form=form, preset=None, others=["video"]) as (app, _):
        refused, loaded, allowed = asyncio.run(ask(app))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == next(iter(body))
    assert loaded == ["tiny"] and allowed.status_code == 200


def test_requests_choose_their_model():
    """Images and videos from one server. Models that it has not, or can't load, cost the others nothing."""
    names = ["tiny", "other", "video", "missing"]

    async def conversation(app):
        async with client(app) as http:
            listed = [model["id"] for model in (await http.get("/v1/models")).json()["data"]]
            video = await http.post("/v1/videos", json={"prompt": "a", "model": "video"})
            wrong = [await http.post(PATH, json=GOOD | {"model": model}) for model in ("video", "none", "missing")]
            wrong.append(await http.post("/v1/videos", json={"prompt": "a", "model": "other"}))
            made = [await http.post(PATH, json=GOOD | more) for more in ({}, {"model": "other"}, {"model": "tiny"})]
            job = (await http.get(f"/v1/videos/{video.json()['id']}")).json()
            return listed, made, job, wrong, await http.get("/health")

    with making(Device().worker(1, *names), limits=LIMITS, form=None, preset=None, others=names[1:]) as (app, _):
        listed, made, job, wrong, health = asyncio.run(conversation(app))
    assert listed == names and health.status_code == 200
    assert [list(answer.json()["data"][0]["seconds"]) for answer in made] == [["by tiny"], ["by other"], ["by tiny"]]
    assert (job["model"], job["status"]) == ("video", "completed") and list(job["stage_seconds"]) == ["by video"]
    assert [answer.status_code for answer in wrong] == [400, 404, 500, 400]
    messages = [answer.json()["error"]["message"] for answer in wrong]
    assert "makes videos, no images: use /v1/videos" in messages[0] and "this server has tiny, other" in messages[1]
    assert "missing can't be loaded; the server's log has the reason" in messages[2]
    assert "makes images, no videos: use /v1/images" in messages[3]
