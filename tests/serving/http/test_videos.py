"""`/v1/videos`: jobs through OpenAI's client and over HTTP, their fields, statuses, files and errors."""

import asyncio
import io
import logging
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from dit_accel import restore_pipeline
from dit_accel.errors import OutOfMemoryError
from dit_accel.serving import pipelines
from dit_accel.serving.engine import VideoForm
from dit_accel.serving.media import Clips
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.worker import Worker
from tests.cli.test_stream import helios
from tests.serving.http.test_edits import PNG
from tests.serving.http.test_server import LIMITS, Held, called, client, httpx, metric, released, running, until

uvicorn = pytest.importorskip("uvicorn")
videos = pytest.importorskip("dit_accel.serving.http.videos")
configured = pytest.importorskip("dit_accel.serving.http.connections").configured

PATH = "/v1/videos"
FORM = VideoForm(fps=16.0, frames_unit=4)
GOOD = {"prompt": "a fox", "size": "32x48", "steps": 4, "seed": 3, "num_frames": 5}
OWN = {key: GOOD[key] for key in ("steps", "seed", "num_frames")}
VIDEO_LIMITS = replace(LIMITS, frames=33)


@pytest.fixture(scope="module")
def worker(saved):
    pytest.importorskip("imageio_ffmpeg")
    return Worker(Setup(str(saved("wan"))))


@contextmanager
def making(worker, *, limits=VIDEO_LIMITS, form=FORM, preset="video-balanced", store=None, **more):
    """An application whose pipeline makes videos, and its dispatcher."""
    with (
        store or videos.VideoStore(limits) as store,
        running(worker, limits=limits, preset=preset, form=form, videos=store, **more) as both,
    ):
        yield both


@contextmanager
def listening(app):
    site = uvicorn.Server(configured(app, LIMITS, port=0))
    thread = threading.Thread(target=site.run, daemon=True)
    thread.start()
    asyncio.run(until(lambda: site.started))
    try:
        yield f"http://127.0.0.1:{site.servers[0].sockets[0].getsockname()[1]}"
    finally:
        site.should_exit = True
        thread.join()
        logging.getLogger("dit_accel.serving").handlers.clear()  # uvicorn's, which write to the captured stderr


async def ended(http, video_id):
    async with asyncio.timeout(60):
        while (job := (await http.get(f"{PATH}/{video_id}")).json())["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.005)
    return job


def ask(worker, conversation, **how):
    """The result of `conversation(http, dispatcher)` with an application whose pipeline makes videos."""

    async def talk(app, dispatcher):
        async with client(app) as http:
            return await conversation(http, dispatcher)

    with making(worker, **how) as (app, dispatcher):
        return asyncio.run(talk(app, dispatcher))


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
def test_openais_client_makes_a_video(worker, run, tmp_path, monkeypatch):
    """Create, poll, retrieve, list, download and delete; the file has the bytes of that of `generate`."""
    openai = pytest.importorskip("openai")
    with making(worker, form=worker.loaded.form) as (app, _), listening(app) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as http:
            first = http.videos.create(prompt="owl", model="tiny", size="32x32", seconds="1", extra_body={"steps": 2})
            made = http.videos.create_and_poll(prompt="a fox", size="32x48", poll_interval_ms=20, extra_body=OWN)
            assert http.videos.retrieve(made.id) == made
            assert [each.id for each in http.videos.list(limit=1)] == [made.id, first.id]
            assert [each.id for each in http.videos.list(order="asc").data] == [first.id, made.id]
            data = http.videos.download_content(made.id).content
            assert http.videos.delete(made.id).deleted
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                http.videos.download_content(made.id)
            with pytest.raises(openai.BadRequestError, match="size must have sides") as failure:
                http.videos.create(prompt="a fox", size="720x1280")
        assert metric(app, 'dit_accel_requests_total{outcome="ok"}') == 2
        assert metric(app, 'dit_accel_requests_total{outcome="invalid"}') == 1
    assert first.status in ("queued", "in_progress") and first.seconds == "1.06" and failure.value.param == "size"
    assert (made.object, made.status, made.progress, made.error) == ("video", "completed", 100, None)
    assert (made.model, made.prompt, made.size, made.seconds) == ("tiny", "a fox", "32x48", "0.31")
    assert (made.num_frames, made.fps, made.seed, made.preset) == (5, 16.0, 3, "video-balanced")
    assert made.expires_at - made.completed_at == VIDEO_LIMITS.kept and 0 < made.computed_fraction <= 1
    options = ("--prompt", "a fox", "--width", 32, "--height", 48, "--steps", 4, "--seed", 3, "--num-frames", 5)
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *_: worker.pipe)  # weights elsewhere may round differently
    result = run("generate", "--model", worker._setup.model, *options, "--output", "fox.mp4")
    assert result.exit_code == 0, result.output
    assert data == (tmp_path / "fox.mp4").read_bytes()


