"""How much of a trace's KV comes back, how soon, and what a cache of a given size would catch of it.

Prompts are paths in a tree. Neighbouring parts that the same requests pass through are one run, so a
session of a thousand blocks costs a handful of entries, and the curve below is exact, not sampled.

A request touches its runs from the last to the first: of one path, an LRU cache drops the end before
the beginning, as prefix caches must. The reuse distance of a run is the number of blocks touched since
its own last touch; a cache of C blocks hits the part of a run that lies within C (Mattson et al., 1970).
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loadtest.traces import Parts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Touch(NamedTuple):
    """One request passes through one run."""

    run: int
    num_blocks: int


class Reuse(NamedTuple):
    """Reuse of the blocks of a trace.

    Shapes: distances, weights (touches of known runs,); held_blocks, held_s (moments,).
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    """By a cache without end, in whole blocks."""
    num_blocks: int
    """Different ones: such a cache's size."""
    block_tokens: int
    distances: Ints
    weights: Ints
    held_blocks: Ints
    """Blocks used before and used again later: what must be kept for the ideal hit."""
    held_s: Floats
    """How long each such state lasts."""

    def hit(self, capacity_blocks: int) -> float:
        """Share of prompt tokens that an LRU cache of so many blocks has."""
        caught = np.clip(capacity_blocks - self.distances, 0, self.weights).sum()
        return float(caught) * self.block_tokens / max(1, self.num_prompt_tokens)

    @property
    def ideal(self) -> float:
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)

    def capacity_for(self, share_of_ideal: float) -> int:
        """Fewest blocks whose hit is so much of the ideal one."""
        low, high, goal = 0, self.num_blocks, share_of_ideal * self.hit(self.num_blocks)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.hit(middle) >= goal - 1e-12 else (middle + 1, high)
        return low


def reuse_of(prompts: Sequence[Parts], times: Sequence[float], *, block_tokens: int) -> Reuse:
    """Reuse in the order given. `times` in seconds, never falling."""
    touches = _touches(prompts, block_tokens)
    distances, weights = _distances(touches)
    held_blocks, held_s = _held(touches, times)
    total = sum(tokens for parts in prompts for _, tokens in parts)
    sizes = {touch.run: touch.num_blocks for path in touches for touch in path}
    return Reuse(
        num_prompt_tokens=total,
        num_cached_tokens=int(weights.sum()) * block_tokens,
        num_blocks=sum(sizes.values()),
        block_tokens=block_tokens,
        distances=distances,
        weights=weights,
        held_blocks=held_blocks,
        held_s=held_s,
    )


def _touches(prompts: Sequence[Parts], block_tokens: int) -> list[list[Touch]]:
    """Per request its runs that own whole blocks, from the first to the last."""
    children: list[dict[tuple[str, int], int]] = [{}]
    passes = array("q", [0])
    paths: list[array[int]] = []
    for parts in prompts:
        node, path = 0, array("q")
        for part in parts:
            following = children[node].get(part)
            if following is None:
                following = children[node][part] = len(children)
                children.append({})
                passes.append(0)
            passes[following] += 1
            path.append(following)
            node = following
        paths.append(path)
    counts = np.frombuffer(passes, dtype=np.int64)
    return [_runs(path, parts, counts, block_tokens) for path, parts in zip(paths, prompts, strict=True)]


def _runs(path: "array[int]", parts: Parts, counts: Ints, block_tokens: int) -> list[Touch]:
    """Cut a path where requests part. A block belongs to the run in which it ends."""
    if not path:
        return []
    nodes = np.frombuffer(path, dtype=np.int64)
    ends = np.cumsum(np.fromiter((tokens for _, tokens in parts), dtype=np.int64, count=len(parts)))
    visits = counts[nodes]
    firsts = np.flatnonzero(np.concatenate(([True], visits[1:] != visits[:-1])))
    lasts = np.concatenate((firsts[1:], [len(nodes)])) - 1
    whole = ends[lasts] // block_tokens
    sizes = np.diff(whole, prepend=0)
    return [
        Touch(run, size) for run, size in zip(nodes[firsts].tolist(), sizes.tolist(), strict=True) if size > 0
    ]


def _distances(touches: Sequence[Sequence[Touch]]) -> tuple[Ints, Ints]:
    """Reuse distance and size of every touch of a run that was touched before."""
    recent = _RecentBlocks(sum(map(len, touches)))
    distances, weights = array("q"), array("q")
    for path in touches:
        for touch in path:
            if (distance := recent.distance(touch.run)) is not None:
                distances.append(distance)
                weights.append(touch.num_blocks)
        for touch in reversed(path):
            recent.touch(touch)
    return np.array(distances, dtype=np.int64), np.array(weights, dtype=np.int64)


class _RecentBlocks:
    """Runs by their last touch, in a Fenwick tree over touches: blocks newer than a run, in log time."""

    def __init__(self, num_touches: int) -> None:
        self._tree = [0] * (num_touches + 1)
        self._places: dict[int, int] = {}
        self._next = 1
        self._total = 0

    def distance(self, run: int) -> int | None:
        place = self._places.get(run)
        return None if place is None else self._total - self._sum(place)

    def touch(self, touch: Touch) -> None:
        if (place := self._places.get(touch.run)) is not None:
            self._add(place, -touch.num_blocks)
        self._places[touch.run] = self._next
        self._add(self._next, touch.num_blocks)
        self._next += 1

    def _add(self, place: int, num_blocks: int) -> None:
        self._total += num_blocks
        while place < len(self._tree):
            self._tree[place] += num_blocks
            place += place & -place

    def _sum(self, place: int) -> int:
        total = 0
        while place:
            total += self._tree[place]
            place -= place & -place
        return total


def _held(touches: Sequence[Sequence[Touch]], times: Sequence[float]) -> tuple[Ints, Floats]:
    """Blocks between two uses, as they are over the time of the trace."""
    last: dict[int, float] = {}
    changes: list[tuple[float, int]] = []
    for at, path in zip(times, touches, strict=True):
        for run, num_blocks in path:
            if (before := last.get(run)) is not None and at > before:
                changes += [(before, num_blocks), (at, -num_blocks)]
            last[run] = at
    if not changes:
        return np.zeros(1, dtype=np.int64), np.ones(1)
    moments = np.array([at for at, _ in changes])
    amounts = np.array([amount for _, amount in changes], dtype=np.int64)
    order = np.argsort(moments, kind="stable")
    moments, held = moments[order], np.cumsum(amounts[order])
    lasting = np.diff(moments)
    return held[:-1][lasting > 0], lasting[lasting > 0]
