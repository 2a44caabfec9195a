"""Limits of requests at their exact values, and the fields of several images, without a server."""

import asyncio
import io
import json
from dataclasses import replace

import pytest
from PIL import Image

pytest.importorskip("fastapi")
from fastapi import Request
from starlette.datastructures import FormData

from dit_accel.serving.engine import VideoForm
from dit_accel.serving.http import requests
from dit_accel.serving.http.api import Limits, RequestError, Served
from dit_accel.serving.http.bodies import read_body, read_form

LIMITS = Limits(side=96, steps=9, images=2, frames=33)
FORM = VideoForm(fps=16.0, frames_unit=4)
KINDS = {"images": requests.ImageRequest, "edits": requests.EditRequest, "videos": requests.VideoRequest}


def file(size, mode="RGB", colour=0):
    data = io.BytesIO()
    Image.new(mode, size, colour).save(data, "png")
    return data.getvalue()


def read(kind, limits, fields):
    """Read a body or a form; return the request, or the field that is refused."""
    if kind == "edits":
        body = [("prompt", "a fox"), *((name, each) for name, value in fields.items() for each in value)]
    else:
        body = json.dumps({"prompt": "a fox"} | fields).encode()
    try:
        return requests.read(body, KINDS[kind], Served("tiny", None, limits, FORM))
    except RequestError as error:
        return error.param


