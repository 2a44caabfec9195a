"""Hostile requests for a server, drawn at random: bytes for a socket, and the statuses that may answer them.

attacks = Attacks(seed=0, outside="/tmp/outside.txt", key="…")
request = attacks.one()
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scripts.checks.hostile_values import (
    CHARSETS,
    COMMON,
    DIGITS,
    EDITS,
    GOOD,
    IMAGES,
    MIB,
    NAMES,
    NESTED,
    NO_HTTP,
    NUMBERS,
    ODD,
    PRESETS,
    ROUTES,
    SCRIPTS,
    SIZES,
    TEXTS,
    VIDEOS,
    bomb,
    encoded,
    images,
)

CLOSED = 0  # the status of a connection that ends without an answer
REFUSED = frozenset({400, 404, 413})
TAKEN = REFUSED | {200}  # of a request that may be valid
UNREAD = frozenset({CLOSED, 400, 404, 405, 408})  # of bytes that may be no HTTP


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
        self.draw, self._key, self._images = random.Random(seed), key, images()
        ways = (outside, f"../../../../../..{outside}", f"file://{outside}", f"%2e%2e{outside}", f"..\\..{outside}")
        others = ("/etc/passwd", "/dev/stdin", "~/.ssh/id_rsa", "C:\\boot.ini", "\\\\a\\b")
        self._paths = (*ways, f"{outside}\0.png", *others)
        self._values = (*NUMBERS, *TEXTS, *SIZES, *PRESETS, *SCRIPTS, *NESTED, *self._paths)
        kinds: dict[Callable[[], Hostile], float] = {
            self._odd: 6,
            self._fields: 20,
            self._changed_json: 12,
            self._deep: 4,
            self._form: 16,
            self._file: 8,
            self._broken_form: 10,
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

    # Bodies of JSON

    def _odd(self) -> Hostile:
        """Ask for an image, an edit or a video with up to four fields that have odd but plausible values."""
        route = self.draw.choice((IMAGES, EDITS, VIDEOS))
        names = [name for name in ODD if name in COMMON or name in NAMES[route]]
        values = self._good(route) | {name: self.draw.choice(ODD[name]) for name in self.draw.sample(names, 4)}
        if route == VIDEOS and "seconds" in values and self.draw.random() < 0.9:
            del values["num_frames"]
        if route != EDITS:
            return self._json("odd values", route, self._text(values), TAKEN)
        fields = [(name, None, str(value).encode()) for name, value in values.items()]
        image = (self.draw.choice(("image", "image[]")), "in.png", self.draw.choice(self._images))
        masks = [("mask", "in.png", self._images[0])] * (self.draw.random() < 0.1)
        return self._post_form("odd values", route, [*fields, image, *masks], TAKEN)

    def _fields(self) -> Hostile:
        """Give one to three fields wrong values."""
        route = self.draw.choice((IMAGES, VIDEOS))
        return self._json("fields", route, self._text(self._wrong(route)), TAKEN)

    def _changed_json(self) -> Hostile:
        """Change some bytes of a body."""
        route = self.draw.choice((IMAGES, VIDEOS))
        values = self._wrong(route) if self.draw.random() < 0.5 else self._good(route)
        return self._json("changed JSON", route, self._mutated(self._text(values)), TAKEN)

    def _deep(self) -> Hostile:
        depth = self.draw.choice((100, 1000, 10_000))
        opening, closing = self.draw.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'{"prompt":[', b"]}")))
        body = opening * depth + b"1" + closing * self.draw.choice((depth, 0))
        return self._json("deep JSON", self.draw.choice((IMAGES, VIDEOS)), body, REFUSED)

    def _good(self, route: str) -> dict[str, Any]:
        return GOOD | ({"num_frames": 5} if route == VIDEOS else {})

    def _wrong(self, route: str) -> dict[str, Any]:
        names = (*COMMON, *NAMES[route], "promt", "__class__", "ü")
        chosen = {self.draw.choice(names): self.draw.choice(self._values) for _ in range(self.draw.randint(1, 3))}
        return self._good(route) | chosen

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

    def _json(self, kind: str, route: str, body: bytes, allowed: frozenset[int]) -> Hostile:
        return self._post(kind, route, body, allowed, b"application/json")

    # Forms

    def _form(self) -> Hostile:
        """Send a form with wrong fields, names of files that are paths, and repeated fields."""
        route = self.draw.choice((EDITS, VIDEOS))
        parts = [part for part in self._parts(route) if part[0] not in GOOD]
        for name, value in self._wrong(route).items():
            text = value if isinstance(value, str) else str(self._text(value), "ascii")
            parts.append((name, self._filename() if self.draw.random() < 0.1 else None, text.encode(errors="replace")))
        if self.draw.random() < 0.2:
            parts += parts[: self.draw.randint(1, 3)] * self.draw.choice((1, 60))
        self.draw.shuffle(parts)
        return self._post_form("fields of forms", route, parts, TAKEN)

    def _file(self) -> Hostile:
        """Send a broken image, another kind of file, or an image of more pixels than it has bytes."""
        route = self.draw.choice((EDITS, VIDEOS))
        name = "input_reference" if route == VIDEOS else self.draw.choice(("image", "mask"))
        whole = self.draw.choice(self._images)
        others = (
            b"",
            b"GIF89a" + whole,
            b"%PDF-1.7\n",
            b"%!PS\n(/etc/passwd) run\n",
            b"<svg/>",
            bomb(),
            bomb(60_000),
        )
        data = self.draw.choice(others) if self.draw.random() < 0.4 else self._mutated(whole)
        parts = [part for part in self._parts(route) if part[0] != name] + [(name, self._filename(), data)]
        return self._post_form("files", route, parts, TAKEN)

    def _broken_form(self) -> Hostile:
        """Break the form itself: its boundaries, heads, character set, or end."""
        route = self.draw.choice((EDITS, VIDEOS))
        body, allowed = encoded(self._parts(route)), TAKEN
        kind = b"multipart/form-data; boundary=cut"
        match self.draw.randrange(7):
            case 0:
                allowed = REFUSED
                kind = self.draw.choice((b"multipart/form-data", b"multipart/form-data; boundary=", b"text/plain", b""))
            case 1:
                kind = b"multipart/form-data; boundary=" + self.draw.choice(
                    (b"other", b'"cut', b"c" * 300, b"\xff", b";")
                )
            case 2:
                kind += b"; charset=" + self.draw.choice(CHARSETS).encode()
                body = body.replace(b"a hostile fox", self.draw.choice((b"\\ud800", b"+2AA-", b"xn--a", b"\xff\xfe")))
            case 3:
                body, allowed = body[: self.draw.randrange(len(body) - 2)], REFUSED
            case 4:
                kept = b'name="prompt"'
                heads = (
                    b"",
                    b"name",
                    b"name*=utf-8''a; name*0=b",
                    b'name="a\0b"',
                    b'filename="a"',
                    b"name=" + b"a" * 9000,
                )
                body = body.replace(kept, self.draw.choice(heads))
            case 5:
                body = body.replace(b"\r\n", b"\n")
            case _:
                body = self._mutated(body)
        return self._post("broken forms", route, body, allowed, kind)

    def _parts(self, route: str) -> list[tuple[str, str | None, bytes]]:
        parts = [(name, None, str(value).encode()) for name, value in self._good(route).items()]
        name = "input_reference" if route == VIDEOS else "image"
        return parts if route == VIDEOS and self.draw.random() < 0.8 else [*parts, (name, "in.png", self._images[0])]

    def _filename(self) -> str:
        return self.draw.choice((*self._paths, "in.png", "", "a" * 5000, 'a"b', "ü.png", "\r\nX: y", "con", "."))

    def _post_form(self, kind: str, route: str, parts: list[Any], allowed: frozenset[int]) -> Hostile:
        return self._post(kind, route, encoded(parts), allowed, b"multipart/form-data; boundary=cut")

    # Keys, hosts, paths and methods

    def _wrong_key(self) -> Hostile:
        key, route = self._key, self.draw.choice((IMAGES, VIDEOS))
        target = self.draw.choice((*ROUTES[:-1], f"{VIDEOS}?limit=1"))
        wrong = (
            "",
            key,
            "Bearer",
            "Bearer ",
            f"Basic {key}",
            f"Bearer {key[:-1]}",
            f"Bearer {key}x",
            f"Bearer {key.upper()}",
        )
        header = self.draw.choice(
            (*wrong, f"Bearer {key},{key}", "Bearer " + "a" * 9000, "Bearer ü\xff", "Bearer None")
        )
        heads = [b"Authorization: " + header.encode("latin-1")] if header else []
        method, statuses = self.draw.choice((b"GET", b"POST", b"DELETE")), frozenset({401, 405})
        return self._request("wrong keys", method, route, b"", statuses, heads, target.encode(), key=False)

    def _wrong_host(self) -> Hostile:
        """Address the server without keys as a page of another site would."""
        evil = self.draw.choice(
            (b"evil.com", b"localhost.evil.com", b"localhost@evil.com", b"[::1", b"10.0.0.5", b"\xff")
        )
        host, origin = (evil, b"http://localhost") if self.draw.random() < 0.5 else (b"localhost", b"http://" + evil)
        return self._request("wrong hosts", b"POST", EDITS, b"", frozenset({403}), [b"Origin: " + origin], host=host)

    def _path(self) -> Hostile:
        """Ask for files by the path of a URL, or as the model or preset."""
        path = self.draw.choice(self._paths)
        if self.draw.random() < 0.5:
            field, status = self.draw.choice((("model", 404), ("preset", 400)))
            return self._json("paths", IMAGES, self._text(GOOD | {field: path}), frozenset({status}))
        place = self.draw.choice(
            ("/", "/v1/", "/v1/models/", "/static/", f"{VIDEOS}/../", "/%2e%2e/%2e%2e", "//", "/docs")
        )
        target = place.encode() + path.encode().replace(b" ", b"%20").replace(b"\0", b"%00")
        return self._request("paths", b"GET", VIDEOS, b"", frozenset({404}), target=target)

    def _video(self) -> Hostile:
        """Ask for videos by ids and queries that are none."""
        given = self.draw.choice(
            (*self._paths, *SCRIPTS, "video_" + "0" * 32, "video_", "a" * 5000, "%00", "%ff", "..", ".")
        )
        given = "".join(f"%{byte:02x}" if byte <= 32 or byte in b"?#" else chr(byte) for byte in given.encode())
        if self.draw.random() < 0.6:
            method, end = self.draw.choice(
                ((b"GET", ""), (b"DELETE", ""), (b"GET", "/content"), (b"GET", "/content?variant=a"))
            )
            target = f"{VIDEOS}/{given}{end}"
        else:
            method = b"GET"
            name = self.draw.choice(("after", "limit", "order", "variant", "ü", "limit=1&limit", "order=asc&after"))
            target = f"{VIDEOS}?{name}={given}"
        return self._request(
            "video ids", method, VIDEOS, b"", frozenset({400, 404}), target=target.encode("latin-1", "replace")
        )

    def _method(self) -> Hostile:
        route, target = self.draw.choice((IMAGES, EDITS, VIDEOS)), self.draw.choice(ROUTES).encode()
        method = self.draw.choice((b"PUT", b"PATCH", b"OPTIONS", b"TRACE", b"HEAD", b"FOO", b"get", b"A" * 300))
        return self._request("wrong methods", method, route, b"", frozenset({405}), target=target)

    # Bytes, times and sizes

    def _no_http(self) -> Hostile:
        data = self.draw.choice(NO_HTTP)
        if self.draw.random() < 0.5:
            data = self._mutated(self._json("", IMAGES, self._text(GOOD), TAKEN).pieces[0])
            return Hostile("no HTTP", IMAGES, (data,), UNREAD | TAKEN | {401}, is_slow=True)
        return Hostile(
            "no HTTP", self.draw.choice((IMAGES, EDITS, VIDEOS)), (data,), UNREAD | {200, 401, 403}, is_slow=True
        )

    def _large(self) -> Hostile:
        """Send 10 MiB, as JSON, as a part of a form, or in chunks."""
        if self.draw.random() < 0.5:
            parts = [("prompt", None, b"fox"), ("image", self.draw.choice(("a.png", None)), bytes(10 * MIB))]
            return self._post_form("large bodies", EDITS, parts, REFUSED)
        route = self.draw.choice((IMAGES, VIDEOS))
        if self.draw.random() < 0.5:
            return self._json("large bodies", route, b'{"prompt": "' + b"a" * 10 * MIB + b'"}', frozenset({413}))
        chunk = b"100000\r\n" + b" " * MIB + b"\r\n"
        head = self._head(b"POST", route.encode(), [b"Transfer-Encoding: chunked"])
        return Hostile("large bodies", route, (head, *[chunk] * 10, b"0\r\n\r\n"), frozenset({413}))

    def _left(self) -> Hostile:
        """Disconnect within the head or body, or after a whole request."""
        route = self.draw.choice((IMAGES, VIDEOS))
        values = self._good(route) | ({"stream": True} if route == IMAGES and self.draw.random() < 0.5 else {})
        (data,) = self._json("", route, self._text(values), TAKEN).pieces
        end = self.draw.choice((len(data), self.draw.randrange(len(data))))
        return Hostile("disconnects", route, (data[:end],), TAKEN | {CLOSED}, leaves=True)

    def _slow(self) -> Hostile:
        """Send nothing, half of a head, or a body that never ends, byte by byte."""
        route = self.draw.choice((IMAGES, EDITS, VIDEOS))
        kind = b"multipart/form-data; boundary=cut" if route == EDITS else b"application/json"
        whole = self._head(b"POST", route.encode(), [b"Content-Length: 1000", b"Content-Type: " + kind])
        head = self.draw.choice((b"", whole[: self.draw.randrange(1, len(whole) - 4)], whole, whole))
        refused = self._head(b"POST", route.encode(), [b"Content-Length: 1000"], key=False)
        early = self.draw.random() < 0.2
        pieces = (refused if early else head, *[b"a"] * self.draw.choice((0, 1000)))
        return Hostile(
            "slow", route, pieces, frozenset({CLOSED, 408} | ({401, 400} if early else set())), 0.2, is_slow=True
        )

    def _post(self, kind: str, route: str, body: bytes, allowed: frozenset[int], content: bytes) -> Hostile:
        return self._request(kind, b"POST", route, body, allowed, [b"Content-Type: " + content])

    def _request(
        self,
        kind: str,
        method: bytes,
        route: str,
        body: bytes,
        allowed: frozenset[int],
        headers: list[bytes] | None = None,
        target: bytes | None = None,
        **head: Any,
    ) -> Hostile:
        headers = [*(headers or []), b"Content-Length: %d" % len(body)]
        return Hostile(kind, route, (self._head(method, target or route.encode(), headers, **head) + body,), allowed)

    def _head(
        self, method: bytes, target: bytes, headers: list[bytes], host: bytes = b"localhost", key: bool = True
    ) -> bytes:
        own = [b"Host: " + host, *([b"Authorization: Bearer " + self._key.encode()] if key else [])]
        return b"\r\n".join([method + b" " + target + b" HTTP/1.1", *own, *headers, b"", b""])
