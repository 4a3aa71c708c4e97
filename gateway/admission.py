"""Who may be in the server at once: a permit for each generation, and a door that closes for draining."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.errors import BodiesOverloaded, Draining, InvalidRequest, Overloaded
from gateway.service_rate import ServiceRate

MAX_READING_BYTES = 256 * 1024 * 1024
"""Bodies on their way in, together. Each is bounded; a thousand connections of them are not."""
SMALL_BODY_BYTES = 64 * 1024
"""A body up to this size is read however full the server is of large ones: it is over in a moment."""


class Reading:
    """The room that one body takes while it is read and parsed: what has come of it, not what was said."""

    def __init__(self, admission: "Admission") -> None:
        self._admission = admission
        self.num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Take room for bytes that have come.

        Raises:
            BodiesOverloaded: other bodies have it all; one alone always fits, and so does a small one.
        """
        self._admission.take_room(num_bytes, held=self.num_bytes)
        self.num_bytes += num_bytes


class Admission:
    """Hands out permits. Touched by the event loop alone.

    Invariants: `num_admitted` is what the open `permit()` scopes hold, and at most `max_admitted`;
    `num_reading_bytes` is what the open `reading()` scopes hold, and at most `max_reading_bytes`
    beside small bodies and a first one that alone is larger.
    """

    def __init__(
        self,
        *,
        max_running: int,
        max_queued: int = 0,
        max_reading_bytes: int = MAX_READING_BYTES,
        rate: ServiceRate | None = None,
    ) -> None:
        assert max_running > 0, "a server that admits nobody"
        self.max_running = max_running
        self.max_admitted = max_running + max_queued
        self.num_admitted = 0
        self.num_refused = 0
        self.max_reading_bytes = max_reading_bytes
        self.num_reading_bytes = 0
        self._rate = rate or ServiceRate()
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
            raise self._overloaded()

    @contextmanager
    def permit(self, num: int = 1) -> Iterator[None]:
        """Hold a permit for each of `num` choices, for the length of the scope. Never waits.

        The engine has the queue.

        Raises:
            InvalidRequest: more than there are, whoever else is here.
            Draining, Overloaded: no permit was taken.
        """
        if num > self.max_admitted:
            raise InvalidRequest(
                f"the request has {num} choices; the server takes at most {self.max_admitted} at once",
                param="n",
            )
        self.refuse_if_closed()
        if self.num_admitted + num > self.max_admitted:
            raise self._overloaded()
        self.num_admitted += num
        self._idle.clear()
        if self.num_admitted >= self.max_running:
            self._rate.became_busy()
        try:
            yield
        finally:
            self.num_admitted -= num
            self._rate.departed(num)
            if self.num_admitted < self.max_running:
                self._rate.became_idle()
            if self.num_admitted == 0:
                self._idle.set()
            self.check()

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """Hold room for a body that is being read and parsed: permits bound none of that."""
        reading = Reading(self)
        try:
            yield reading
        finally:
            self.num_reading_bytes -= reading.num_bytes
            self.check()

    def take_room(self, num_bytes: int, *, held: int) -> None:
        """Called by a `Reading` that holds `held` bytes already."""
        is_alone = self.num_reading_bytes == held
        is_full = self.num_reading_bytes + num_bytes > self.max_reading_bytes
        if is_full and not is_alone and held + num_bytes > SMALL_BODY_BYTES:
            self.num_refused += 1
            raise BodiesOverloaded(num_bytes=self.num_reading_bytes)
        self.num_reading_bytes += num_bytes

    def _overloaded(self) -> Overloaded:
        """Tells to come back when all who wait now will have had their turn, and one place is left."""
        self.num_refused += 1
        num_ahead = max(0, self.num_admitted - self.max_running) + 1
        return Overloaded(num_admitted=self.num_admitted, retry_after_s=self._rate.wait_s(num_ahead))

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
