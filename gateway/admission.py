"""Who may be in the server at once: a permit for each generation, and a door that closes for draining."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.errors import Draining, Overloaded

MAX_READING_BYTES = 256 * 1024 * 1024
"""Bodies on their way in, together. Each is bounded; a thousand connections of them are not."""


class Admission:
    """Hands out permits. Touched by the event loop alone.

    Invariants: `num_admitted` is the number of open `permit()` scopes, and at most `max_admitted`;
    `num_reading_bytes` is what the open `reading()` scopes asked for, and at most
    `max_reading_bytes` unless one alone is larger.
    """

    def __init__(self, *, max_admitted: int, max_reading_bytes: int = MAX_READING_BYTES) -> None:
        assert max_admitted > 0, "a server that admits nobody"
        self.max_admitted = max_admitted
        self.num_admitted = 0
        self.num_refused = 0
        self.max_reading_bytes = max_reading_bytes
        self.num_reading_bytes = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def draining(self) -> bool:
        return self._draining

    def refuse_if_closed(self) -> None:
        """Say no before a body is read for nothing.

        Raises:
            Draining, Overloaded: as `permit()` would.
        """
        if self._draining:
            self.num_refused += 1
            raise Draining
        if self.num_admitted >= self.max_admitted:
            self.num_refused += 1
            raise Overloaded(num_admitted=self.num_admitted)

    @contextmanager
    def permit(self) -> Iterator[None]:
        """Hold one permit for the length of the scope. Never waits: the engine has the queue.

        Raises:
            Draining, Overloaded: no permit was taken.
        """
        self.refuse_if_closed()
        self.num_admitted += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_admitted -= 1
            if self.num_admitted == 0:
                self._idle.set()
            self.check()

    @contextmanager
    def reading(self, num_bytes: int) -> Iterator[None]:
        """Hold room for a body that is being read and parsed: permits bound none of that.

        Raises:
            Overloaded: too many large bodies at once; a single one always fits.
        """
        if self.num_reading_bytes and self.num_reading_bytes + num_bytes > self.max_reading_bytes:
            self.num_refused += 1
            raise Overloaded(num_admitted=self.num_admitted)
        self.num_reading_bytes += num_bytes
        try:
            yield
        finally:
            self.num_reading_bytes -= num_bytes
            self.check()

    def close(self) -> None:
        """Admit nobody from now on. Permits given out stay good."""
        self._draining = True

    async def idle(self) -> None:
        """Wait until all permits are back."""
        await self._idle.wait()

    def check(self) -> None:
        assert 0 <= self.num_admitted <= self.max_admitted
        assert self.num_reading_bytes >= 0
        assert self._idle.is_set() == (self.num_admitted == 0)
