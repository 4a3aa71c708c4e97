"""How late the event loop is, for the step that made it so."""

import asyncio
from collections.abc import Callable
from time import monotonic

EVERY_S = 0.05


class LagProbe:
    """A timer that knows when it should have fired. `take` may be called between two firings, too."""

    def __init__(self, *, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._due_at: float | None = None
        self._worst_s = 0.0

    async def run(self) -> None:
        """Look at the clock for ever."""
        while True:
            self.expect(EVERY_S)
            await asyncio.sleep(EVERY_S)
            self.fired()

    def expect(self, after_s: float) -> None:
        self._due_at = self._now() + after_s

    def fired(self) -> None:
        self._worst_s = max(self._worst_s, self._lateness_s())
        self._due_at = None

    def take(self) -> float:
        """The worst lateness in seconds since the last call; what has not fired yet counts so far."""
        worst_s = max(self._worst_s, self._lateness_s())
        self._worst_s = 0.0
        return worst_s

    def _lateness_s(self) -> float:
        return 0.0 if self._due_at is None else max(0.0, self._now() - self._due_at)
