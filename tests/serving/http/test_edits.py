"""`POST /v1/images/edits`: forms with an image, as OpenAI's client sends them, and their errors."""

import asyncio
import base64
import io

import numpy as np
import pytest
from PIL import Image

from dit_accel.errors import ArgumentError
from dit_accel.serving.pipelines import Setup, call_arguments
from dit_accel.serving.worker import Worker
from tests.models.tiny import images
from tests.serving.http.test_server import LIMITS, Held, called, events, httpx, image, released, running, send

openai = pytest.importorskip("openai")
PATH = "/v1/images/edits"
FORM = {"prompt": "a fox", "size": "32x48", "steps": "6", "seed": "3"}


def file(side=(40, 24), form="png"):
    pixels = np.random.default_rng(0).integers(0, 256, (side[1], side[0], 3), np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, form)
    return data.getvalue()


PNG = ("in.png", file())
WHOLE = b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na fox\r\n'  # up to its last boundary


def post(app, **request):
    return send(app, "POST", PATH, **request)


@pytest.fixture(scope="module")
def editor(saved):
    return Worker(Setup(str(saved("flux-img2img"))))


@pytest.mark.parametrize("preset", ["none", "balanced"])
def test_an_edit_equals_the_pipelines_image(editor, preset):
    """Fields of the form have the meaning of those in JSON, and `strength` reaches the pipeline."""
    arguments = {"prompt": "a fox", "num_inference_steps": 6, "width": 32, "height": 48, "strength": 0.5}
    expected = called(editor, preset != "none" and preset, **arguments, image=Image.open(io.BytesIO(file())))
    with running(editor) as (app, _):
        form = FORM | {"preset": preset, "strength": "0.5", "output_compression": "100"}
        answer = post(app, data=form, files={"image": PNG})
    assert answer.status_code == 200, answer.text
    (entry,) = answer.json()["data"]
    np.testing.assert_array_equal(image(entry), expected)


