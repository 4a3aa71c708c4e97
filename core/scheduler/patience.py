"""How often a waiting request may be passed over: the bound that keeps clever orders from starving anyone."""

from collections.abc import Iterator

from core.request import Request


class Patience:
    """Waiting requests in order of arrival.

    Only the oldest needs a look: whoever goes before a request goes before all that are older, so the
    oldest was passed over at least as often as anybody. If `overdue` goes first whenever there is one,
    nobody is passed over by more than `max_passes` later requests. Requests that end while they wait
    count as passing those who are older: the bound errs to their side. All of it is O(1).
    """

    def __init__(self, max_passes: int) -> None:
        assert max_passes >= 0
        self._max_passes = max_passes
        self._waiting: dict[str, tuple[int, Request]] = {}  # id -> arrival, counted from 0; oldest first
        self._num_arrived = 0
        self._num_left = 0

    def arrived(self, request: Request) -> None:
        self._waiting[request.request_id] = (self._num_arrived, request)
        self._num_arrived += 1

    def left(self, request: Request) -> None:
        del self._waiting[request.request_id]
        self._num_left += 1

    def arrival(self, request: Request) -> int:
        """The number of those that came before."""
        return self._waiting[request.request_id][0]

    def overdue(self) -> Request | None:
        """Who must be next, if somebody must."""
        for arrival, request in self._waiting.values():
            # All `arrival` requests before the oldest have left; the others that left came after it.
            return request if self._num_left - arrival >= self._max_passes else None
        return None

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._waiting.values())
