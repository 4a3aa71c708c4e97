"""A scripted server with its own loop in a thread, for tests and clients that block."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gateway.backends.scripted import Script, ScriptedBackend
from tests.gateway.serving import Server, scripted


@contextmanager
def server_thread(script: Script | None = None, **changes: Any) -> Iterator[tuple[Server, ScriptedBackend]]:
    """Leaving the scope stops the server and fails if it held anything or broke."""
    ready: list[tuple[Server, ScriptedBackend]] = []
    started = threading.Event()
    failures: list[BaseException] = []

    async def serve() -> None:
        async with scripted(script, **changes) as served:
            stop = asyncio.Event()
            ready.append(served)
            stops.append((asyncio.get_running_loop(), stop))
            started.set()
            await stop.wait()

    def main() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failures.append(error)
        finally:
            started.set()

    stops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    thread = threading.Thread(target=main, name="server")
    thread.start()
    started.wait()
    try:
        if ready:
            yield ready[0]
    finally:
        for loop, stop in stops:
            loop.call_soon_threadsafe(stop.set)
        thread.join()
    for failure in failures:
        raise failure
