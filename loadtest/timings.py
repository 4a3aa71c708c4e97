"""The latencies of one request, by the definitions of `report.DEFINITIONS`."""

import math
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadtest.record import RequestRecord, TokenSource

UNCOUNTED: TokenSource = "unknown"


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """In seconds. Infinite for a request that failed; None where nothing was there to be timed."""

    ttft: float | None = None
    ttft_sched: float | None = None
    ttfot: float | None = None
    queue_client: float | None = None
    tpot: float | None = None
    max_gap: float | None = None
    e2e: float | None = None
    e2e_sched: float | None = None


def timings_of(record: RequestRecord) -> Timings:
    """A cancelled request has what it showed until it was left, and no E2E."""
    queue_client = _between(record.scheduled_at, record.sent_at)
    if record.fault is not None:
        inf = math.inf
        return Timings(
            ttft=inf,
            ttft_sched=inf,
            ttfot=inf,
            queue_client=queue_client,
            tpot=inf,
            max_gap=inf,
            e2e=inf,
            e2e_sched=inf,
        )
    last = None if record.cancelled else record.last_token_at
    gaps = [later - earlier for earlier, later in pairwise(record.content_times)]
    return Timings(
        ttft=_between(record.sent_at, record.first_token_at),
        ttft_sched=_between(record.scheduled_at, record.first_token_at),
        ttfot=_between(record.sent_at, record.first_visible_at),
        queue_client=queue_client,
        tpot=_tpot(record),
        max_gap=max(gaps, default=None),
        e2e=_between(record.sent_at, last),
        e2e_sched=_between(record.scheduled_at, last),
    )


def num_tokens(record: RequestRecord) -> float | None:
    """Tokens of the answer: the server's count, else those that the events were counted to have."""
    if record.num_output_tokens is not None:
        return record.num_output_tokens
    return None if record.token_source == UNCOUNTED else sum(record.content_tokens)


def token_times(record: RequestRecord) -> list[tuple[float, int]]:
    """When how many tokens came, in whole tokens. Empty where nobody told how many an event had.

    Fractions add up before they are rounded, so that the whole is right to half a token.
    """
    if record.token_source == UNCOUNTED:
        return []
    assert len(record.content_times) == len(record.content_tokens)
    found, total, given = [], 0.0, 0
    for at, tokens in zip(record.content_times, record.content_tokens, strict=True):
        total += tokens
        count = math.floor(total + 0.5) - given
        if count > 0:
            found.append((at, count))
            given += count
    return found


def token_gaps(record: RequestRecord, *, spread: bool = False) -> NDArray[np.float64]:
    """Gaps between successive tokens, one fewer than tokens; they sum to last - first either way.

    Args:
        spread: an event of k tokens is k gaps of dt/k, not one of dt and k-1 zeros. The first event's
            further tokens have no gap before them but zero in both.
    """
    times = token_times(record)
    if not times:
        return np.zeros(0)
    counts = np.array([count for _, count in times])
    dts = np.diff(np.array([at for at, _ in times]))
    first = np.zeros(counts[0] - 1)
    if spread:
        return np.concatenate([first, np.repeat(dts / counts[1:], counts[1:])])
    rest = np.zeros(int(counts[1:].sum()))
    rest[np.cumsum(counts[1:]) - counts[1:]] = dts
    return np.concatenate([first, rest])


def deadlines(record: RequestRecord, *, ttft_s: float, tpot_s: float, max_tokens: int) -> tuple[int, int]:
    """How many token deadlines a request had, and how many it met.

    The first token is due `ttft_s` after the intended start, each further one `tpot_s` after the one
    before was due. A late token misses its own deadline and one more for each `tpot_s` that it is late
    beyond it, as a reader waits through them; the next is then due from when it came. Tokens that
    never came, because the request failed, are missed.
    Source: after the fluidity index of Agrawal et al., Etalon (arXiv 2407.07000).
    """
    due = record.scheduled_at + ttft_s
    num = met = num_came = 0
    for at, count in token_times(record):
        for _ in range(count):
            if at <= due:
                met += 1
                num += 1
            else:
                num += 1 + (math.floor((at - due) / tpot_s) if num_came else 0)
                due = at
            due += tpot_s
            num_came += 1
    if record.fault is not None:
        num += max(1, max_tokens - num_came)
    return num, met


def _tpot(record: RequestRecord) -> float | None:
    """Unknown where all tokens came at one moment: a zero would be a lie about the server."""
    tokens = num_tokens(record)
    if len(record.content_times) < 2 or tokens is None or tokens <= 1:
        return None
    return (record.content_times[-1] - record.content_times[0]) / (tokens - 1)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
