"""A client that does not read is held in bounded memory, then ends alone."""

import asyncio
import socket

from gateway.backends.scripted import Script
from gateway.keys import METRICS
from tests.gateway.serving import Server, ask, chat_body, connected, http_request, metric, scripted

BIG_DELTA = "x" * 20_000
FLOOD = Script(deltas=(BIG_DELTA,) * 5_000)  # 100 MB: more than any socket buffer


async def slow_socket(server: Server) -> socket.socket:
    """A connection with a small receive window that nobody reads from."""
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await loop.sock_connect(sock, ("127.0.0.1", server.port))
    await loop.sock_sendall(sock, http_request(chat_body(stream=True)))
    return sock


async def test_a_reader_slower_than_the_deadline_loses_its_connection_and_its_generation() -> None:
    async with scripted(FLOOD, send_timeout_s=0.2) as (server, backend), asyncio.timeout(20):
        with await slow_socket(server):
            await backend.until_running(1)
            await backend.until_running(0)
        assert backend.num_deltas < 5_000
        assert metric(server.app[METRICS].scrape(), 'tidegate_requests_total{outcome="slow_reader"}') == 1


async def test_a_reader_that_stops_and_then_leaves_with_everything_full_ends_at_once() -> None:
    async with scripted(FLOOD, send_timeout_s=3600) as (server, backend), asyncio.timeout(20):
        sock = await slow_socket(server)
        with sock:
            await backend.until_running(1)
            num_deltas = -1
            while num_deltas != backend.num_deltas:  # until every buffer on the way is full
                num_deltas = backend.num_deltas
                await asyncio.sleep(0.05)
        await backend.until_running(0)  # its end waits for no room in any of them


async def test_what_waits_for_a_slow_reader_is_bounded() -> None:
    async with scripted(FLOOD, send_timeout_s=0.3, send_buffer_bytes=64 * 1024) as (server, backend):
        async with asyncio.timeout(20):
            with await slow_socket(server):
                await backend.until_running(1)
                await backend.until_running(0)
        # What left the backend is in the process (64 KiB and one event) or in the kernel's socket buffers.
        kernel = 8 * 1024 * 1024
        assert backend.num_deltas * len(BIG_DELTA) < kernel + 64 * 1024 + 2 * len(BIG_DELTA)


async def test_others_go_on_while_one_does_not_read() -> None:
    async with scripted(FLOOD, send_timeout_s=5) as (server, backend), asyncio.timeout(20):
        with await slow_socket(server):
            await backend.until_running(1)
            backend.script = Script(deltas=("quick",) * 50)
            for _ in range(5):
                response = await ask(server, chat_body(stream=True))
                assert response.body.count(b"quick") == 50
        await backend.until_running(0)


async def test_a_reader_that_is_slow_but_reads_gets_everything() -> None:
    script = Script(deltas=(BIG_DELTA,) * 100)
    async with scripted(script, send_timeout_s=2) as (server, _), connected(server) as connection:
        connection.send(http_request(chat_body(stream=True)))
        await connection.head()
        body = b""
        while chunk := await connection.chunk():
            body += chunk
            await asyncio.sleep(0.001)
        assert body.count(b"x") >= 100 * len(BIG_DELTA)
        assert body.endswith(b"data: [DONE]\n\n")


async def test_comments_do_not_pile_up_for_a_reader_that_is_stuck() -> None:
    async with scripted(FLOOD, send_timeout_s=0.4, keep_alive_s=0.02) as (server, backend):
        async with asyncio.timeout(20):
            with await slow_socket(server):
                await backend.until_running(1)
                await backend.until_running(0)
