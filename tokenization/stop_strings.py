"""Stop strings in streamed text: emit what can no longer be part of one, withhold the rest."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Node:
    """A prefix of a stop string, in the Aho-Corasick automaton."""

    depth: int
    next: dict[str, "_Node"] = field(default_factory=dict)
    fail: "_Node | None" = None  # the longest proper suffix of this prefix that is a prefix too
    stop: str | None = None  # the longest stop string that ends here


class StopMatcher:
    """Owned by one generation. The result is the same however the text is cut into pushes.

    The stop string that is complete first wins, so generation ends as soon as it can; of several
    complete at the same character, the longest, so that none of it is emitted.

    Invariant: withheld is exactly the longest suffix that is a proper prefix of a stop string.
    Source: Aho and Corasick, CACM 18(6), 1975. One dictionary step per character, amortised.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        assert all(self._stops), "an empty stop string matches everywhere; refuse it before this"
        self._root = self._node = _automaton(self._stops)
        self._held = ""
        self._num_emitted = 0
        self._closed = False
        self.match_offset: int | None = None
        """Where the matched stop string begins, in characters of all the text pushed."""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; returns what may be emitted, and the stop string once one is complete.

        Text before a stop string in the same piece is emitted; text after it is dropped.
        """
        assert not self._closed, "push after a match or flush"
        if not self._root.next:
            self._num_emitted += len(text)
            return text, None
        pending = self._held + text
        node = self._node
        for end, char in enumerate(text, start=len(self._held) + 1):
            node = self._step(node, char)
            if node.stop is not None:
                return self._match(pending[: end - len(node.stop)], node.stop)
        self._node = node
        emitted = pending[: len(pending) - node.depth]
        self._held = pending[len(emitted) :]
        self._num_emitted += len(emitted)
        return emitted, None

    def flush(self) -> str:
        """The text ended: what was withheld turned out to be ordinary text. Empty after a match."""
        held, self._held = self._held, ""
        self._num_emitted += len(held)
        self._closed = True
        return held

    def check(self) -> None:
        """Assert the invariant. Tests call this after every operation."""
        if self._closed:
            assert self._held == ""
            return
        assert self.match_offset is None
        assert all(stop not in self._held for stop in self._stops)
        assert not self._held or any(
            len(self._held) < len(stop) and stop.startswith(self._held) for stop in self._stops
        )

    def _step(self, node: _Node, char: str) -> _Node:
        while (following := node.next.get(char)) is None:
            if node.fail is None:
                return node  # the root: no stop string begins with `char`
            node = node.fail
        return following

    def _match(self, emitted: str, stop: str) -> tuple[str, str]:
        self._num_emitted += len(emitted)
        self.match_offset = self._num_emitted
        self._held = ""
        self._closed = True
        return emitted, stop


def _automaton(stops: Iterable[str]) -> _Node:
    root = _Node(depth=0)
    for stop in stops:
        node = root
        for char in stop:
            node = node.next.setdefault(char, _Node(depth=node.depth + 1))
        node.stop = stop
    queue = deque([root])
    while queue:  # breadth first: a node's `fail` is shallower, so it is complete before it is read
        node = queue.popleft()
        for char, child in node.next.items():
            child.fail = _longest_suffix(node.fail, char, root=root)
            child.stop = child.stop or child.fail.stop
            queue.append(child)
    return root


def _longest_suffix(node: _Node | None, char: str, *, root: _Node) -> _Node:
    while node is not None:
        if char in node.next:
            return node.next[char]
        node = node.fail
    return root
