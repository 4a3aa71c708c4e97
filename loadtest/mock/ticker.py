"""Calls at absolute times: one loop timer for thousands of streams, and how late each call was."""

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Callable

EARLY_S = 0.0005
"""Loop timers count milliseconds; what is due within half of one is done now, not a whole one later."""

MAX_KEPT = 200_000


class Ticker:
    """Belongs to the loop it was made in."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_set = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self.lateness_s: deque[float] = deque(maxlen=MAX_KEPT)
        """Of the latest calls; a call that was early counts as 0."""

    def call_at(self, at: float, call: Callable[[], None]) -> None:
        """On the clock of `time.monotonic()`. Calls due at one time come in the order they were set."""
        self._num_set += 1
        heapq.heappush(self._heap, (at, self._num_set, call))
        if at < self._timer_at:
            self._arm(at)

    def close(self) -> None:
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_later(max(0.0, at - time.monotonic()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._timer_at = float("-inf")  # nothing arms while we are at it
        heap = self._heap
        due_at = time.monotonic() + EARLY_S
        due = deque[tuple[float, int, Callable[[], None]]]()
        while heap and heap[0][0] <= due_at:
            due.append(heapq.heappop(heap))
        try:
            while due:  # what these calls set waits for the next turn, however late: the loop must read, too
                at, _, call = due.popleft()
                self.lateness_s.append(max(0.0, time.monotonic() - at))
                call()
        finally:
            for rest in due:
                heapq.heappush(heap, rest)
            self._timer_at = float("inf")
            if heap:
                self._arm(heap[0][0])
