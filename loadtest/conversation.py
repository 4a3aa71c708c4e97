"""What workloads are made of: skewed lengths and pauses, and sessions that grow call by call."""

import math
import random
from collections.abc import Iterator, Sequence

import msgspec

from loadtest.plan import PlannedRequest, Segment

_Z90, _Z99 = 1.2815515655446004, 2.3263478740408408
"""Standard normal quantiles."""


class LogNormal(msgspec.Struct, frozen=True):
    """A skewed quantity, as published figures tell it: its median and one high percentile."""

    median: float
    high: float
    z: float = _Z90

    def draw(self, generator: random.Random, *, most: float = math.inf) -> float:
        sigma = math.log(self.high / self.median) / self.z
        return min(most, self.median * math.exp(generator.gauss(0.0, sigma)))


def by_p90(median: float, p90: float) -> LogNormal:
    return LogNormal(median, p90, _Z90)


def by_p99(median: float, p99: float) -> LogNormal:
    return LogNormal(median, p99, _Z99)


def scaled(num_tokens: float, scale: float) -> int:
    """So many tokens at this scale; one at least."""
    return max(1, round(num_tokens * scale))


def arrivals(generator: random.Random, *, cv: float = 1.0) -> Iterator[float]:
    """Start times in units of 1/rate from 0 on: gamma gaps of mean one; cv 1 is Poisson."""
    now, shape = 0.0, 1.0 / (cv * cv)
    while True:
        yield round(now, 4)
        now += generator.gammavariate(shape, 1.0 / shape)


class Conversation:
    """One agent's history: each call repeats all before it. Owned by the workload that builds it."""

    def __init__(self, session: str, prefix: Sequence[Segment], *, name: str, max_context: int) -> None:
        """`name` begins the ids of its calls and segments; two conversations may share a session."""
        self.session = session
        self._name = name
        self._max_context = max_context
        self._prefix = tuple(prefix)
        self._segments = tuple(prefix)
        self.num_calls = 0

    @property
    def num_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self._segments)

    @property
    def last_id(self) -> str:
        """Of its last call."""
        return f"{self._name}.{self.num_calls - 1}"

    def fits(self, new_tokens: int, answer_tokens: int) -> bool:
        return self.num_tokens + new_tokens + answer_tokens <= self._max_context

    def ask(
        self,
        new_tokens: int,
        answer_tokens: int,
        *,
        at_unit: float | None = None,
        after: Sequence[str] = (),
        delay_s: float = 0.0,
    ) -> PlannedRequest:
        """The next call. Its answer stands in the history from then on."""
        call = f"{self._name}.{self.num_calls}"
        self._segments += (Segment(f"{call}-in", new_tokens),)
        request = PlannedRequest(
            id=call,
            session=self.session,
            segments=self._segments,
            max_tokens=answer_tokens,
            at_unit=at_unit,
            after=tuple(after),
            delay_s=round(delay_s, 3),
        )
        self._segments += (Segment(f"{call}-out", answer_tokens, "assistant"),)
        self.num_calls += 1
        return request

    def compact(self, summary_tokens: int) -> None:
        """Forget all but the prefix, and go on from a summary."""
        self._segments = (*self._prefix, Segment(f"{self._name}.{self.num_calls}-summary", summary_tokens))
