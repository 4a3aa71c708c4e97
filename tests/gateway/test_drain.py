"""Stopping: new requests are refused, running ones finish or end with an error event."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.backends import Backend
from gateway.backends.scripted import Script, ScriptedBackend
from gateway.config import ServerConfig
from gateway.keys import LIFECYCLE
from gateway.lifespan import bind
from tests.gateway.serving import (
    ask,
    chat_body,
    connected,
    get,
    http_request,
    scripted,
    serving,
    sse_data,
)

SLOW = Script(deltas=("x",) * 30, every_s=0.02)


async def test_a_running_stream_finishes_while_new_requests_get_503() -> None:
    async with scripted(SLOW) as (server, backend), connected(server) as connection, asyncio.timeout(20):
        connection.send(http_request(chat_body(stream=True)))
        await connection.head()
        await connection.chunk()
        server.stop()
        await server.app[LIFECYCLE].draining()
        refused = await ask(server, chat_body())
        assert refused.status == 503
        assert refused.error["code"] == "draining"
        assert int(refused.headers["retry-after"]) > 0
        assert refused.headers["connection"] == "close"
        assert (await get(server, "/readyz")).json == {"status": "draining"}
        assert (await get(server, "/livez")).status == 200
        body = b""
        while chunk := await connection.chunk():
            body += chunk
        assert body.count(b'"content":"x"') == 30
        assert body.endswith(b"data: [DONE]\n\n")
        await server.stopped
    assert backend.num_opened == 1


async def test_a_stream_that_outlives_the_deadline_ends_with_an_error_event() -> None:
    endless = Script(deltas=("x",) * 1_000_000, every_s=0.01)
    async with scripted(endless, drain_timeout_s=0.1) as (server, _):
        streamed = asyncio.create_task(ask(server, chat_body(stream=True)))
        whole = asyncio.create_task(ask(server, chat_body()))
        async with connected(server) as connection, asyncio.timeout(20):
            connection.send(http_request(chat_body(stream=True)))
            await connection.head()
            server.stop()
            await server.stopped
        events = sse_data((await streamed).body)
        assert events[-1]["error"]["code"] == "draining"
        assert "[DONE]" not in events
        assert (await whole).status == 503
        assert (await whole).error["code"] == "draining"


async def test_asked_twice_the_server_does_not_wait_for_running_requests() -> None:
    endless = Script(deltas=("x",) * 1_000_000, every_s=0.01)
    async with scripted(endless, drain_timeout_s=3600) as (server, backend), asyncio.timeout(20):
        streamed = asyncio.create_task(ask(server, chat_body(stream=True)))
        await backend.until_running(1)
        server.stop()
        server.stop()
        await server.stopped
        assert sse_data((await streamed).body)[-1]["error"]["code"] == "draining"


async def test_an_idle_server_stops_at_once_and_frees_its_port() -> None:
    async with scripted(drain_timeout_s=3600) as (server, _), asyncio.timeout(5):
        assert (await get(server, "/readyz")).status == 200
        server.stop()
        await server.stopped
        with bind("127.0.0.1", server.port) as again:
            assert again.getsockname()[1] == server.port


async def test_while_the_model_loads_probes_are_answered_and_requests_wait_outside() -> None:
    loading = asyncio.Event()

    @asynccontextmanager
    async def never_ready(_config: ServerConfig) -> AsyncIterator[Backend]:
        loading.set()
        await asyncio.Event().wait()
        yield ScriptedBackend()

    async with serving(never_ready, ready=False) as server, asyncio.timeout(10):
        await loading.wait()
        assert (await get(server, "/livez")).status == 200
        assert (await get(server, "/readyz")).status == 503
        assert (await get(server, "/v1/models")).json == {"object": "list", "data": []}
        refused = await ask(server, chat_body())
        assert refused.status == 503
        assert refused.error["code"] == "not_ready"
        server.stop()  # a stop while loading does not wait for the load
        await server.stopped


async def test_a_busy_port_is_found_out_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            bind("127.0.0.1", taken.getsockname()[1])
