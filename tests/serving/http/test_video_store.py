"""Jobs of videos that are cancelled, refused, old, too many, foreign or interrupted: nothing is lost, nothing stays."""

import asyncio
import json
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dit_accel.serving.dispatcher import Dispatcher, Group
from dit_accel.serving.engine import Made
from tests.serving.http.test_server import KEYS, LIMITS, Held, client, until
from tests.serving.http.test_videos import FORM, GOOD, PATH, ask, ended, making, released, videos

ClientDisconnect = pytest.importorskip("starlette.requests").ClientDisconnect
api = pytest.importorskip("dit_accel.serving.http.api")
requests = pytest.importorskip("dit_accel.serving.http.requests")


def files(store):
    return list(store.new_file().parent.iterdir())


@pytest.mark.parametrize("place", ["waiting", "running", "completed"])
def test_a_deleted_job_is_gone(place):
    """It leaves the queue, or ends at its next step, or loses its file; the next job is made."""
    held, store = Held(), videos.VideoStore(LIMITS)

    async def conversation(http, dispatcher):
        first = (await http.post(PATH, json=GOOD | {"prompt": "first"})).json()["id"]
        await until(lambda: dispatcher.running)
        second = (await http.post(PATH, json=GOOD | {"prompt": "second"})).json()["id"]
        if place == "completed":
            held.release.set()
            await ended(http, first)
        left, stays = (second, first) if place == "waiting" else (first, second)
        answer = await http.delete(f"{PATH}/{left}")
        assert answer.json() == {"id": left, "object": "video.deleted", "deleted": True}
        for method, rest in (("GET", ""), ("DELETE", ""), ("GET", "/content")):
            assert (await http.request(method, f"{PATH}/{left}{rest}")).status_code == 404
        await until(lambda: place == "completed" or dispatcher.running + dispatcher.waiting == 1)
        held.release.set()
        assert (await ended(http, stays))["status"] == "completed"
        assert [job["id"] for job in (await http.get(PATH)).json()["data"]] == [stays]
        assert len(files(store)) == 1
        return (await http.get("/metrics")).text

    assert ('outcome="cancelled"} 1.0' in ask(held, conversation, store=store)) == (place != "completed")
    assert held.made == {"waiting": ["first"], "running": ["second"], "completed": ["first", "second"]}[place]


MADE = Made(b"video", 0.5, None, [0], {}, (5, 48, 32))


def job_of(file, owner=None):
    entry = SimpleNamespace(id="a", error=None, take=lambda task: None, end=lambda: None)
    served = api.Served("tiny", None, LIMITS, FORM)
    wanted = requests.read(json.dumps(GOOD).encode(), requests.VideoRequest, served)
    return videos.VideoJob(wanted, served, owner, file, entry)


@pytest.fixture
def job(tmp_path):
    return job_of(tmp_path / "0.mp4")


@pytest.fixture
def ended_job():
    """Adds a job to a store, which then ends with a video of this size, or fails."""

    def add(store, size=5, owner=None):
        store.add(job := job_of(store.new_file(), owner))
        job.tell(RuntimeError() if size is None else replace(MADE, data=bytes(size)))
        return job

    return add


def test_ended_jobs_are_limited_in_number_and_age(ended_job, monkeypatch):
    """The oldest video and its file make room for a new one; failed jobs make none go. Age needs no request."""
    monkeypatch.setattr(videos, "SWEEP", 0.01)
    with videos.VideoStore(replace(LIMITS, videos=2, kept=1000.0)) as store:
        jobs = [ended_job(store, size) for size in (5, 5, 5, 5, None, None, None)]
        assert store.of_owner(None) == [jobs[index] for index in (2, 3, 5, 6)] and len(files(store)) == 2
        jobs[2].ended -= 1001
        asyncio.run(until(lambda: len(files(store)) == 1))
        with pytest.raises(api.RequestError, match="no longer kept"):
            store.get(jobs[2].id, None)
        assert store.get(jobs[3].id, None) is jobs[3]
    assert not store.new_file().parent.exists()


@pytest.mark.parametrize("fitting, kept", [(0, 1), (1.999, 1), (2, 2), (9, 3)])
def test_ended_jobs_are_limited_in_bytes(ended_job, fitting, kept):
    """The oldest videos of the same key go first; the latest stays, whatever its size."""
    with videos.VideoStore(replace(LIMITS, video_bytes=int(fitting * 1000))) as store:
        foreign, *jobs = [ended_job(store, 1000, owner) for owner in (1, 0, 0, 0)]
        assert store.of_owner(0) == jobs[-kept:] and store.of_owner(1) == [foreign] and len(files(store)) == kept + 1


