"""Prompts as a tree of segments: how much of a new one has been seen, without writing out any token."""

from collections.abc import Hashable, Iterable


class _Node:
    """The place behind some whole segments."""

    __slots__ = ("children", "longest")

    def __init__(self) -> None:
        self.children: dict[tuple[Hashable, int], _Node] = {}
        self.longest: dict[Hashable, int] = {}
        """Segment -> its longest occurrence here: a shorter one is the beginning of it."""


class PrefixTree:
    """Everything that was inserted stays. Different segments are taken to differ from their first token."""

    def __init__(self) -> None:
        self._root = _Node()

    def insert(self, path: Iterable[tuple[Hashable, int]]) -> int:
        """Add a prompt of (segment, tokens); say how many of its first tokens were there before."""
        node, found, known = self._root, 0, True
        for step in path:
            segment, num_tokens = step
            longest = node.longest.get(segment, 0)
            if known:
                found += min(num_tokens, longest)
            if num_tokens > longest:
                node.longest[segment] = num_tokens
            following = node.children.get(step)
            if following is None:
                known = False
                following = node.children[step] = _Node()
            node = following
        return found
