"""Which cached prefix goes first when room is needed."""

from typing import Protocol


class Usage(Protocol):
    """What a policy may know of a tree node."""

    @property
    def last_used(self) -> int:
        """Value of the tree's counter when a request last let go of the node."""
        ...


class RetentionPolicy(Protocol):
    """Ranks nodes that may be evicted. Asked once, when a node becomes evictable."""

    def rank(self, node: Usage, *, now: int) -> int:
        """The lowest rank is evicted first. `now` counts uses of the tree; policies read no clock."""
        ...


class LeastRecentlyUsed:
    """The prefix nobody has held for longest goes first."""

    def rank(self, node: Usage, *, now: int) -> int:
        return node.last_used
