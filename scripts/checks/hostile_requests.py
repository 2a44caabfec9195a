"""Hostile requests for a server, drawn at random: bytes for a socket, and the statuses that may answer them.

attacks = Attacks(seed=0, outside="/tmp/outside.txt", key="…")
request = attacks.one()
"""

from __future__ import annotations

import io
import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from PIL import Image

IMAGES, EDITS, VIDEOS = "/v1/images/generations", "/v1/images/edits", "/v1/videos"
ROUTES = (IMAGES, EDITS, VIDEOS, f"{VIDEOS}/video_0", f"{VIDEOS}/video_0/content", "/v1/models", "/metrics", "/health")
JSON, FORM = b"application/json", b"multipart/form-data; boundary=cut"
GOOD = {"prompt": "a hostile fox", "size": "32x32", "steps": 2, "seed": 3}
NAMES = (
    *(*GOOD, "preset", "guidance", "target_error", "target_psnr", "negative_prompt", "model", "user", "n", "stream"),
    *("output_format", "response_format", "strength", "image", "image[]", "mask", "seconds", "num_frames", "fps"),
    *("input_reference", "promt", "__class__", "ü"),
)
DIGITS = "@digits@"  # stands for a number that json.dumps refuses
VALUES = (
    *(-1, 0, 1, 2, 2**31, 2**63, 2**64, 10**400, DIGITS, 1e308, -0.0, 5e-324, float("inf"), float("nan"), 0.5),
    *("", " ", "\0", "a\0b", "ü" * 5000, "\ud800", "\u202e\ufeff", "😀" * 99, "1" * 5000, "none", "png", "webp"),
    *("1e9x1e9", "１６x１６", "16x16\n", "-16x16", "0x0", "99999x99999", "16x64", "auto", "000000.5", "0.1"),
    *("exact", "video-turbo", "wan21-sparge", "../../configs/turbo", "turbo.yaml", "TURBO", "'; DROP TABLE videos; --"),
    *("<script>alert(1)</script>", "{{7*7}}", "${jndi:ldap://127.0.0.1/a}", "%s%n%x"),
    *(None, True, False, [], {}, [[]] * 20, {"a": {"b": None}}, ["a"], [GOOD]),
)
NO_HTTP = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /health\r\n\r\n",
    b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.com\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /v1/videos HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/videos HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    b"POST /v1/videos HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/videos HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffffffff\r\n",
    b"CONNECT evil.com:443 HTTP/1.1\r\nHost: evil.com\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"\0" * 1000,
)
MIB = 2**20
CLOSED = 0  # the status of a connection that ends without an answer
REFUSED = frozenset({400, 404, 413})
TAKEN = REFUSED | {200}  # of a request that may be valid
UNREAD = frozenset({CLOSED, 200, 400, 401, 403, 404, 405, 408, 413})  # of bytes that may be no HTTP


@dataclass(frozen=True)
class Hostile:
    """A request: ``pieces`` of bytes for the server of a route, sent with ``pause`` seconds after each.

    Args:
        allowed: statuses of the answer; ``CLOSED`` = none.
        leaves: whether the client disconnects after the last piece.
        is_slow: whether the request never ends, so that the server has to end it.
    """

    kind: str
    route: str
    pieces: tuple[bytes, ...]
    allowed: frozenset[int]
    pause: float = 0.0
    leaves: bool = False
    is_slow: bool = False


