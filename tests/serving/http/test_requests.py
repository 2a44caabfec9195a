"""Limits of requests at their exact values, and the fields of several images, without a server."""

import io
import json
import struct
import zlib

import pytest
from PIL import Image

pytest.importorskip("fastapi")

from dit_accel.presets import load_preset
from dit_accel.serving.engine import VideoForm
from dit_accel.serving.http import requests
from dit_accel.serving.http.api import Limits, RequestError, Served

LIMITS = Limits(side=96, steps=9, images=2, frames=33)
FORM = VideoForm(fps=16.0, frames_unit=4)
KINDS = {"images": requests.ImageRequest, "edits": requests.EditRequest, "videos": requests.VideoRequest}


def file(size, mode="RGB", colour=0):
    data = io.BytesIO()
    Image.new(mode, size, colour).save(data, "png")
    return data.getvalue()


def parse(kind, limits, fields):
    served = Served("tiny", load_preset("balanced"), limits, FORM if kind == "videos" else None)
    if kind == "edits":
        body = [(name, each) for name, value in ({"prompt": ["a fox"]} | fields).items() for each in value]
    else:
        body = json.dumps({"prompt": "a fox"} | fields).encode()
    request = requests.read(body, KINDS[kind], served)
    requests.requested_preset(request, served)
    return request


def read(kind, limits, fields):
    try:
        return parse(kind, limits, fields)
    except RequestError as error:
        return error.param


def bomb(side):
    """A file whose head says that it has so many pixels a side."""
    data = bytearray(file((8, 8)))
    data[16:24] = struct.pack(">II", side, side)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


PNG = file((40, 24))