def test_a_request_has_its_own_frame_rate_and_preset(worker):
    """`fps` is that of the file; plain names of presets have their form for videos."""

    async def conversation(http, _):
        posted = (await http.post(PATH, json=GOOD | {"fps": 4, "preset": "turbo", "target_error": 0.9})).json()
        job = await ended(http, posted["id"])
        return job, (await http.get(f"{PATH}/{job['id']}/content")).content

    imageio = pytest.importorskip("imageio.v3")
    job, data = ask(worker, conversation)
    assert (job["preset"], job["seconds"], job["fps"]) == ("video-turbo", "1.25", 4.0)
    assert imageio.immeta(data, extension=".mp4", plugin="FFMPEG")["fps"] == 4.0
    assert imageio.imread(data, extension=".mp4", plugin="FFMPEG").shape == (5, 48, 32, 3)


def test_a_video_begins_with_its_input_reference(saved, tmp_path):
    """The image of a form reaches an image-to-video pipeline, and the video equals the pipeline's own."""
    pytest.importorskip("imageio_ffmpeg")

    async def conversation(http, _):
        fields = {key: str(value) for key, value in (GOOD | {"preset": "none"}).items()}
        with_image = await http.post(PATH, data=fields, files={"input_reference": PNG})
        jobs = [await ended(http, each.json()["id"]) for each in (with_image, await http.post(PATH, json=GOOD))]
        return jobs, (await http.get(f"{PATH}/{jobs[0]['id']}/content")).content

    (made, failed), data = ask(worker := Worker(Setup(str(saved("wan-i2v")))), conversation)
    assert made["status"] == "completed" and failed["status"] == "failed"
    assert failed["error"]["param"] == "input_reference" and "needs an input image" in failed["error"]["message"]
    arguments = {"prompt": "a fox", "num_inference_steps": 4, "width": 32, "height": 48, "num_frames": 5}
    frames = called(worker, **arguments, image=Image.open(io.BytesIO(PNG[1])))
    Clips(16.0).write(np.round(255 * np.clip(frames, 0, 1)).astype(np.uint8), tmp_path / "own.mp4")
    assert data == (tmp_path / "own.mp4").read_bytes()


def test_a_failed_job_has_the_reason():
    """Errors of the library are shown, others only in the log."""

    async def conversation(http, _):
        posted = [await http.post(PATH, json=GOOD | {"prompt": prompt}) for prompt in ("memory", "secret")]
        jobs = [await ended(http, each.json()["id"]) for each in posted]
        return jobs, await http.get(f"{PATH}/{jobs[0]['id']}/content"), (await http.get("/metrics")).text

    jobs, content, counted = ask(Held(), conversation)
    assert {job["status"] for job in jobs} == {"failed"} and jobs[0]["completed_at"] is None
    assert [job["error"]["code"] for job in jobs] == ["failed"] * 2
    assert jobs[0]["error"]["message"] == "out of memory: use less" and "path" not in jobs[1]["error"]["message"]
    assert content.status_code == 400 and content.json()["error"]["code"] == "not_ready"
    assert 'dit_accel_requests_total{outcome="failed"} 2.0' in counted


