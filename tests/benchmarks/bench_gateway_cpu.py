"""CPU time the gateway spends per streamed token, without a model.

    python -m tests.benchmarks.bench_gateway_cpu

The clients are a child process that does nothing but read; only the server's own CPU time is counted.
"""

import argparse
import asyncio
import json
import multiprocessing
import resource
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvloop

from core import EngineConfig
from gateway.app import build_app
from gateway.backends import Backend
from gateway.backends.scripted import Script, ScriptedBackend
from gateway.config import ServerConfig
from gateway.keys import LIFECYCLE, METRICS
from gateway.lifespan import bind, run
from gateway.telemetry.logging import configure_logging

BODY = json.dumps(
    {"model": "scripted", "messages": [{"role": "user", "content": "x" * 500}], "stream": True}
).encode()
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: b\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    % len(BODY)
    + BODY
)

GATHER_S = 3.0
"""The first token waits so long, so that all streams are open before any ends."""


def read_streams(port: int, num_streams: int) -> None:
    """Open all streams, then read until each has ended."""

    async def read_one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        while await reader.read(1 << 16):
            pass
        writer.close()

    async def read_all() -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_streams):
                tasks.create_task(read_one())

    asyncio.run(read_all())


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def measure(sock: socket.socket, *, num_streams: int, num_tokens: int, every_s: float) -> None:
    backend = ScriptedBackend(
        Script(deltas=(" token",) * num_tokens, every_s=every_s, first_after_s=GATHER_S)
    )

    @asynccontextmanager
    async def open_backend(_config: ServerConfig) -> AsyncIterator[Backend]:
        yield backend

    config = ServerConfig(
        engine=EngineConfig(checkpoint="none", max_running=64), max_queued=num_streams, access_log=False
    )
    app = build_app(config)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(app, sock=sock, open_backend=open_backend, handle_signals=False))
        await app[LIFECYCLE].ready()
        port = sock.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        clients = context.Process(target=read_streams, args=(port, num_streams))
        clients.start()
        await backend.until_running(num_streams)
        began_at, cpu_began_s, deltas_before = time.perf_counter(), cpu_s(), backend.num_deltas
        await backend.until_running(0)
        took_s, used_s = time.perf_counter() - began_at, cpu_s() - cpu_began_s
        num_deltas = backend.num_deltas - deltas_before
        app[LIFECYCLE].request_stop()
    clients.join()
    lag = [line for line in app[METRICS].scrape().decode().splitlines() if "lag_seconds_sum" in line]
    sys.stdout.write(
        f"{num_streams} streams of {num_tokens} tokens: {1e6 * used_s / num_deltas:.1f} us of CPU per token "
        f"({num_deltas / took_s:,.0f} tokens/s, one core {100 * used_s / took_s:.0f} % busy; {lag[0]})\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--every-s", type=float, default=0.0, help="0: as fast as the loop turns")
    options = parser.parse_args()
    configure_logging(level="error", log_format="console")
    with bind("127.0.0.1", 0) as sock:
        uvloop.run(
            measure(sock, num_streams=options.streams, num_tokens=options.tokens, every_s=options.every_s)
        )


if __name__ == "__main__":
    main()