@pytest.mark.parametrize(
    ("kind", "largest", "beyond"),
    [
        ("images", {"size": "96x32"}, {"size": "112x32"}),
        ("images", {"size": "32x96"}, {"size": "32x112"}),
        ("images", {"size": "16x32"}, {"size": "0x32"}),
        ("images", {"size": "32x16"}, {"size": "32x0"}),
        ("images", {"size": "48x32"}, {"size": "48x40"}),
        ("images", {"steps": 9}, {"steps": 10}),
        ("images", {"n": 2}, {"n": 3}),
        ("images", {"guidance": 0}, {"guidance": -0.1}),
        ("images", {"seed": 2**63 - 1}, {"seed": 2**63}),
        ("images", {"prompt": "a" * 4000}, {"prompt": "a" * 4001}),
        ("images", {"partial_images": 3, "stream": True}, {"partial_images": 4, "stream": True}),
        ("edits", {"image": [file((96, 8))]}, {"image": [file((97, 8))]}),
        ("edits", {"image": [file((8, 96))]}, {"image": [file((8, 97))]}),
        ("edits", {"image": [file((8, 8))] * 2}, {"image": [file((8, 8))] * 3}),
        ("edits", {"image": [file((8, 8)), file((96, 8))]}, {"image": [file((8, 8)), file((8, 97))]}),
        ("videos", {"num_frames": 33}, {"num_frames": 34}),
        ("videos", {"seconds": 2}, {"seconds": 2.25}),
        ("videos", {"seconds": 4, "fps": 8}, {"seconds": 4.5, "fps": 8}),
        ("videos", {"size": "32x96"}, {"size": "32x112"}),
        ("videos", {"fps": 100}, {"fps": 101}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_limit_is_the_largest_value(kind, largest, beyond):
    """The limit itself is accepted, for each side of an image, and the next value is refused by its field's name."""
    assert not isinstance(read(kind, LIMITS, largest), str | None)
    assert read(kind, LIMITS, beyond) == next(iter(beyond))


@pytest.mark.parametrize("limits", [replace(LIMITS, images=0), replace(LIMITS, steps=0)], ids=["images", "steps"])
def test_a_limit_of_0_accepts_nothing(limits):
    assert isinstance(read("images", limits, {}), str)


@pytest.mark.parametrize(
    ("mode", "colour", "level"),
    [("L", 255, 255), ("L", 0, 0), ("RGBA", (255, 255, 255, 0), 255), ("RGBA", (0, 0, 0, 255), 0), ("RGB", 0, 0)],
    ids=["white", "black", "transparent", "opaque", "colours"],
)
def test_a_mask_of_one_value_is_that_everywhere(mode, colour, level):
    """Also one that is transparent everywhere, which has no opaque pixel to compare with."""
    request = read("edits", LIMITS, {"image": [file((24, 8))], "mask": [file((24, 8), mode, colour)]})
    assert request.mask.mode == "L" and request.mask.getextrema() == (level, level)


@pytest.mark.parametrize("colour", [0, 255])
def test_a_mask_changes_where_it_is_transparent(colour):
    """The colours of a mask count nothing where it is transparent."""
    mask = Image.new("RGBA", (24, 8), (colour, colour, colour, 255))
    mask.paste((colour, colour, colour, 0), (0, 0, 6, 8))
    mask.save(data := io.BytesIO(), "png")
    made = read("edits", LIMITS, {"image": [file((24, 8))], "mask": [data.getvalue()]}).mask
    assert [made.getpixel((x, 7)) for x in (0, 5, 6, 23)] == [255, 255, 0, 0]


def test_a_mask_has_the_size_of_the_first_image():
    """Both sides count, and the second image's do not."""
    images = [file((24, 8)), file((8, 24))]
    assert read("edits", LIMITS, {"image": images, "mask": [file((24, 8), "L")]}).mask.size == (24, 8)
    for size in ((8, 24), (24, 16), (16, 8)):
        assert read("edits", LIMITS, {"image": images, "mask": [file(size, "L")]}) == "mask"


def test_jobs_have_their_own_seeds_and_share_all_else():
    """Seeds follow each other from the given one; width and height are not exchanged."""
    request = read("images", LIMITS, {"n": 2, "seed": 7, "size": "96x32", "negative_prompt": "", "guidance": 0})
    common = {"prompt": "a fox", "negative-prompt": "", "height": 32, "width": 96, "guidance": 0}
    assert [job.settings for job in request.jobs()] == [common | {"seed": 7}, common | {"seed": 8}]
    assert [job.index for job in request.jobs()] == [0, 1]


@pytest.mark.parametrize("seconds, fps, frames", [(1, None, 17), (1, 8, 9), (0.01, None, 1), (0.2, None, 5)])
def test_seconds_become_the_nearest_number_of_frames(seconds, fps, frames):
    assert read("videos", LIMITS, {"seconds": seconds, "fps": fps}).frames(FORM) == frames


@pytest.mark.parametrize("has_length", [False, True])
@pytest.mark.parametrize("most, is_read", [(9, True), (8, False), (0, False)])
def test_a_body_may_be_as_long_as_the_limit(has_length, most, is_read):
    """In several parts, with its length declared or not."""
    parts = [
        {"type": "http.request", "body": each, "more_body": more} for each, more in ((b"1234", True), (b"56789", False))
    ]
    headers = [(b"content-length", b"9")] if has_length else []
    request = Request({"type": "http", "method": "POST", "headers": headers}, lambda: asyncio.sleep(0, parts.pop(0)))
    if is_read:
        assert asyncio.run(read_body(request, most)) == b"123456789"
    else:
        with pytest.raises(RequestError, match=f"at most {most} bytes"):
            asyncio.run(read_body(request, most))


@pytest.mark.parametrize("end", [b"--x--\r\n", b""], ids=["whole", "cut"])
def test_the_files_of_a_form_are_closed(monkeypatch, end):
    """Also of one without its last boundary; large files are on the disk."""
    closed, close = [], FormData.close

    async def noted(form):
        closed.extend(each.file for _, each in form.multi_items())
        await close(form)

    monkeypatch.setattr(FormData, "close", noted)
    part = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
    messages = [{"type": "http.request", "body": part + b"data\r\n" + end}]
    headers = [(b"content-type", b"multipart/form-data; boundary=x")]
    request = Request({"type": "http", "method": "POST", "headers": headers}, lambda: asyncio.sleep(0, messages.pop()))
    if end:
        assert asyncio.run(read_form(request, 999)) == [("image", b"data")] and closed
    else:
        with pytest.raises(RequestError, match="last boundary is missing"):
            asyncio.run(read_form(request, 999))
    assert all(each.closed for each in closed)
