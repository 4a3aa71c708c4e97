"""From paired figures to a row of the table: the best peer, the ratio to it, and whether the goal holds.

Contestants run in turn (A B C, A B C, ...), so a round's figures were taken within minutes of each other;
a ratio is the median of the rounds' own ratios, not a ratio of medians.
"""

from collections.abc import Sequence
from statistics import median
from typing import Literal

import msgspec

SAME_QUALITY_KL = 0.01
"""A peer whose mean KL against the float32 weights is at most so far is of our own quality."""

Direction = Literal["more", "less"]
"""What is better."""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One contestant's figure, a value a round."""

    name: str
    values: tuple[float, ...]
    kl: float | None = None
    """Mean KL of its arithmetic or, of a peer's file, of its weights. None is unknown."""

    @property
    def median(self) -> float:
        return median(self.values)

    def best(self, better: Direction) -> float:
        """Of the rounds: on a machine with other work, the one that was least disturbed."""
        return max(self.values) if better == "more" else min(self.values)


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """Either `times` better than the best peer that counts, or a bound of our own figure."""

    times: float | None = None
    bound: float | None = None
    same_quality: bool = False
    """Only peers within `SAME_QUALITY_KL` count."""
    peers: tuple[str, ...] = ()
    """Only these count, by how their names begin. Empty: all."""

    def described(self, better: Direction) -> str:
        if self.bound is not None:
            return f"at {'least' if better == 'more' else 'most'} {self.bound:g}"
        if self.times is None:
            return ""
        of_whom = f" {', '.join(self.peers)}" if self.peers else " best peer"
        return f"{self.times:g}x{of_whom}{' at our quality' if self.same_quality else ''}"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    goal: str
    ours: str
    our_value: float
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    """How many times better ours is."""
    holds: bool | None = None
    """None: there is nothing to compare with, or nothing was promised."""


def judge(ours: Series, peers: Sequence[Series], *, better: Direction, goal: Goal) -> Verdict:
    """One goal of one contestant of ours."""
    described = goal.described(better)
    if goal.bound is not None:
        within = ours.median >= goal.bound if better == "more" else ours.median <= goal.bound
        return Verdict(goal=described, ours=ours.name, our_value=ours.median, holds=within)
    counted = [peer for peer in peers if _counts(peer, goal)]
    if not counted:
        return Verdict(goal=described, ours=ours.name, our_value=ours.median)
    best = (max if better == "more" else min)(counted, key=lambda peer: peer.median)
    ratio = times_better(ours.values, best.values, better=better)
    return Verdict(
        goal=described,
        ours=ours.name,
        our_value=ours.median,
        peer=best.name,
        peer_value=best.median,
        ratio=ratio,
        holds=None if goal.times is None else ratio >= goal.times,
    )


def times_better(ours: Sequence[float], theirs: Sequence[float], *, better: Direction) -> float:
    """The median of the rounds' ratios. Rounds that only one of them played are left out."""
    pairs = list(zip(ours, theirs, strict=False))
    if better == "more":
        return median(our_value / their_value for our_value, their_value in pairs)
    return median(their_value / our_value for our_value, their_value in pairs)


def _counts(peer: Series, goal: Goal) -> bool:
    if goal.peers and not peer.name.startswith(goal.peers):
        return False
    return not goal.same_quality or (peer.kl is not None and peer.kl <= SAME_QUALITY_KL)
