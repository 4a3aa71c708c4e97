"""Remembers what long segments encode to, so that the next turn of a session costs its new text alone."""

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

MIN_CHARS = 64
"""Shorter segments are encoded quicker than they are looked up."""

MAX_BYTES = 32 << 20
"""Of texts and ids together, over all scopes."""


class SegmentMemory:
    """Wraps an encoder of segments; the least recently used segments are forgotten first.

    Segments are what stands between control tokens, so they encode alone to what they encode to in any
    company. A scope never sees what another one remembers: not even by how long encoding takes.
    Any thread may use it; the lock is never held while something is encoded.
    """

    def __init__(
        self, encode: Callable[[Sequence[str]], Iterable[list[int]]], *, max_bytes: int = MAX_BYTES
    ) -> None:
        self._encode = encode
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._num_bytes = 0
        self.num_encoded_chars = 0
        """Characters that had to be encoded, of all calls."""

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def encode_segments(self, segments: Sequence[str], *, scope: str) -> Iterable[Sequence[int]]:
        """The ids of each segment, as the encoder gives them."""
        with self._lock:
            known = [self._recall((scope, segment)) for segment in segments]
        missing = [segment for segment, ids in zip(segments, known, strict=True) if ids is None]
        encoded = iter(self._encode(missing))
        for segment, ids in zip(segments, known, strict=True):
            if ids is not None:
                yield ids
                continue
            fresh = next(encoded)
            self._remember((scope, segment), fresh)
            yield fresh

    def check(self) -> None:
        """Assert the invariants. For tests."""
        with self._lock:
            assert self._num_bytes == sum(_size(key, ids) for key, ids in self._entries.items())
            assert self._num_bytes <= self._max_bytes

    def _recall(self, key: tuple[str, str]) -> "array[int] | None":
        ids = self._entries.get(key) if len(key[1]) >= MIN_CHARS else None
        if ids is not None:
            self._entries.move_to_end(key)
        return ids

    def _remember(self, key: tuple[str, str], ids: list[int]) -> None:
        packed = array("i", ids) if len(key[1]) >= MIN_CHARS else array("i")
        size = _size(key, packed)
        with self._lock:
            self.num_encoded_chars += len(key[1])
            if len(key[1]) < MIN_CHARS or size > self._max_bytes or key in self._entries:
                return
            self._entries[key] = packed
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                oldest = self._entries.popitem(last=False)
                self._num_bytes -= _size(*oldest)


def _size(key: tuple[str, str], ids: "array[int]") -> int:
    return sys.getsizeof(key[1]) + sys.getsizeof(ids)
