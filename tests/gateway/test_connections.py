"""What a connection may do before, between and behind requests, under both event loops."""

import asyncio
import json
import logging

import pytest
from structlog.testing import capture_logs

from gateway import connections
from gateway.backends.scripted import Script
from tests.core.engine.loops import on_each_loop
from tests.gateway.serving import CHAT, chat_body, connected, get, http_request, scripted

ENDLESS = Script(deltas=("word ",) * 1_000_000, every_s=0.002)
GET = http_request(b"", method="GET", path="/livez")
POST_HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: t\r\n".encode()


@on_each_loop
async def test_one_connection_too_many_is_told_so_and_closed() -> None:
    async with scripted(max_connections=2) as (server, _), asyncio.timeout(10):
        async with connected(server) as first, connected(server) as second:
            for connection in (first, second):
                connection.send(GET)
                assert (await connection.response()).status == 200
            async with connected(server) as third:
                third.send(http_request(chat_body()))  # unread, and yet the answer is not lost
                response = await third.response()
                assert await third.reader.read() == b""
        assert (response.status, response.error["code"]) == (503, "too_many_connections")
        assert response.headers["retry-after"] == "1"
        assert response.headers["x-request-id"]
        while (await get(server, "/livez")).status != 200:  # noqa: ASYNC110  # their ends arrive a turn later
            await asyncio.sleep(0)


@on_each_loop
async def test_headers_that_do_not_end_and_connections_that_say_nothing_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.3)
    async with scripted(max_connections=3) as (server, _), asyncio.timeout(10):
        async with connected(server) as silent, connected(server) as half, connected(server) as trickling:
            half.send(b"GET /livez HTTP/1.1\r\nHo")
            trickle = asyncio.create_task(_trickle(trickling.writer))
            responses = [await half.response(), await trickling.response()]
            for connection in (silent, half, trickling):
                assert await connection.reader.read() == b""
            trickle.cancel()
        for response in responses:
            assert (response.status, response.error["code"]) == (408, "headers_too_slow")
            assert response.headers["x-request-id"]
        assert (await get(server, "/livez")).status == 200


async def _trickle(writer: asyncio.StreamWriter) -> None:
    """A byte now and then does not make a client a quick one."""
    writer.write(b"GET /livez HTTP/1.1\r\nX: ")
    while True:
        await asyncio.sleep(0.05)
        writer.write(b"y")


@on_each_loop
async def test_between_requests_a_connection_may_rest_but_not_in_the_middle_of_headers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.2)
    async with scripted() as (server, _), connected(server) as connection, asyncio.timeout(10):
        for _ in range(2):
            connection.send(GET[:9])
            await asyncio.sleep(0.05)
            connection.send(GET[9:])
            assert (await connection.response()).status == 200
            await asyncio.sleep(0.4)
        connection.send(GET[:9])
        assert (await connection.response()).status == 408


@on_each_loop
async def test_the_deadline_of_headers_is_none_of_bodies_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.2)
    script = Script(deltas=("x",) * 10, every_s=0.05)
    request = http_request(chat_body())
    async with scripted(script) as (server, _), connected(server) as connection, asyncio.timeout(10):
        connection.send(request[:-20])
        await asyncio.sleep(0.4)
        connection.send(request[-20:])
        assert (await connection.response()).status == 200


@on_each_loop
@pytest.mark.parametrize(
    "behind",
    [
        GET * 50_000,
        http_request(b"x" * 1_000_000),
        POST_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"10000\r\n" + b"x" * 65_536 + b"\r\n10000\r\n",
        GET * 5 + http_request(b"x" * 400_000),
    ],
    ids=["many requests", "a large body", "chunks", "a large body behind others"],
)
async def test_a_client_that_pipelined_much_and_leaves_is_noticed(behind: bytes) -> None:
    async with scripted(ENDLESS) as (server, backend), connected(server) as connection:
        async with asyncio.timeout(10):
            connection.send(http_request(chat_body()))
            await backend.until_running(1)
            connection.send(behind)
            await asyncio.sleep(0.2)  # the server reads what it wants of it
        connection.leave()
        async with asyncio.timeout(1):
            await backend.until_running(0)


@on_each_loop
async def test_what_follows_a_wish_to_upgrade_hides_no_client_that_leaves() -> None:
    async with scripted(ENDLESS) as (server, backend), connected(server) as connection:
        async with asyncio.timeout(10):
            upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\n"
            connection.send(http_request(chat_body(), headers=upgrade))
            await backend.until_running(1)
            connection.send(b"x" * 900_000)
            await asyncio.sleep(0.2)
        connection.leave()
        async with asyncio.timeout(1):
            await backend.until_running(0)


