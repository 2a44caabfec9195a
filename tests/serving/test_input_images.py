"""Input images reach the model upright and in 8 bits, by the form of a server and by ``--image``."""

import io

import numpy as np
import pytest
from diffusers.utils import load_image
from PIL import Image

from dit_accel.serving.engine import VideoForm
from dit_accel.serving.http.api import Limits, RequestError, Served
from dit_accel.serving.http.requests import EditRequest
from dit_accel.serving.http.requests import read as read_fields
from dit_accel.serving.input_images import read_image
from tests.pairs import every_pair

SERVED = Served("m", None, Limits(), VideoForm(8, 4))
WIDTH, HEIGHT = 24, 16
LEVELS = np.linspace(0, 65535, WIDTH * HEIGHT).reshape(HEIGHT, WIDTH).astype(np.uint16)
COLOURS = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 4), np.uint8)


def stored(image, form="png", **settings):
    data = io.BytesIO()
    image.save(data, form, **settings)
    return data.getvalue()


def edit(data, mask=None):
    masks = [] if mask is None else [("mask", mask)]
    return read_fields([("prompt", "a"), ("image", data), *masks], EditRequest, SERVED)


def of_command(data, folder):
    (folder / "given").write_bytes(data)
    return read_image(folder / "given")


WAYS = {"edit": lambda data, folder: edit(data).image[0], "file": of_command}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def way(request):
    return request.param


@pytest.fixture
def read(way, tmp_path):
    return lambda data: way(data, tmp_path)


def turned(orientation):
    tag = Image.Exif()
    tag[0x0112] = orientation
    return {"exif": tag}


@every_pair(way=WAYS, form=("png", "jpeg", "webp"), orientation=range(1, 9))
def test_a_photo_is_upright(read, form, orientation):
    """Its EXIF orientation is followed as in diffusers' `load_image`."""
    photo = stored(Image.fromarray(COLOURS).convert("RGB"), form, **turned(orientation))
    np.testing.assert_array_equal(np.asarray(read(photo)), np.asarray(load_image(Image.open(io.BytesIO(photo)))))
    assert read(photo).size == ((WIDTH, HEIGHT) if orientation < 5 else (HEIGHT, WIDTH))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "P with transparency", "L with transparency"])
def test_an_image_of_any_mode_is_the_one_of_diffusers(read, mode):
    """Palettes and grey become RGB, and transparency is ignored."""
    mode, _, transparent = mode.partition(" with ")
    data = stored(Image.fromarray(COLOURS).convert(mode), **({"transparency": 3} if transparent else {}))
    image = read(data)
    assert image.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(image), np.asarray(load_image(Image.open(io.BytesIO(data)))))


def test_a_jpeg_of_four_inks_is_read(read):
    assert read(stored(Image.new("CMYK", (8, 8)), "jpeg")).getpixel((0, 0)) == (255, 255, 255)


def test_broken_exif_data_spoils_no_image(read):
    assert read(stored(Image.new("RGB", (8, 4), "red"), exif=b"Exif\0\0junk")).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("orientation", [1, 6])
def test_grey_levels_of_16_bits_are_scaled(read, orientation):
    image = np.asarray(read(stored(Image.fromarray(LEVELS), **turned(orientation))))
    levels = LEVELS if orientation == 1 else np.rot90(LEVELS, -1)
    np.testing.assert_array_equal(image, np.repeat(np.round(levels / 257)[..., None], 3, axis=2))


@pytest.mark.parametrize(
    "values",
    [
        LEVELS.astype("<u2"),
        LEVELS.astype(">u2"),
        LEVELS.astype(np.int32),
        LEVELS.astype(np.float32),
        (LEVELS / 257).astype(np.float32),
        (LEVELS / 65535).astype(np.float32),
    ],
    ids=["little-endian", "big-endian", "32-bit", "floats", "floats-to-255", "floats-to-1"],
)
def test_numbers_of_other_formats_are_scaled(tmp_path, values):
    """A TIFF file may hold 16 bits in either order, integers and floats."""
    image = of_command(stored(Image.fromarray(values), "tiff"), tmp_path)
    np.testing.assert_array_equal(np.asarray(image)[..., 0], np.round(LEVELS / 257))


EIGHT = np.round(LEVELS / 257).astype(np.uint8)
HALF = np.where(EIGHT > 127, np.uint8(255), np.uint8(0))
IN_HALVES = Image.fromarray(HALF // 255, "P")  # of two colours, black
IN_HALVES.putpalette([0] * 6)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (stored(Image.fromarray(EIGHT)), EIGHT),
        (stored(Image.fromarray(LEVELS)), EIGHT),
        (stored(Image.fromarray(HALF).convert("1")), HALF),
        (stored(Image.fromarray(np.rot90(EIGHT).copy()), **turned(6)), EIGHT),
        (stored(Image.fromarray(np.dstack([COLOURS[..., :3], 255 - EIGHT]))), EIGHT),
        (stored(Image.fromarray(np.dstack([COLOURS[..., 0], 255 - EIGHT]))), EIGHT),
        (stored(IN_HALVES, transparency=b"\xff\x00"), HALF),
        (stored(Image.fromarray(65535 - (HALF // 255 * np.uint16(65535))), transparency=0), HALF),
    ],
    ids=["grey", "16-bit", "1-bit", "on-its-side", "RGBA", "LA", "palette", "16-bit-transparent"],
)
def test_a_mask_covers_the_same_part_in_every_form(mask, expected):
    """It is white or transparent where the image changes, and upright like the photo, which lies on its side."""
    photo = stored(Image.fromarray(np.rot90(COLOURS[..., :3]).copy()), **turned(6))
    np.testing.assert_array_equal(np.asarray(edit(photo, mask).mask), expected)


def test_sizes_of_image_and_mask_are_those_of_upright_ones():
    photo = stored(Image.new("RGB", (16, 24)), **turned(6))
    with pytest.raises(RequestError, match="first image's size, 24x16, got 16x24"):
        edit(photo, stored(Image.new("L", (16, 24))))


def test_former_functions_read_requests():
    """Programs that import from the former places go on."""
    from dit_accel.serving.api import Limits as limits_of_before
    from dit_accel.serving.requests import read_edit

    photo = stored(Image.new("RGB", (WIDTH, HEIGHT), "blue"), "png")
    assert read_edit([("prompt", "a"), ("image", photo)], limits_of_before(), "m").image[0].size == (WIDTH, HEIGHT)