@pytest.mark.parametrize(
    ("kind", "fields", "param", "message"),
    [
        ("images", {"prompt": None}, "prompt", "should be a valid string"),
        ("images", {"prompt": ""}, "prompt", "at least 1 character"),
        ("images", {"size": "32"}, "size", "match pattern"),
        ("images", {"steps": 2.5}, "steps", "valid integer"),
        ("images", {"background": "transparent"}, "background", "'auto' or 'opaque'"),
        ("images", {"partial_images": 1}, "partial_images", "add stream: true"),
        ("images", {"promt": "a"}, "promt", "did you mean 'prompt'?"),
        ("images", {"preset": "turbi"}, "preset", "did you mean 'turbo'?"),
        ("images", {"preset": "/etc/passwd"}, "preset", "does not exist"),
        ("images", {"preset": "none", "target_error": 0.1}, "target_error", "needs a preset"),
        ("images", {"preset": "exact", "target_error": 0.1}, "target_error", "target_error"),
        ("images", {"computed_steps": 9, "steps": 8}, "computed_steps", "must be at most 8, got 9"),
        ("edits", {"image": [PNG], "other": [PNG]}, "other", "unknown field 'other'"),
        ("edits", {"image": [PNG], "mask": [file((24, 40))]}, "mask", "first image's size, 40x24, got 24x40"),
        ("edits", {"image": [PNG], "mask": [PNG, PNG]}, "mask", "must be given once"),
        ("edits", {"image": [PNG], "mask": ["m.png"]}, "mask", "must be a file"),
        ("edits", {"mask": [PNG]}, "image", "image is required"),
        ("edits", {"image": [PNG], "prompt": [b"a"]}, "prompt", "must be text, not a file"),
        ("edits", {"image": [b"GIF89a"]}, "image", "must be a png, jpeg, webp file"),
        ("edits", {"image": [PNG[:60]]}, "image", "must be a png, jpeg, webp file"),
        ("edits", {"image": [bomb(9_000)]}, "image", "at most 96 pixels, got 9000x9000"),
        ("edits", {"image": [bomb(60_000)]}, "image", "must be a png, jpeg, webp file"),
        ("edits", {"image": [PNG], "strength": ["1.5"]}, "strength", "less than or equal to 1"),
        ("videos", {"seconds": "1", "num_frames": 5}, "seconds", "seconds or num_frames, not both"),
        ("videos", {"seconds": "१"}, "seconds", "valid number"),
        ("videos", {"seconds": 0}, "seconds", "greater than 0"),
        ("videos", {"input_reference": {"image_url": "http://127.0.0.1/"}}, "input_reference", "must be a file"),
        ("videos", {"n": 1}, "n", "unknown field 'n'"),
        ("videos", {"stream": True}, "stream", "decodes once"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_field_is_named(kind, fields, param, message):
    with pytest.raises(RequestError) as failure:
        parse(kind, LIMITS, fields)
    assert failure.value.param == param and message in failure.value.message


@pytest.mark.parametrize(
    ("kind", "largest", "beyond"),
    [
        ("images", {"size": "96x32"}, {"size": "112x32"}),
        ("images", {"size": "16x32"}, {"size": "0x32"}),
        ("images", {"size": "48x32"}, {"size": "48x40"}),
        ("images", {"steps": 9}, {"steps": 10}),
        ("images", {"n": 2}, {"n": 3}),
        ("images", {"guidance": 0}, {"guidance": -0.1}),
        ("images", {"seed": 2**63 - 1}, {"seed": 2**63}),
        ("images", {"prompt": "a" * 4000}, {"prompt": "a" * 4001}),
        ("images", {"partial_images": 3, "stream": True}, {"partial_images": 4, "stream": True}),
        ("edits", {"image": [file((96, 8))]}, {"image": [file((97, 8))]}),
        ("edits", {"image": [file((8, 8))] * 2}, {"image": [file((8, 8))] * 3}),
        ("edits", {"image": [file((8, 8)), file((96, 8))]}, {"image": [file((8, 8)), file((8, 97))]}),
        ("videos", {"num_frames": 33}, {"num_frames": 34}),
        ("videos", {"seconds": 2}, {"seconds": 2.25}),
        ("videos", {"seconds": 4, "fps": 8}, {"seconds": 4.5, "fps": 8}),
        ("videos", {"fps": 100}, {"fps": 101}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_limit_is_the_largest_value(kind, largest, beyond):
    """The limit itself is accepted, for each side of an image, and the next value is refused by its field's name."""
    assert not isinstance(read(kind, LIMITS, largest), str | None)
    assert read(kind, LIMITS, beyond) == next(iter(beyond))


@pytest.mark.parametrize(
    ("mode", "colour", "level"),
    [("L", 255, 255), ("L", 0, 0), ("RGBA", (0, 0, 0, 0), 255), ("RGBA", (0, 0, 0, 255), 0), ("RGB", 0, 0)],
    ids=["white", "black", "transparent", "opaque", "colours"],
)
def test_a_mask_of_one_value_is_that_everywhere(mode, colour, level):
    """Also one that is transparent everywhere, which has no opaque pixel to compare with."""
    request = read("edits", LIMITS, {"image": [file((24, 8))], "mask": [file((24, 8), mode, colour)]})
    assert request.mask.mode == "L" and request.mask.getextrema() == (level, level)


def test_jobs_have_their_own_seeds_and_share_all_else():
    """Seeds follow each other from the given one; width and height are not exchanged."""
    request = read("images", LIMITS, {"n": 2, "seed": 7, "size": "96x32", "negative_prompt": "", "guidance": 0})
    common = {"prompt": "a fox", "negative-prompt": "", "height": 32, "width": 96, "guidance": 0}
    assert [job.settings for job in request.jobs()] == [common | {"seed": 7}, common | {"seed": 8}]
    assert [job.index for job in request.jobs()] == [0, 1]
    seeds = [read("images", LIMITS, {}).jobs()[0].settings["seed"] for _ in range(2)]
    assert seeds[0] != seeds[1]


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({}, {}),
        ({"num_frames": 9}, {"num-frames": 9}),
        ({"seconds": "1.5"}, {"num-frames": 25}),
        ({"seconds": "4", "fps": 8}, {"num-frames": 33, "fps": 8.0}),
        ({"seconds": "0.01"}, {"num-frames": 1}),
        ({"size": "48x32", "guidance": 3, "negative_prompt": "r"}, {"guidance": 3, "width": 48, "height": 32}),
    ],
    ids=str,
)
def test_fields_of_a_video_reach_its_job(fields, settings):
    """From JSON and from forms; a duration becomes the nearest number of frames that the pipeline can make."""
    served, fields = Served("tiny", None, LIMITS, FORM), {"prompt": "a fox", "seed": 9} | fields
    for body in (json.dumps(fields).encode(), [(name, str(value)) for name, value in fields.items()]):
        job = requests.read(body, requests.VideoRequest, served).job(FORM)
        negative = {"negative-prompt": "r"} if "guidance" in fields else {}
        assert job.settings == {"prompt": "a fox", "seed": 9} | settings | negative
