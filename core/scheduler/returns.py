"""When sessions come back, as far as it can be learned, and what a token costs that they have lost."""

from dataclasses import dataclass

GAP_GAIN = 1 / 4
"""Weight of the newest gap."""
RETURN_GAIN = 1 / 16
"""Weight of the newest answer to the question whether a turn is followed by another."""
COST_MEMORY = 0.9
"""How much of what was measured so far the next step leaves."""


@dataclass(slots=True)
class Gaps:
    """Mean and mean deviation of the seconds that somebody stays away, as TCP times its answers.

    Source: V. Jacobson, Congestion Avoidance and Control (1988), appendix A.
    """

    mean_s: float = 0.0
    deviation_s: float = 0.0
    number: int = 0

    def add(self, gap_s: float) -> None:
        assert gap_s >= 0
        if self.number:
            self.deviation_s += GAP_GAIN * (abs(gap_s - self.mean_s) - self.deviation_s)
            self.mean_s += GAP_GAIN * (gap_s - self.mean_s)
        else:
            self.mean_s, self.deviation_s = gap_s, gap_s / 2
        self.number += 1

    @property
    def latest_s(self) -> float:
        """Who stays away for longer is not expected any more."""
        return self.mean_s + max(4 * self.deviation_s, self.mean_s)


class Returns:
    """The share of turns that are followed by another of their session. A half, until it is known."""

    def __init__(self) -> None:
        self.share = 0.5

    def add(self, *, came: bool) -> None:
        self.share += RETURN_GAIN * (came - self.share)


class TokenCost:
    """Seconds per computed token, from the steps that computed prompts: what losing a cached token costs."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._num_tokens = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        self._seconds = self._seconds * COST_MEMORY + seconds
        self._num_tokens = self._num_tokens * COST_MEMORY + num_tokens

    @property
    def token_s(self) -> float:
        """0 until it is known."""
        return self._seconds / self._num_tokens if self._num_tokens else 0.0
