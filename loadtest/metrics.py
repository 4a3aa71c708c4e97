"""Figures of one pass, from what the client saw. Definitions: `DEFINITIONS` in `report`.

A request that failed counts as infinitely slow in every latency, so a server that drops its slow
requests does not look fast. One that the plan cancelled is neither: what it showed until then counts.
None is "unknown": nobody said so, or nothing was there to be timed. It is never zero.
"""

from collections.abc import Mapping, Sequence

import msgspec

from loadtest.plan import Plan
from loadtest.record import RequestRecord


class SLO(msgspec.Struct, frozen=True, kw_only=True):
    """What counts as good. None: not asked for. TTFT and E2E count from the intended start."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    session_s: float | None = None
    """From the first turn's intended start to the last answer's end."""


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of one figure, in seconds. Infinity where a percentile falls among failures."""

    num: int
    """Values, failures included."""
    num_failed: int = 0
    mean: float | None = None
    """Of those that did not fail: a mean with one failure would be infinite."""
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """What met the SLO, and its rate over the pass."""

    num: int
    num_good: int
    per_s: float

    @property
    def share(self) -> float | None:
        return self.num_good / self.num if self.num else None


class Hits(msgspec.Struct, frozen=True, kw_only=True):
    """Prefix reuse, over the requests whose cached tokens the server told. Shares of prompt tokens."""

    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    hit: float | None = None
    ideal: float | None = None
    """Of a cache without a bound, from the plan, over the same requests."""
    capture: float | None = None
    """hit / ideal."""


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens as the server counted them against the plan's."""

    num_planned: int
    num_counted: int
    num_overhead: int
    """Tokens of the chat template, where the caller knew them."""
    share: float | None
    """(counted - planned - overhead) / planned; None where no server count is known."""


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one pass."""

    duration_s: float
    active_s: float
    """Time with at least one request in flight."""
    num_requests: int
    num_succeeded: int
    num_failed: int
    num_cancelled: int
    error_share: float | None
    """Failed, of those that were not cancelled."""
    faults: dict[str, int]
    """By kind; a status stands with its kind, such as `http 429`."""

    ttft: Distribution
    """From the send to the first content that is not empty."""
    ttft_sched: Distribution
    """TTFT_s: from the intended start, so waiting in the client counts."""
    ttfot: Distribution
    """From the send to the first content that is not reasoning."""
    queue_client: Distribution
    """Send after the intended start."""
    itl: Distribution
    """Gaps between tokens, pooled: an event of k tokens is one gap and k-1 zeros."""
    itl_spread: Distribution
    """The same, with an event of k tokens as k gaps of dt/k."""
    tpot: Distribution
    """(last - first) / (tokens - 1), one a request."""
    max_gap: Distribution
    """The longest silence between two events of a request."""
    e2e: Distribution
    """From the send to the last content."""
    e2e_sched: Distribution
    """From the intended start to the last content."""
    job_completion: Distribution
    """A session: from its first intended start to its last answer's end."""

    num_prompt_tokens: int | None
    num_output_tokens: int | None
    requests_per_s: float
    output_tokens_per_s: float | None
    """Over the whole pass."""
    active_output_tokens_per_s: float | None
    """Over the time with requests in flight."""
    prompt_tokens_per_s: float | None

    slo: SLO
    request_goodput: Goodput
    token_goodput: Goodput
    session_goodput: Goodput
    fluidity: float | None
    """Share of token deadlines met; None unless the SLO names both TTFT and TPOT."""

    hits: Hits
    first_turn_hits: Hits
    later_turn_hits: Hits
    drift: Drift

    multi_token_share: float | None
    """Events of more than one token, of the events whose tokens are known."""
    token_sources: dict[str, int]
    """Requests by how their tokens were counted."""


def measure(
    records: Sequence[RequestRecord],
    *,
    plan: Plan,
    duration_s: float,
    slo: SLO | None = None,
    ideal: Mapping[str, int] | None = None,
    overhead: Mapping[str, int] | None = None,
) -> Measures:
    """The figures of one pass.

    Args:
        records: one for every request of the plan, in any order.
        duration_s: of the pass, first intended start to last end.
        ideal: prompt tokens an infinite cache would have had, by request id.
        overhead: tokens that the chat template adds, by request id.
    """
    raise NotImplementedError
