"""How fast a busy server gets rid of requests, and so how long a refused client should stay away."""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable

MIN_WAIT_S = 1
MAX_WAIT_S = 60
_NUM_REMEMBERED = 64


class ServiceRate:
    """Counts departures while all places are taken; at other times they tell how many came, not how fast
    the server is.

    Args:
        now: a clock in seconds that never goes back.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._busy_since: float | None = None
        self._departures: deque[float] = deque(maxlen=_NUM_REMEMBERED)

    def became_busy(self) -> None:
        """All places are taken. Harmless if they were before."""
        if self._busy_since is None:
            self._busy_since = self._now()
            self._departures.clear()

    def became_idle(self) -> None:
        """A place is free."""
        self._busy_since = None

    def departed(self, count: int = 1) -> None:
        """So many have left their places."""
        if self._busy_since is not None:
            self._departures.extend(itertools.repeat(self._now(), count))

    def wait_s(self, num_ahead: int) -> int:
        """Predict in how many seconds `num_ahead` requests will have left: 1 to 60, never fewer for more.

        Silence counts: the longer nobody has left, the longer the wait.
        """
        if self._busy_since is None:
            return MIN_WAIT_S
        is_full = len(self._departures) == _NUM_REMEMBERED
        since = self._departures[0] if is_full else self._busy_since
        # Before anybody has left, as if the first one were about to.
        num_departed = max(1, len(self._departures) - is_full)
        seconds = num_ahead * (self._now() - since) / num_departed
        return min(max(math.ceil(seconds), MIN_WAIT_S), MAX_WAIT_S)
