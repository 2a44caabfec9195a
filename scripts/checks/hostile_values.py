"""Values, files and bytes of hostile requests."""

from __future__ import annotations

import io
import random
import zlib
from typing import Any

from PIL import Image

from dit_accel.presets import preset_names

IMAGES, EDITS, VIDEOS = "/v1/images/generations", "/v1/images/edits", "/v1/videos"
ROUTES = (IMAGES, EDITS, VIDEOS, f"{VIDEOS}/video_0", f"{VIDEOS}/video_0/content", "/v1/models", "/metrics", "/health")
MIB = 2**20
DIGITS = "@digits@"  # stands for a number that json.dumps refuses

GOOD = {"prompt": "a hostile fox", "size": "32x32", "steps": 2, "seed": 3}
NAMES = {
    IMAGES: ("n", "output_format", "response_format", "stream"),
    EDITS: ("n", "output_format", "stream", "strength", "image", "image[]", "mask"),
    VIDEOS: ("seconds", "num_frames", "fps", "input_reference"),
}
COMMON = (*GOOD, "preset", "guidance", "target_error", "target_psnr", "negative_prompt", "model", "user")
NUMBERS = (-1, 0, 1, 2, 2**31, 2**63, 2**64, 10**400, DIGITS, 1e308, -0.0, 5e-324, float("inf"), float("nan"), 0.5)
TEXTS = ("", " ", "\0", "a\0b", "ü" * 5000, "\ud800", "\u202e\ufeff", "😀" * 99, "1" * 5000, "balanced", "none")
SIZES = ("1e9x1e9", "１６x１６", "16x16\n", "-16x16", "0x0", "99999x99999", "16x64", "64x16", "80x80", "auto", "16x16")
PRESETS = ("exact", "quality", "video-turbo", "wan21-sparge", "../../configs/turbo", "turbo.yaml", "TURBO")
SCRIPTS = ("'; DROP TABLE videos; --", "<script>alert(1)</script>", "{{7*7}}", "${jndi:ldap://127.0.0.1/a}", "%s%n%x")
NESTED = (None, True, False, [], {}, [[]] * 20, {"a": {"b": None}}, ["a"], [GOOD], "__class__")
ODD: dict[str, tuple[Any, ...]] = {  # values that a run gets, if the model takes the field
    "prompt": (" ", "\0", "a\0b", "😀" * 99, "\u202e\ufeff", "ü" * 4000, "a " * 2000, *SCRIPTS),
    "negative_prompt": ("", " ", "\0", "ü" * 4000),
    "size": ("16x16", "16x64", "64x16", "48x32", "auto"),
    "steps": (1, 2, 3, 4),
    "seed": (0, 2**32, 2**63 - 1),
    "guidance": (0, 0.5, 1, 7.5, 100),
    "preset": ("none", *preset_names()),
    "target_error": (5e-324, 1e-9, 0.5, 1e9, 1e308),
    "target_psnr": (5e-324, 1, 33, 1e9, 1e308),
    "n": (1, 2),
    "output_format": ("png", "jpeg", "webp"),
    "stream": (True,),
    "strength": (5e-324, 1e-9, 0.1, 0.5, 1),
    "seconds": (5e-324, "0.1", "000000.5", 0.5),
    "num_frames": (1, 2, 3, 4, 6, 8, 9),
    "fps": (1, 23.976, 100),
}
CHARSETS = ("utf-7", "utf-16", "unicode_escape", "idna", "punycode", "base64", "rot13", "undefined", "a\0b", "x" * 300)
NO_HTTP = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /health\r\n\r\n",
    b"GET  /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.com\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX : a\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /v1/videos HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/videos HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    b"POST /v1/videos HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n",
    b"POST /v1/videos HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/videos HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffffffff\r\n",
    b"CONNECT evil.com:443 HTTP/1.1\r\nHost: evil.com\r\n\r\n",
    b"GET http://evil.com/v1/models HTTP/1.1\r\nHost: evil.com\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"\r\n" * 50,
    b"\0" * 1000,
)


def images() -> list[bytes]:
    """Return an image as a file of each form."""
    files = []
    for form in ("png", "jpeg", "webp"):
        file = io.BytesIO()
        Image.frombytes("RGB", (32, 32), random.Random(0).randbytes(3 * 32 * 32)).save(file, form)
        files.append(file.getvalue())
    return files


def bomb(side: int = 2000) -> bytes:
    """Return a grey PNG of ``side``² pixels in few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)

    head = side.to_bytes(4) * 2 + b"\x08\0\0\0\0"
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(bytes(4 * MIB), 1))
        + chunk(b"IEND", b"")
    )


def encoded(parts: list[tuple[str, str | None, bytes]]) -> bytes:
    """Return a form with the boundary ``cut``."""
    body = b""
    for name, filename, data in parts:
        file = "" if filename is None else f'; filename="{filename}"'
        head = f'--cut\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
        body += head.encode(errors="replace") + data + b"\r\n"
    return body + b"--cut--\r\n"
