"""Bounds on what clients may send and how many may come, and the words that tell them so."""

import asyncio
import json

import pytest

from core import EngineConfig
from gateway.backends.scripted import Script
from gateway.connections import MAX_HEADER_BYTES, MAX_HEADERS
from tests.gateway.serving import CHAT, ask, chat_body, connected, get, http_request, scripted


@pytest.mark.parametrize(
    "head",
    [
        b"GET /livez HTTP/1.1\r\nHost: t\r\nX: " + b"y" * (MAX_HEADER_BYTES + 1) + b"\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: t\r\n" + b"y" * (MAX_HEADER_BYTES + 1) + b": x\r\n\r\n",
        b"GET /" + b"y" * (MAX_HEADER_BYTES + 1) + b" HTTP/1.1\r\nHost: t\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: t\r\n" + b"X: y\r\n" * MAX_HEADERS + b"\r\n",
        b"GARBAGE \x00\xff\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n",  # TLS spoken to a plain port
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
async def test_broken_or_oversized_http_is_refused_in_our_shape_and_tells_nothing(head: bytes) -> None:
    async with scripted() as (server, backend):
        async with connected(server) as connection, asyncio.timeout(10):
            connection.send(head)
            response = await connection.response()
            assert await connection.reader.read() == b""  # closed
        assert response.status == 400
        assert response.error["code"] == "bad_http"
        assert response.headers["server"] == "tidegate"
        assert b"yyyy" not in response.body
        assert (await get(server, "/livez")).status == 200
        assert backend.num_opened == 0


async def test_headers_without_an_end_are_cut_off_early() -> None:
    async with scripted() as (server, _), connected(server) as connection, asyncio.timeout(20):
        connection.send(b"GET /livez HTTP/1.1\r\nHost: t\r\nX: ")
        num_sent = 0
        try:
            while num_sent < 1 << 30:  # the client would go on for ever
                connection.send(b"y" * 65536)
                num_sent += 65536
                await connection.writer.drain()
                if connection.reader.at_eof():
                    break
                await asyncio.sleep(0)
        except ConnectionError:
            pass
    assert num_sent < 64 << 20


async def test_a_request_just_within_the_header_bounds_is_served() -> None:
    headers = "".join(f"X-{number}: y\r\n" for number in range(MAX_HEADERS - 8))
    long = f"X: {'y' * (MAX_HEADER_BYTES - 100)}\r\n"
    async with scripted() as (server, _):
        for extra in (headers, long):
            assert (await ask(server, chat_body(), headers=extra)).status == 200


async def test_no_response_names_a_version() -> None:
    async with scripted() as (server, _):
        responses = [
            await get(server, path) for path in ("/livez", "/readyz", "/metrics", "/v1/models", "/nowhere")
        ]
        responses += [await ask(server, chat_body(stream=True)), await ask(server, b"{")]
    for response in responses:
        assert response.headers["server"] == "tidegate"
        assert "aiohttp" not in json.dumps(response.headers).lower()


async def test_the_time_to_stay_away_is_predicted_from_the_queue_and_the_servers_speed() -> None:
    endless = Script(deltas=("x",) * 1_000_000, every_s=0.01)
    engine = EngineConfig(checkpoint="scripted", max_running=1)
    async with scripted(endless, max_queued=9, engine=engine) as (server, backend), asyncio.timeout(30):
        leave = asyncio.Event()

        async def hold() -> None:
            async with connected(server) as connection:
                connection.send(http_request(chat_body(stream=True)))
                await connection.head()
                await leave.wait()
                connection.leave()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(10):
                tasks.create_task(hold())
            await backend.until_running(10)
            waits = []
            for _ in range(3):
                refused = await ask(server, chat_body())
                assert refused.status == 429
                waits.append(int(refused.headers["retry-after"]))
                await asyncio.sleep(0.15)  # time in which nobody leaves is what is measured
            leave.set()
        # Ten are ahead and none has left, so each tenth of a second adds a second or more.
        assert 1 <= waits[0] < waits[1] < waits[2] <= 60


async def test_a_client_that_hangs_up_in_the_middle_of_its_headers_leaves_nothing_behind() -> None:
    async with scripted(max_connections=2) as (server, _), asyncio.timeout(20):
        for _ in range(20):
            async with connected(server) as connection:
                connection.send(f"POST {CHAT} HTTP/1.1\r\nHost".encode())
                connection.leave()
            # A connection's end reaches the server a turn or two later; until then it counts.
            while (await get(server, "/livez")).status != 200:  # noqa: ASYNC110  # it tells nobody
                await asyncio.sleep(0)
