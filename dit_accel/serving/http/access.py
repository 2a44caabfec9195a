"""Access to a server: API keys, or without keys the hosts and web pages that may send requests."""

import hmac
from collections.abc import Collection, Sequence
from urllib.parse import urlsplit

from fastapi import Request

from dit_accel.errors import shortened, shown
from dit_accel.serving.http.api import RequestError


class Access:
    """API keys; without them ``Host`` and ``Origin`` must be among ``hosts`` (empty: any ``Host``, its ``Origin``)."""

    def __init__(self, keys: Sequence[str], hosts: Collection[str]) -> None:
        self._keys, self._hosts = [key.encode() for key in keys], frozenset(hosts)

    def require(self, request: Request) -> None:
        """Check a request's key, or its ``Host`` and ``Origin``; ``state.owner`` becomes the key's index, or None."""
        request.state.owner = None
        if self._keys:
            request.state.owner = self._key_of(request.headers.get("authorization", ""))
        else:
            self._require_host(request.headers.get("host", ""), request.headers.get("origin"))

    def _key_of(self, authorization: str) -> int:
        """Compare with each key and return the index of the equal one; every comparison takes the same time."""
        scheme, _, sent = authorization.partition(" ")
        matches = [hmac.compare_digest(sent.strip().encode("latin-1"), key) for key in self._keys]
        if not (scheme.lower() == "bearer" and any(matches)):
            raise RequestError("the API key is missing or wrong", code="invalid_api_key", status=401)
        return matches.index(True)

    def _require_host(self, host: str, origin: str | None) -> None:
        """Refuse pages of other sites in a user's browser, also if the site's name leads here (DNS rebinding)."""
        name = _name_in(f"//{host}")
        if self._hosts and name not in self._hosts:
            raise _refusal("Host", host, name)
        if origin is not None and (page := _name_in(origin)) not in (self._hosts or {name} - {""}):
            raise _refusal("Origin", origin, page)


def _name_in(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _refusal(header: str, value: str, name: str) -> RequestError:
    allow = f" or --allow-host {shortened(name)}" if name else ""
    message = f"{header} {shown(value)} is not allowed: start the server with --api-key-file{allow}"
    return RequestError(message, code="host_not_allowed", status=403)