@on_each_loop
async def test_who_sends_on_and_on_behind_a_request_is_cut_off() -> None:
    async with scripted(ENDLESS) as (server, backend), connected(server) as connection, asyncio.timeout(20):
        connection.send(http_request(chat_body()))
        await backend.until_running(1)
        with pytest.raises(ConnectionError):
            await _send_for_ever(connection.writer)
        await backend.until_running(0)


async def _send_for_ever(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(GET * 2000)
        await writer.drain()


@on_each_loop
async def test_as_many_pipelined_requests_as_are_allowed_are_all_answered() -> None:
    async with scripted() as (server, _), connected(server) as connection, asyncio.timeout(10):
        connection.send(http_request(chat_body()) + GET * connections.MAX_PIPELINED)
        for _ in range(1 + connections.MAX_PIPELINED):
            assert (await connection.response()).status == 200


@on_each_loop
async def test_large_bodies_one_after_the_other_are_not_taken_for_pipelining() -> None:
    large = http_request(chat_body(user="x" * 500, metadata={"a": "y" * 700_000}))
    async with scripted() as (server, _), connected(server) as connection, asyncio.timeout(10):
        for _ in range(3):
            connection.send(large)
            assert (await connection.response()).status == 200


BROKEN = {
    "no http": (b"GARBAGE secret\r\n\r\n", 400, "bad_http"),
    "tls": (b"\x16\x03\x01\x02secret\r\n\r\n", 400, "bad_http"),
    "bad url": (b"GET http://[secret HTTP/1.1\r\nHost: t\r\n\r\n", 400, "bad_http"),
    "bad header": (b"GET / HTTP/1.1\r\nHost: t\r\nsec ret: x\r\n\r\n", 400, "bad_http"),
    "negative length": (POST_HEAD + b"Content-Length: -1\r\n\r\nsecret", 400, "bad_http"),
    "odd length": (POST_HEAD + b"Content-Length: secret\r\n\r\n", 400, "bad_http"),
    "unknown coding": (POST_HEAD + b"Transfer-Encoding: secret\r\n\r\nsecret", 400, "bad_http"),
    "bad chunk": (POST_HEAD + b"Transfer-Encoding: chunked\r\n\r\nsecret\r\n\r\n", 400, None),
    "later bad chunk": (
        POST_HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\nsecret\r\n\r\n", 400, None
    ),
    "bad chunk to no route": (
        b"POST /no HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\nsecret\r\n", None, None
    ),
    "expectation": (http_request(chat_body(), headers="Expect: banana\r\n"), 417, "expectation_failed"),
    "unknown method": (b"SECRET /livez HTTP/1.1\r\nHost: t\r\n\r\n", None, None),
}  # fmt: skip


@on_each_loop
@pytest.mark.parametrize("name", BROKEN)
async def test_broken_http_gets_our_shape_and_an_id_and_no_traceback(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    raw, status, code = BROKEN[name]
    async with scripted() as (server, backend), asyncio.timeout(10):
        with capture_logs() as logs, caplog.at_level(logging.DEBUG):
            async with connected(server) as connection:
                connection.send(raw)
                response = await connection.response()
                connection.writer.write_eof()
                rest = await connection.reader.read()
        assert (await get(server, "/livez")).status == 200
    assert 400 <= response.status < 500
    assert response.status == status or status is None
    assert response.error["code"] == code or code is None
    assert response.headers["server"] == "tidegate"
    assert response.headers["x-request-id"]
    assert b"secret" not in response.body.lower() or name == "unknown method"
    assert rest == b"" or rest.startswith(b"HTTP/1.1 400")
    assert not [record for record in caplog.records if record.name.startswith(("aiohttp", "asyncio"))]
    assert "secret" not in json.dumps([{**log, "method": ""} for log in logs])
    assert all("exc_info" not in log for log in logs)
    assert len([log for log in logs if log["log_level"] != "debug"]) <= 2
    assert backend.num_opened == 0


async def test_the_expectation_that_http_knows_is_met() -> None:
    request = http_request(chat_body(), headers="Expect: 100-continue\r\n")
    async with scripted() as (server, _), connected(server) as connection, asyncio.timeout(10):
        connection.send(request)
        assert await connection.head() == (100, {})
        assert (await connection.response()).status == 200
