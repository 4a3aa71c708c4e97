"""Whose prompt the cache holds most of goes first: what is cached is used before it is evicted.

Nobody waits for ever: who was passed over `MAX_PASSES` times is next.

Source: SGLang (arXiv 2312.07104), section 3: cache-aware scheduling; the bound on waiting is ours.
"""

import heapq
from collections import deque
from collections.abc import Iterator

from core.request import Request
from core.scheduler.patience import Patience
from core.scheduler.policies import MatchLength

MAX_PASSES = 64
"""Later requests that may go before an earlier one."""
NUM_LOOKS = 8
"""Look-ups in one search for the head, of each of two kinds, however many wait."""


class LongestPrefix:
    """A heap by cached length as it was last seen.

    The cache changes under those who wait. What shrank is found when it comes up as the head; what grew
    is found by looking at a few others in turn at each search. So a search costs `2 * NUM_LOOKS` look-ups
    at most, and with `n` waiting a longer match is noticed within `n / NUM_LOOKS` searches.
    """

    def __init__(self, match_length: MatchLength) -> None:
        self._match_length = match_length
        self._patience = Patience(MAX_PASSES)
        self._requests: dict[str, Request] = {}
        self._lengths: dict[str, int] = {}
        """As last seen, of everyone who waits."""
        self._heap: list[tuple[int, int, str]] = []  # (-length, arrival, id); may be out of date
        self._in_turn: deque[Request] = deque()

    def push(self, request: Request, *, is_follower: bool = False) -> None:
        self._patience.arrived(request)
        self._requests[request.request_id] = request
        self._in_turn.append(request)
        self._look(request)

    def head(self) -> Request:
        overdue = self._patience.overdue()
        if overdue is not None:
            return overdue
        self._look_at_some()
        for _ in range(NUM_LOOKS):
            request = self._top()
            if not self._look(request):
                break
        return self._top()

    def remove(self, request: Request, *, admitted: bool) -> None:
        self._patience.left(request)
        del self._requests[request.request_id], self._lengths[request.request_id]

    def charge(
        self,
        request: Request,
        *,
        num_prefill_tokens: int = 0,
        num_cached_tokens: int = 0,
        num_output_tokens: int = 0,
    ) -> None:
        """Nobody's share matters here."""

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._patience)

    def _look(self, request: Request) -> bool:
        """Look up one request; True if its cached length is another than before."""
        length = self._match_length(request)
        if self._lengths.get(request.request_id) == length:
            return False
        self._lengths[request.request_id] = length
        heapq.heappush(self._heap, (-length, self._patience.arrival(request), request.request_id))
        if len(self._heap) > 2 * len(self._lengths) + 64:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)
        return True

    def _look_at_some(self) -> None:
        for _ in range(min(NUM_LOOKS, len(self._in_turn))):
            request = self._in_turn.popleft()
            while request.request_id not in self._lengths and self._in_turn:
                request = self._in_turn.popleft()
            if request.request_id in self._lengths:
                self._in_turn.append(request)
                self._look(request)

    def _top(self) -> Request:
        while not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._requests[self._heap[0][2]]

    def _is_current(self, entry: tuple[int, int, str]) -> bool:
        negative, _, request_id = entry
        return self._lengths.get(request_id) == -negative


def create(match_length: MatchLength) -> LongestPrefix:
    return LongestPrefix(match_length)