@pytest.mark.parametrize("end", [MADE, RuntimeError(), None], ids=["completed", "failed", "cancelled"])
def test_an_ended_job_stays_as_it_ended(job, tmp_path, end):
    """It has no input image any more, and no later event or begin changes it."""
    job.begin()
    for done, progress in ((0, 0), (1, 25), (4, 99)):
        job.step(job.jobs[0], done, 4)
        assert (job.to_json()["progress"], job.status) == (progress, "in_progress") and job.jobs
    job.discard() if end is None else job.tell(end)
    ended, has_file = job.to_json(), end is MADE
    state = (100, "completed") if has_file else (99, "failed")
    assert job.jobs == [] and (ended["progress"], ended["status"]) == state
    assert job.bytes == (len(MADE.data) if has_file else 0) and (tmp_path / "0.mp4").exists() == has_file
    job.begin()
    for late in (videos.Step(None, 1, 4), RuntimeError("late"), None, *([] if has_file else [MADE])):
        job.tell(late)
    assert job.to_json() == ended and (tmp_path / "0.mp4").exists() == has_file


@pytest.mark.parametrize("problem", ["deleted", "full"])
def test_half_a_file_does_not_stay(monkeypatch, problem):
    """The job is deleted while its file is written, or the disk is full; the next job is made."""
    store, begun, go_on = videos.VideoStore(LIMITS), threading.Event(), threading.Event()
    write = Path.write_bytes

    def write_slowly(path, data):
        monkeypatch.undo()
        write(path, data[: len(data) // 2])
        begun.set()
        go_on.wait(60)
        if problem == "full":
            raise OSError("no space left")
        write(path, data)

    async def conversation(http, dispatcher):
        job = (await http.post(PATH, json=GOOD)).json()["id"]
        await asyncio.to_thread(begun.wait, 60)
        assert (await http.get(f"{PATH}/{job}")).json()["status"] == "in_progress" and len(files(store)) == 1
        if problem == "deleted":
            assert (await http.delete(f"{PATH}/{job}")).status_code == 200
        go_on.set()
        await until(lambda: not dispatcher.running)
        assert files(store) == []
        if problem == "full":
            assert (await http.get(f"{PATH}/{job}")).json()["error"]["code"] == "failed"
        assert (await ended(http, (await http.post(PATH, json=GOOD)).json()["id"]))["status"] == "completed"

    monkeypatch.setattr(Path, "write_bytes", write_slowly)
    ask(released(), conversation, store=store)


def test_a_cleaned_temporary_folder_is_made_again():
    """Other users can't read the new one either."""
    store = videos.VideoStore(LIMITS)

    async def conversation(http, _):
        store.new_file().parent.rmdir()
        job = await ended(http, (await http.post(PATH, json=GOOD)).json()["id"])
        assert job["status"] == "completed" and len(files(store)) == 1
        assert store.new_file().parent.stat().st_mode & 0o077 == 0

    ask(released(), conversation, store=store)


@pytest.mark.parametrize("share, code", [(0.9, None), (1.1, "timeout")])
@pytest.mark.parametrize("count", [1, 2])
def test_a_running_video_has_a_limit_of_its_own(monkeypatch, tmp_path, count, share, code):
    """The time in the queue does not count; a run that takes longer ends at its next step. A shared call may."""
    clock, jobs = SimpleNamespace(now=0.0), [job_of(tmp_path / name) for name in "ab"[:count]]
    monkeypatch.setattr(videos, "time", SimpleNamespace(monotonic=lambda: clock.now, time=time.time))

    class Slow:
        def run(self, given, preset, suffix, tell):
            clock.now += share * len(given) * LIMITS.seconds
            tell(1, 2)
            return [MADE] * len(given)

    clock.now, queue = 5 * LIMITS.seconds, Dispatcher([], 2, 2)
    assert queue._run(Slow(), jobs[0] if count == 1 else Group(jobs, queue._retry))
    assert [(job.to_json()["error"] or {}).get("code") for job in jobs] == [code] * count


@pytest.mark.parametrize("end", ["close", "stop"])
def test_the_end_of_a_server_cancels_its_jobs(end):
    """A waiting job and the running one fail with a reason, before connections end that follow the growing video."""
    held = Held()

    async def conversation(http, dispatcher):
        ids = [(await http.post(PATH, json=GOOD)).json()["id"] for _ in range(2)]
        await until(lambda: (dispatcher.running, dispatcher.waiting) == (1, 1))
        await asyncio.to_thread(getattr(dispatcher, end), *[10.0] * (end == "stop"))
        late, health = await http.post(PATH, json=GOOD), await http.get("/health")
        return late, health, [(await ended(http, each))["error"] for each in ids]

    late, health, errors = ask(held, conversation)
    assert late.status_code == health.status_code == 503 and held.made == []
    assert late.headers["retry-after"] == "10" and health.json()["status"] == "shutting down"
    assert [(error["code"], error["message"]) for error in errors] == [("busy", "the server is shutting down")] * 2


def test_a_key_has_its_own_videos():
    """The id of another key's video leads nowhere."""

    async def conversation(app):
        mine, theirs = ({"Authorization": f"Bearer {key}".encode()} for key in KEYS)
        async with client(app) as http:
            video = (await http.post(PATH, json=GOOD, headers=mine)).json()["id"]
            for path in (f"/{video}", f"/{video}/content", f"?after={video}"):
                assert (await http.get(PATH + path, headers=theirs)).status_code == 404
            assert (await http.delete(f"{PATH}/{video}", headers=theirs)).status_code == 404
            assert (await http.get(PATH, headers=theirs)).json()["data"] == []
            assert [job["id"] for job in (await http.get(PATH, headers=mine)).json()["data"]] == [video]
            assert (await http.get(PATH)).status_code == 401

    with making(released(), keys=KEYS) as (app, _):
        asyncio.run(conversation(app))


def test_a_video_may_be_deleted_while_it_is_sent(job, tmp_path):
    """Its client gets the whole file, and the folder loses it at once."""
    job.tell(MADE)
    sent = videos._chunks(job.open())
    job.discard()
    assert not (tmp_path / "0.mp4").exists() and b"".join(sent) == MADE.data


IDS = ["%2e%2e", "..%2f..%2fetc%2fpasswd", "%00", "video_", "ü" * 500, "%ff", "'; --", "00000000.mp4", "\\", "%0d%0a"]


def test_a_wrong_id_names_no_file():
    """Every route answers 404, and no file is changed."""

    async def conversation(http, _):
        job = await ended(http, (await http.post(PATH, json=GOOD)).json()["id"])
        routes = [(f"/{wrong}", f"/{wrong}/content", f"/{job['id']}/{wrong}") for wrong in IDS]
        paths = [PATH + path for route in routes for path in route]
        answers = [await http.request(method, path) for path in paths for method in ("GET", "DELETE")]
        return answers, await http.get(f"{PATH}/{job['id']}/content")

    answers, content = ask(released(), conversation)
    assert {answer.status_code for answer in answers} <= {404, 405} and content.status_code == 200
    assert all(set(answer.json()["error"]) == {"message", "type", "param", "code"} for answer in answers)


def test_hostile_bodies_are_refused():
    """200 random bodies, JSON and forms: each that is no job has status 4xx and a short error in OpenAI's shape."""
    draw = random.Random(1)
    values = ["", "\0", "ü" * 5000, "../../etc/passwd", "1e9", "-1", "nan", "९", "4" * 400, "<script>", "true", "2" * 7]
    odd = [None, True, [], {}, [[]] * 20, -0.0, 1e308, 2**70, {"a": {"b": None}}, {"../ring": 1}, 1e-300]
    names = ["seconds", "fps", "preset", "guidance", "input_reference", "id", "status", "__class__", "ü", "image[]"]
    names += GOOD

    def form():
        kind = lambda: draw.choice([None, "in.png", "../in.mp4", "\0"])  # noqa: E731
        return [(draw.choice(names), (kind(), draw.choice(values))) for _ in range(draw.randint(1, 5))]

    async def conversation(http, _):
        answers = []
        for place in range(200):
            wrong = GOOD | {draw.choice(names): draw.choice(values + odd) for _ in range(draw.randint(1, 4))}
            answers.append(await http.post(PATH, **{"files": form()} if place % 2 else {"json": wrong}))
            if answers[-1].status_code == 200:
                await ended(http, answers[-1].json()["id"])
        return answers

    answers = [answer for answer in ask(released(), conversation) if answer.status_code != 200]
    assert len(answers) > 150 and {answer.status_code for answer in answers} <= {400, 404, 413}
    assert all(set(answer.json()["error"]) == {"message", "type", "param", "code"} for answer in answers)
    assert max(len(answer.content) for answer in answers) < 2000
