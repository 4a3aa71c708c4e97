"""What service costs, in weighted tokens, and who was served least so far."""

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from core.request import Request

CACHED_WEIGHT = 1
"""A prompt token that the cache held: only room."""
PREFILL_WEIGHT = 10
"""A computed prompt token."""
OUTPUT_WEIGHT = 20
"""A generated token: twice a prompt token, as in VTC (arXiv 2401.00588, section 5)."""

MAX_KEYS = 16_384
"""Counters that are kept. Beyond it those that were idle longest are forgotten."""

Key = TypeVar("Key", bound=Hashable)


def weigh(*, num_prefill_tokens: int = 0, num_cached_tokens: int = 0, num_output_tokens: int = 0) -> int:
    return (
        PREFILL_WEIGHT * num_prefill_tokens
        + CACHED_WEIGHT * num_cached_tokens
        + OUTPUT_WEIGHT * num_output_tokens
    )


class LeastServed(Generic[Key]):
    """One queue of requests per key, in order of arrival; the key whose counter is lowest is next.

    Counters only grow, so a heap of counters as they once were is put right when its top is looked at:
    a search is O(log keys) for each counter that has grown since. Equal counters go in turn.
    """

    def __init__(self, *, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._counters: OrderedDict[Key, int] = OrderedDict()  # idle longest first
        self._waiting: dict[Key, dict[str, Request]] = {}  # never an empty queue
        self._heap: list[tuple[int, int, Key]] = []  # (counter, turn, key), one at most for each key
        self._in_heap: set[Key] = set()
        self._turn = 0
        self._num_waiting = 0

    def counter(self, key: Key) -> int:
        return self._counters.get(key, 0)

    def add(self, key: Key, amount: int) -> None:
        """Charge a key."""
        assert amount >= 0, "service cannot be taken back"
        self._counters[key] = self._counters.get(key, 0) + amount
        self._counters.move_to_end(key)
        if len(self._counters) > self._max_keys:
            self._forget_idle()

    def raise_to(self, key: Key, counter: int) -> None:
        """Let a key's counter be no lower than that."""
        self.add(key, max(0, counter - self.counter(key)))

    def waits(self, key: Key) -> bool:
        return key in self._waiting

    def push(self, key: Key, request: Request) -> None:
        self._waiting.setdefault(key, {})[request.request_id] = request
        self._num_waiting += 1
        if key not in self._in_heap:
            self._enter(key)

    def remove(self, key: Key, request: Request) -> None:
        queue = self._waiting[key]
        del queue[request.request_id]
        self._num_waiting -= 1
        if not queue:
            del self._waiting[key]

    def head(self) -> Request:
        """The oldest request of the key that was served least. Somebody must wait."""
        return next(iter(self._waiting[self.least()].values()))

    def least(self) -> Key:
        """The waiting key with the lowest counter."""
        while True:
            counter, _, key = self._heap[0]
            if key in self._waiting and counter == self.counter(key):
                return key
            heapq.heappop(self._heap)
            self._in_heap.remove(key)
            if key in self._waiting:
                self._enter(key)

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        for queue in self._waiting.values():
            yield from queue.values()

    def check(self) -> None:
        """Assert the invariants. Tests call this after every operation."""
        assert all(self._waiting.values()), "an empty queue is kept"
        assert sum(map(len, self._waiting.values())) == self._num_waiting
        assert {key for _, _, key in self._heap} == self._in_heap >= self._waiting.keys()
        assert len(self._heap) == len(self._in_heap)
        assert len(self._heap) <= 2 * len(self._waiting) + 64 + 1, "stale entries pile up"
        assert all(counter <= self.counter(key) for counter, _, key in self._heap)
        assert len(self._counters) <= self._max_keys + len(self._heap)

    def _enter(self, key: Key) -> None:
        self._turn += 1
        self._in_heap.add(key)
        heapq.heappush(self._heap, (self.counter(key), self._turn, key))
        if len(self._heap) > 2 * len(self._waiting) + 64:  # keys that left without having been the least
            self._heap = [entry for entry in self._heap if entry[2] in self._waiting]
            self._in_heap = {key for _, _, key in self._heap}
            heapq.heapify(self._heap)

    def _forget_idle(self) -> None:
        """Forget the counter that was idle longest. Those of keys in the heap are needed there."""
        for key in self._counters:
            if key not in self._in_heap:
                del self._counters[key]
                return
