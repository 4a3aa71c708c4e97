"""Where the server stands between its first and its last breath, and who asked it to stop."""

import asyncio
from enum import StrEnum


class Phase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Lifecycle:
    """Moves forward only. Signals call `request_stop()`; the lifespan does the rest."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self._ready = asyncio.Event()
        self._draining = asyncio.Event()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    def became_ready(self) -> None:
        assert self.phase is Phase.STARTING, self.phase
        self.phase = Phase.READY
        self._ready.set()

    def began_draining(self) -> None:
        self.phase = Phase.DRAINING
        self._draining.set()

    def request_stop(self) -> None:
        """Ask for a graceful stop; asked twice, running requests are cut short."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def ready(self) -> None:
        """Wait until a backend has loaded."""
        await self._ready.wait()

    async def draining(self) -> None:
        """Wait until new requests are refused."""
        await self._draining.wait()

    async def stop_requested(self) -> None:
        await self._stop.wait()

    async def hurry_requested(self) -> None:
        await self._hurry.wait()
