"""Connections whose client sends or reads too slowly, on sockets."""

import asyncio
import json
import logging
from unittest.mock import MagicMock

import pytest

from tests.serving.http.test_server import GOOD, LIMITS, Held, bodies, running
from tests.serving.http.test_videos import listening

connections = pytest.importorskip("dit_accel.serving.http.connections")

HEAD = b"POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\n"
SLOW = 1.0  # seconds of a body: a busy machine may stall for a part of it


async def opened(url):
    host, _, port = url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


async def answer(reader):
    async with asyncio.timeout(60):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


def test_requests_that_do_not_end_are_closed(monkeypatch):
    """Also if bytes go on coming; what was answered before is sent. All at once, so that their times overlap."""
    monkeypatch.setattr(bodies, "SLOWEST_BODY", SLOW)
    status = {
        b"": b"",  # nothing
        HEAD[:20]: b"",  # half a line
        HEAD + b"X: ": b"",  # half a head
        HEAD + b"Content-Length: 999\r\n\r\n": b"408",  # half a body
        HEAD + b"Content-Length: 99999999\r\n\r\n": b"413",  # a refused body
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nPOST /v1/": b"200",  # half a second request
    }

    async def ask(url, sent, dribbles):
        reader, writer = await opened(url)
        writer.write(sent)

        async def dribble():
            while dribbles:
                await asyncio.sleep(SLOW / 5)
                writer.write(b"a")

        dribbling = asyncio.create_task(dribble())
        try:
            return (await answer(reader))[9:12]
        finally:
            dribbling.cancel()

    async def ask_all(url):
        return await asyncio.gather(*(ask(url, sent, dribbles) for dribbles in (False, True) for sent in status))

    with running(Held()) as (app, _), listening(app) as url:
        assert asyncio.run(ask_all(url)) == [*status.values()] * 2


def test_a_request_that_runs_longer_is_answered(monkeypatch):
    """The limit is one on its arrival; a second request on the connection has the same time again."""
    monkeypatch.setattr(bodies, "SLOWEST_BODY", slow := 0.3)
    held, body = Held(), json.dumps(GOOD).encode()

    async def ask(url):
        reader, writer = await opened(url)
        for _ in range(2):
            held.release.clear()
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await asyncio.sleep(3 * slow)
            held.release.set()
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0]))

    with running(held) as (app, _), listening(app) as url:
        asyncio.run(ask(url))


def made_connection():
    config = connections.configured(None, LIMITS)
    config.load()
    connection = connections.Connection(config, MagicMock(), {})
    connection.connection_made(MagicMock())
    return connection


@pytest.mark.parametrize(("unread", "ends"), [([9, 5, 1], False), ([9, 9], True), ([9, 5, 5], True)])
def test_only_a_client_that_stops_reading_is_closed(unread, ends):
    """A client that reads slowly gets the whole answer."""

    async def look():
        connection = made_connection()
        connection.transport.get_write_buffer_size.side_effect = unread
        connection.loop = MagicMock()
        connection.pause_writing()
        for _ in unread[1:]:
            seconds, then, *given = connection.loop.call_later.call_args.args
            then(*given)
        return seconds, connection.transport.abort.called

    assert asyncio.run(look()) == (connections.SLOWEST_READER, ends)


@pytest.mark.parametrize("end", ["lost", "read"])
def test_a_timer_ends_with_what_it_waits_for(end):
    """A lost connection leaves none; a client that has read the answer is no longer watched."""

    async def lose():
        connection = made_connection()
        connection.pause_writing()
        connection.connection_lost(None) if end == "lost" else connection.resume_writing()
        return connection._awaited.cancelled(), connection._unread.cancelled()

    assert asyncio.run(lose()) == (end == "lost", True)


def test_nothing_that_clients_send_is_logged(capfd, caplog):
    """No line for bytes that are no HTTP, an upgrade, or a broken form."""
    form = b"Content-Type: multipart/form-data; boundary=cut\r\nContent-Length: 9\r\n\r\nsecret: a"

    async def ask(url):
        for data in (b"secret\r\n\r\n", HEAD + b"Connection: Upgrade\r\nUpgrade: secret\r\n\r\n", HEAD + form):
            reader, writer = await opened(url)
            writer.write(data.replace(b"generations", b"edits"))
            assert (await reader.read(15)).startswith(b"HTTP/1.1 400")
            writer.close()

    with caplog.at_level(logging.NOTSET), running(Held()) as (app, _), listening(app) as url:
        asyncio.run(ask(url))
    assert capfd.readouterr().err == "" and not [each for each in caplog.records if each.levelno >= logging.WARNING]