def test_pages_of_a_list_follow_each_other():
    """`after` continues where a page ended, in both orders."""

    async def conversation(http, _):
        ids = [(await http.post(PATH, json=GOOD)).json()["id"] for _ in range(3)]
        pages = {}
        for order, after in (("asc", ids[0]), ("desc", ids[1])):
            pages[order] = (await http.get(PATH, params={"order": order, "after": after, "limit": 1})).json()
        return ids, (await http.get(PATH)).json(), pages

    ids, whole, pages = ask(released(), conversation)
    assert [job["id"] for job in whole["data"]] == ids[::-1] and whole["has_more"] is False
    assert [job["id"] for job in pages["asc"]["data"]] == [ids[1]] and pages["asc"]["has_more"]
    assert (pages["desc"]["first_id"], pages["desc"]["last_id"], pages["desc"]["has_more"]) == (ids[0], ids[0], False)


@pytest.mark.parametrize(
    ("path", "param", "status"),
    [
        ("?limit=0", "limit", 400),
        ("?limit=101", "limit", 400),
        ("?limit=1&limit=2", "limit", 400),
        ("?order=up", "order", 400),
        ("?after=video_0", "after", 404),
        ("?cursor=1", "cursor", 400),
        ("/video_0", "video_id", 404),
        ("/video_0/content?variant=thumbnail", "variant", 400),
    ],
)
def test_a_wrong_parameter_is_named(path, param, status):
    answer = ask(Held(), lambda http, _: http.get(PATH + path))
    assert answer.status_code == status and answer.json()["error"]["param"] == param


def followed(run, form):
    """The content of a video that `run` makes slowly, as parts with the job's status when they came, and its end."""

    def slow(jobs, preset, suffix, tell):
        return run(jobs, preset, suffix, lambda *event: (tell(*event), time.sleep(0.05)))

    async def talk(url):
        async with httpx.AsyncClient(base_url=url) as http:
            asked = GOOD | {"size": "48x48", "num_frames": 15, "stream": True}
            parts, path = [], f"{PATH}/{(await http.post(PATH, json=asked)).json()['id']}"
            try:
                async with http.stream("GET", f"{path}/content") as answer:
                    async for part in answer.aiter_bytes():
                        parts.append(((await http.get(path)).json()["status"], part))
            except httpx.RemoteProtocolError as error:
                return parts, str(error)
            return parts, (await http.get(f"{path}/content")).content

    (worker := Held()).run = slow
    with making(worker, form=form) as (app, _), listening(app) as url:
        return asyncio.run(talk(url))


def test_a_video_in_chunks_is_sent_while_it_grows(monkeypatch):
    """The growing file has the frames of the final one, and its first ones come before the last steps of all chunks."""
    imageio = pytest.importorskip("imageio.v3")
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *_: helios())
    worker = Worker(Setup("helios", call={"num_latent_frames_per_chunk": 2, "history_sizes": [4, 2, 1]}))
    told = []

    def run(*call):
        return worker.run(*call[:-1], lambda *step: (told.append(step[:2]), call[-1](*step)))

    parts, whole = followed(run, worker.loaded.form)
    restore_pipeline(worker.pipe)
    files = b"".join(part for _, part in parts), whole
    grown, final = (imageio.imread(data, extension=".mp4", plugin="FFMPEG") / 255 for data in files)
    assert [status for status, _ in parts].count("in_progress") >= 4
    assert list(dict.fromkeys(told)) == [*((done, 20) for done in range(21)), (1, 1)]  # 5 chunks of 4 steps
    assert len(grown) == len(final) == 15 and np.abs(grown - final).mean() < 0.02


@pytest.mark.parametrize("end", ["fails", "again"])
def test_an_answer_breaks_off_where_its_file_ends(end, capfd):
    """The run fails, or its process dies and the next one writes the file from its start; neither is a defect."""
    parts = [b"\0\0\0\x1cftyp", b"moof"]

    def run(jobs, preset, suffix, tell):
        for part in (*parts, b"", *parts):
            tell(1, 3, part)
            if end == "fails" and not part:
                raise OutOfMemoryError("out of memory: use less")
        return released().run(jobs, preset, suffix, lambda *_: None)

    sent, problem = followed(run, replace(FORM, in_chunks=True))
    assert [part for _, part in sent] == parts and "incomplete chunked read" in problem
    assert "Traceback" not in capfd.readouterr().err