def test_a_stream_of_an_edit_has_openais_events(editor):
    with running(editor) as (app, _):
        answer = post(app, data=FORM | {"stream": "true"}, files={"image": PNG})
    *steps, (last, content) = events(answer.text)
    assert {name for name, _ in steps} == {"image_edit.progress"} and last == "image_edit.completed"
    assert base64.b64decode(content["b64_json"]).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "kind", "status", "code"),
    [
        (b"{}", "application/json", 400, "invalid_form"),
        (b"prompt=a", "application/x-www-form-urlencoded", 400, "invalid_form"),
        (b"--x\r\n", "multipart/form-data", 400, "invalid_form"),
        (b"no form", "multipart/form-data; boundary=x", 400, "invalid_form"),
        (b"--x\r\n\r\nvalue\r\n--x--", "multipart/form-data; boundary=x", 400, "invalid_form"),
        (WHOLE + b"--x--\r\n", "multipart/form-data; boundary=x", 400, "missing_required_parameter"),
        (WHOLE, "multipart/form-data; boundary=x", 400, "invalid_form"),
        (b" " * LIMITS.upload, "multipart/form-data; boundary=x", 400, "invalid_form"),
        (b" " * (LIMITS.upload + 1), "multipart/form-data; boundary=x", 413, "body_too_large"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_body_that_is_no_form_is_refused(content, kind, status, code):
    with running(Held()) as (app, _):
        answer = post(app, content=content, headers={"Content-Type": kind})
    assert answer.status_code == status and answer.json()["error"]["code"] == code


@pytest.mark.parametrize("end", [b"--x--\r\n", WHOLE + b"--x--\r\n"], ids=["last", "not last"])
@pytest.mark.parametrize("file", [b"", b'; filename="a.png"'], ids=["text", "file"])
def test_a_field_without_a_body_is_named(file, end):
    """Only headers and an empty line precede the boundary, so that a parser takes it for the field's value."""
    content = WHOLE + b'--x\r\nContent-Disposition: form-data; name="size"%b\r\n\r\n%b' % (file, end)
    with running(Held()) as (app, _):
        answer = post(app, content=content, headers={"Content-Type": "multipart/form-data; boundary=x"})
    error = {"message": "the form's field 'size' has no body", "param": "size", "code": "invalid_form"}
    assert answer.status_code == 400 and answer.json()["error"] == error | {"type": "invalid_request_error"}


def openai_client(app):
    own = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here/v1")
    return openai.AsyncOpenAI(base_url="http://here/v1", api_key="none", http_client=own)


def test_openais_client_edits_an_image(editor):
    """The client's own form, with further fields in `extra_body`, reaches the application."""

    async def ask(app):
        async with openai_client(app) as http:
            given = {"prompt": "a fox", "size": "32x48", "extra_body": {"steps": 6, "seed": 3}}
            one = await http.images.edit(image=PNG, n=1, **given)
            several = await http.images.edit(image=[PNG], **given)
            params = []
            for refused, message in (
                ({"image": PNG, "mask": PNG}, "takes no mask_image"),
                ({"image": [PNG, PNG]}, "takes one image, got 2"),
            ):
                with pytest.raises(openai.BadRequestError, match=f"FluxImg2ImgPipeline {message}") as failure:
                    await http.images.edit(**refused, **given)
                params.append(failure.value.param)
            return one, several, params

    with running(editor) as (app, _):
        one, several, params = asyncio.run(ask(app))
        (entry,) = post(app, data=FORM, files={"image": PNG}).json()["data"]
    assert one.data[0].b64_json == entry["b64_json"] == several.data[0].b64_json
    assert params == ["mask", "image"]


def mask(kind):
    """A mask whose left half is to be changed: transparent as OpenAI's, or white as diffusers'."""
    levels = np.zeros((24, 40), np.uint8)
    levels[:, :20] = 255
    data = io.BytesIO()
    if kind == "transparent":
        image = Image.fromarray(np.dstack([levels, levels, levels, 255 - levels]))
    else:
        image = Image.fromarray(levels)
    image.save(data, "png")
    return ("mask.png", data.getvalue())


def test_a_mask_says_where_the_image_changes(saved):
    """Both kinds give the image of an inpainting pipeline; its `mask_image` is white where it changes."""
    with running(worker := Worker(Setup(str(saved("flux-fill"))))) as (app, _):
        kinds = [mask("transparent"), mask("white")]
        answers = [post(app, data=FORM | {"preset": "none"}, files={"image": PNG, "mask": kind}) for kind in kinds]
        more = {"size": "32x48", "extra_body": {"steps": 6, "seed": 3, "preset": "none"}}
        edited = asyncio.run(openai_client(app).images.edit(image=PNG, mask=kinds[0], prompt="a fox", **more))
    assert edited.data[0].b64_json == answers[0].json()["data"][0]["b64_json"]
    given, white = (Image.open(io.BytesIO(data)) for _, data in (PNG, mask("white")))
    arguments = {"prompt": "a fox", "num_inference_steps": 6, "width": 32, "height": 48}
    expected = called(worker, **arguments, image=given, mask_image=white)
    for answer in answers:
        np.testing.assert_array_equal(image(answer.json()["data"][0]), expected)


@pytest.mark.parametrize("name", ["image", "image[]"])
def test_several_images_stay_in_their_order(name):
    """The job has a list of them, in both forms of the field's name."""
    held, seen = released(), []
    held.run, run = lambda jobs, *rest: seen.append(jobs[0].settings["image"]) or run(jobs, *rest), held.run
    files = [(name, (f"{width}.png", file((width, 8)))) for width in (16, 24)]
    with running(held) as (app, _):
        assert post(app, data=FORM, files=files).status_code == 200
    assert [each.size for each in seen[0]] == [(16, 8), (24, 8)]


def test_only_some_pipelines_take_several_images():
    """Others take a list as a batch, so that it is an error."""
    options = {"prompt": "a fox", "image": [Image.new("RGB", (16, 16))] * 2}
    assert call_arguments(images.flux2()[0], "a/model", options)["image"] == options["image"]
    with pytest.raises(ArgumentError, match="takes one image, got 2"):
        call_arguments(images.qwen_image_edit()[0], "a/model", options)