class Attacks:
    """Draws requests.

    Args:
        outside: path of a file that no request may reach.
        key: a valid API key.
    """

    def __init__(self, seed: int, outside: str, key: str) -> None:
        self.draw, self._key, self._image = random.Random(seed), key, image()
        ways = (outside, f"../../../../../..{outside}", f"file://{outside}", f"%2e%2e{outside}", f"..\\..{outside}")
        self._paths = (*ways, f"{outside}\0.png", "/etc/passwd", "/dev/stdin", "~/.ssh/id_rsa", "C:\\boot.ini")
        kinds: dict[Callable[[], Hostile], float] = {
            self._fields: 30,
            self._changed_bytes: 16,
            self._deep_json: 4,
            self._form: 20,
            self._file: 8,
            self._large: 1,
            self._wrong_key: 6,
            self._wrong_host: 4,
            self._path: 5,
            self._video: 6,
            self._method: 4,
            self._no_http: 4,
            self._left: 3,
            self._slow: 0.5,
        }
        self._kinds, self._weights = list(kinds), list(kinds.values())

    def one(self) -> Hostile:
        (kind,) = self.draw.choices(self._kinds, self._weights)
        return kind()

    # Bodies

    def _fields(self) -> Hostile:
        """Give one to three fields wrong values."""
        route = self.draw.choice((IMAGES, VIDEOS))
        return self._post("fields", route, self._text(self._wrong(route)))

    def _changed_bytes(self) -> Hostile:
        """Change some bytes of a body, of JSON or of a form."""
        route = self.draw.choice((IMAGES, EDITS, VIDEOS))
        if route == EDITS or self.draw.random() < 0.3:
            return self._post("changed bytes", route, self._mutated(encoded(self._parts(route))), content=FORM)
        return self._post("changed bytes", route, self._mutated(self._text(self._wrong(route))))

    def _deep_json(self) -> Hostile:
        depth = self.draw.choice((100, 1000, 10_000))
        opening, closing = self.draw.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'{"prompt":[', b"]}")))
        body = opening * depth + b"1" + closing * self.draw.choice((depth, 0))
        return self._post("deep JSON", self.draw.choice((IMAGES, VIDEOS)), body, REFUSED)

    def _form(self) -> Hostile:
        """Send a form with wrong fields, names of files that are paths, and repeated fields."""
        route = self.draw.choice((EDITS, VIDEOS))
        parts = [part for part in self._parts(route) if part[0] not in GOOD]
        for name, value in self._wrong(route).items():
            text = value if isinstance(value, str) else str(self._text(value), "ascii")
            file = self.draw.choice(self._paths) if self.draw.random() < 0.1 else None
            parts.append((name, file, text.encode(errors="replace")))
        if self.draw.random() < 0.2:
            parts += parts[: self.draw.randint(1, 3)] * self.draw.choice((1, 60))
        self.draw.shuffle(parts)
        return self._post("forms", route, encoded(parts), content=FORM)

    def _file(self) -> Hostile:
        """Send a broken image, another kind of file, or an image of more pixels than it has bytes."""
        route = self.draw.choice((EDITS, VIDEOS))
        name = "input_reference" if route == VIDEOS else self.draw.choice(("image", "mask"))
        others = (b"", b"GIF89a" + self._image, b"%PDF-1.7\n", b"<svg/>", bomb(), bomb(60_000))
        data = self.draw.choice(others) if self.draw.random() < 0.4 else self._mutated(self._image)
        file = self.draw.choice((*self._paths, "in.png", "", "a" * 5000, 'a"b', "ü.png", "\r\nX: y"))
        parts = [part for part in self._parts(route) if part[0] != name] + [(name, file, data)]
        return self._post("files", route, encoded(parts), content=FORM)

    def _large(self) -> Hostile:
        """Send 10 MiB, as JSON, as a part of a form, or in chunks."""
        body = b'{"prompt": "' + b"a" * 10 * MIB + b'"}'
        kind = self.draw.randrange(3)
        if kind == 0:
            parts = [("prompt", None, b"fox"), ("image", "a.png", bytes(10 * MIB))]
            return self._post("large bodies", EDITS, encoded(parts), REFUSED, FORM)
        if kind == 1:
            return self._post("large bodies", IMAGES, body, frozenset({413}))
        chunk = b"100000\r\n" + b" " * MIB + b"\r\n"
        head = self._head(b"POST", IMAGES.encode(), [b"Transfer-Encoding: chunked"])
        return Hostile("large bodies", IMAGES, (head, *[chunk] * 10, b"0\r\n\r\n"), frozenset({413}))

    # Keys, hosts, paths and methods

    def _wrong_key(self) -> Hostile:
        key = self._key
        wrong = ("", key, "Bearer", f"Basic {key}", f"Bearer {key[:-1]}", f"Bearer {key}x", f"Bearer {key.upper()}")
        header = self.draw.choice((*wrong, f"Bearer {key},{key}", "Bearer " + "a" * 9000, "Bearer ü\xff"))
        heads = [b"Authorization: " + header.encode("latin-1")] if header else []
        method, target = self.draw.choice((b"GET", b"POST", b"DELETE")), self.draw.choice(ROUTES[:-1])
        route = self.draw.choice((IMAGES, VIDEOS))
        return self._request("wrong keys", route, frozenset({401, 405}), method, target, heads, has_key=False)

    def _wrong_host(self) -> Hostile:
        """Address the server without keys as a page of another site would."""
        evil = self.draw.choice((b"evil.com", b"localhost.evil.com", b"localhost@evil.com", b"[::1", b"10.0.0.5"))
        host, origin = (evil, b"http://localhost") if self.draw.random() < 0.5 else (b"localhost", b"http://" + evil)
        heads = [b"Origin: " + origin]
        return self._request("wrong hosts", EDITS, frozenset({403}), b"POST", EDITS, heads, host=host)

    def _path(self) -> Hostile:
        """Ask for files by the path of a URL, or as the model or preset."""
        path = self.draw.choice(self._paths)
        if self.draw.random() < 0.5:
            field, status = self.draw.choice((("model", 404), ("preset", 400)))
            return self._post("paths", IMAGES, self._text(GOOD | {field: path}), frozenset({status}))
        place = self.draw.choice(("/", "/v1/", "/v1/models/", "/static/", f"{VIDEOS}/../", "/%2e%2e/%2e%2e", "//"))
        target = place + path.replace(" ", "%20").replace("\0", "%00")
        return self._request("paths", VIDEOS, frozenset({404}), b"GET", target)

    def _video(self) -> Hostile:
        """Ask for videos by ids and queries that are none."""
        identifier = self.draw.choice(
            (*self._paths, "video_" + "0" * 32, "video_", "a" * 5000, "%00", "%ff", "..", ".")
        )
        identifier = "".join(
            f"%{byte:02x}" if byte <= 32 or byte in b"?#" else chr(byte) for byte in identifier.encode()
        )
        method, end = self.draw.choice(((b"GET", ""), (b"DELETE", ""), (b"GET", "/content?variant=a")))
        target = f"{VIDEOS}/{identifier}{end}"
        if self.draw.random() < 0.4:
            name = self.draw.choice(("after", "limit", "order", "limit=1&limit", "order=asc&after"))
            method, target = b"GET", f"{VIDEOS}?{name}={identifier}"
        return self._request("video ids", VIDEOS, frozenset({400, 404}), method, target)

    def _method(self) -> Hostile:
        route, target = self.draw.choice((IMAGES, EDITS, VIDEOS)), self.draw.choice(ROUTES)
        method = self.draw.choice((b"PUT", b"PATCH", b"OPTIONS", b"TRACE", b"HEAD", b"FOO", b"get", b"A" * 300))
        return self._request("wrong methods", route, frozenset({405}), method, target)

    # Bytes and times

    def _no_http(self) -> Hostile:
        route, data = self.draw.choice((IMAGES, EDITS, VIDEOS)), self.draw.choice(NO_HTTP)
        if self.draw.random() < 0.5:
            route, data = IMAGES, self._mutated(self._post("", IMAGES, self._text(GOOD)).pieces[0])
        return Hostile("no HTTP", route, (data,), UNREAD, is_slow=True)

    def _left(self) -> Hostile:
        """Disconnect within the head or body, or after a whole request."""
        route = self.draw.choice((IMAGES, VIDEOS))
        streams = {"stream": True} if route == IMAGES and self.draw.random() < 0.5 else {}
        (data,) = self._post("", route, self._text(self._good(route) | streams)).pieces
        end = self.draw.choice((len(data), self.draw.randrange(len(data))))
        return Hostile("disconnects", route, (data[:end],), TAKEN | {CLOSED}, leaves=True)

    def _slow(self) -> Hostile:
        """Send nothing, half of a head, or a body that never ends, byte by byte."""
        route = self.draw.choice((IMAGES, EDITS, VIDEOS))
        kind = FORM if route == EDITS else JSON
        whole = self._head(b"POST", route.encode(), [b"Content-Length: 1000", b"Content-Type: " + kind])
        head = self.draw.choice((b"", whole[: self.draw.randrange(1, len(whole) - 4)], whole, whole))
        pieces = (head, *[b"a"] * self.draw.choice((0, 1000)))
        return Hostile("slow", route, pieces, frozenset({CLOSED, 408}), 0.2, is_slow=True)

    # Parts of requests

    def _good(self, route: str) -> dict[str, Any]:
        return GOOD | ({"num_frames": 5} if route == VIDEOS else {})

    def _wrong(self, route: str) -> dict[str, Any]:
        values = (*VALUES, *self._paths)
        chosen = {self.draw.choice(NAMES): self.draw.choice(values) for _ in range(self.draw.randint(1, 3))}
        return self._good(route) | chosen

    def _parts(self, route: str) -> list[tuple[str, str | None, bytes]]:
        parts = [(name, None, str(value).encode()) for name, value in self._good(route).items()]
        return parts if route == VIDEOS else [*parts, ("image", "in.png", self._image)]

    def _text(self, values: Any) -> bytes:
        return json.dumps(values).replace(f'"{DIGITS}"', "9" * 5000).encode()

    def _mutated(self, data: bytes) -> bytes:
        """Change, remove, repeat or insert up to five pieces."""
        changed = bytearray(data)
        for _ in range(self.draw.randint(1, 5)):
            start = self.draw.randrange(len(changed) + 1)
            piece = changed[start : start + self.draw.choice((1, 1, 4, 50))]
            instead = self.draw.choice((self.draw.randbytes(len(piece)), b"", bytes(piece) * 2, b"\0", b'"', b"\r\n"))
            changed[start : start + len(piece)] = instead
        return bytes(changed)

    def _post(
        self, kind: str, route: str, body: bytes, allowed: frozenset[int] = TAKEN, content: bytes = JSON
    ) -> Hostile:
        return self._request(kind, route, allowed, b"POST", route, [b"Content-Type: " + content], body)

    def _request(
        self,
        kind: str,
        route: str,
        allowed: frozenset[int],
        method: bytes,
        target: str,
        headers: list[bytes] | None = None,
        body: bytes = b"",
        **head: Any,
    ) -> Hostile:
        headers = [*(headers or []), b"Content-Length: %d" % len(body)]
        whole = self._head(method, target.encode("latin-1", "replace"), headers, **head) + body
        return Hostile(kind, route, (whole,), allowed)

    def _head(
        self, method: bytes, target: bytes, headers: list[bytes], host: bytes = b"localhost", has_key: bool = True
    ) -> bytes:
        usual = [b"Host: " + host, *([b"Authorization: Bearer " + self._key.encode()] if has_key else [])]
        return b"\r\n".join([method + b" " + target + b" HTTP/1.1", *usual, *headers, b"", b""])


def image() -> bytes:
    """Return a small PNG."""
    file = io.BytesIO()
    Image.frombytes("RGB", (32, 32), random.Random(0).randbytes(3 * 32 * 32)).save(file, "png")
    return file.getvalue()


def bomb(side: int = 2000) -> bytes:
    """Return a grey PNG of ``side``² pixels in few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)

    parts = {b"IHDR": side.to_bytes(4) * 2 + b"\x08\0\0\0\0", b"IDAT": zlib.compress(bytes(4 * MIB), 1), b"IEND": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, data) for kind, data in parts.items())


def encoded(parts: list[tuple[str, str | None, bytes]]) -> bytes:
    """Return a form with the boundary ``cut``."""
    body = b""
    for name, filename, data in parts:
        file = "" if filename is None else f'; filename="{filename}"'
        head = f'--cut\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
        body += head.encode(errors="replace") + data + b"\r\n"
    return body + b"--cut--\r\n"
