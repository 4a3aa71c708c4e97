"""Which cached prefix goes first when room is needed."""

from typing import Protocol

SUPERSEDED = 1 << 62
"""More than the tree's counter ever reaches: whatever is superseded ranks below all that is not."""


class Usage(Protocol):
    """What a policy may know of a tree node."""

    @property
    def last_used(self) -> int:
        """Value of the tree's counter when a request last let go of the node."""
        ...

    @property
    def superseded(self) -> bool:
        """Only a turn of a session needed it, and that session has gone on another way."""
        ...


class RetentionPolicy(Protocol):
    """Ranks nodes that may be evicted. Asked when a node becomes evictable, or superseded while it is."""

    def rank(self, node: Usage, *, now: int) -> int:
        """The lowest rank is evicted first. `now` counts uses of the tree; policies read no clock."""
        ...


class LeastRecentlyUsed:
    """The prefix nobody has held for longest goes first."""

    def rank(self, node: Usage, *, now: int) -> int:
        return node.last_used


class SupersededFirst:
    """What no session will come back to goes first, then what nobody has held for longest.

    Lifetimes alone are wrong for agents: what makes a turn's tail worthless is the next turn, however
    recent the tail is.
    """

    def rank(self, node: Usage, *, now: int) -> int:
        return node.last_used - SUPERSEDED if node.superseded else node.last_used
