"""What a session's turn leaves in the tree, and when the next turn makes it worthless.

    system ── turn 1's prompt ──┬── turn 1's answer as it was generated      superseded
                                └── the answer as the client sent it back, turn 2's prompt

Once turn 2's prompt is computed, nobody asks for the end of turn 1 any more: the part of it that turn
2's path does not contain is the first to be evicted.
"""

from collections import OrderedDict

from core.cache.radix_tree import Node, RadixTree
from core.request import Request

MAX_SESSIONS = 4096
"""Sessions whose last turn is remembered; beyond it those that were idle longest keep their tails."""

_Key = tuple[bytes, str]


class SessionTails:
    """Where the last turn of each session ended. Owned by the cache manager.

    A turn supersedes the one before only where they did not overlap: requests of one session that
    run side by side are branches, such as subagents or several choices, and any of them may go on.
    Requests without a session leave no tail.
    """

    def __init__(self, tree: RadixTree, *, max_sessions: int = MAX_SESSIONS) -> None:
        self._tree = tree
        self._max_sessions = max_sessions
        self._ends: OrderedDict[_Key, Node] = OrderedDict()  # idle longest first
        self._num_live: dict[_Key, int] = {}  # never 0
        self.awaiting: dict[str, Node] = {}
        """Request that has its prompt still to compute -> where its session's turn before ended."""

    def began(self, request: Request) -> None:
        """A request has got its blocks."""
        if not request.session_id:
            return
        key = _key(request)
        before = self._ends.pop(key, None)
        if before is not None and key not in self._num_live:
            self.awaiting[request.request_id] = before
        self._num_live[key] = self._num_live.get(key, 0) + 1

    def computed(self, request: Request, node: Node) -> None:
        """A request got further, its blocks end at `node`. O(1) but for the moment its prompt is done."""
        if request.request_id in self.awaiting and request.num_computed_tokens >= request.num_prompt_tokens:
            self._tree.supersede(self.awaiting.pop(request.request_id), node)

    def ended(self, request: Request, node: Node) -> None:
        """A request gives its blocks back, and they end at `node`."""
        if not request.session_id:
            return
        self.awaiting.pop(request.request_id, None)
        key = _key(request)
        self._num_live[key] -= 1
        if self._num_live[key]:
            return
        del self._num_live[key]
        self._ends[key] = node
        self._tree.seal(node)
        if len(self._ends) > self._max_sessions:
            self._ends.popitem(last=False)

    def check(self, request_ids: set[str]) -> None:
        """Assert the invariants, given who holds blocks. For tests."""
        assert self.awaiting.keys() <= request_ids
        assert sum(self._num_live.values()) <= len(request_ids)
        assert all(self._num_live.values())
        assert not self._ends.keys() & self._num_live.keys()
        assert len(self._ends) <= self._max_sessions


def _key(request: Request) -> _Key:
    return request.namespace, request.session_id
