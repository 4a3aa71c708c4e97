"""A server with its own loop in a thread, for tests and clients that block."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeVar

from gateway.backends.scripted import Script, ScriptedBackend
from tests.gateway.serving import Server, scripted

_T = TypeVar("_T")


@contextmanager
def in_thread(opened: Callable[[], AbstractAsyncContextManager[_T]]) -> Iterator[_T]:
    """What `opened` gives, living in a thread. Leaving the scope closes it and raises if that failed."""
    ready: list[_T] = []
    started = threading.Event()
    failures: list[BaseException] = []

    async def serve() -> None:
        async with opened() as served:
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


@contextmanager
def server_thread(script: Script | None = None, **changes: Any) -> Iterator[tuple[Server, ScriptedBackend]]:
    """A scripted server. Leaving the scope fails if it held anything or broke."""
    with in_thread(lambda: scripted(script, **changes)) as served:
        yield served
