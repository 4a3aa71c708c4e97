"""Figures of one pass, from what the client saw. Definitions: `DEFINITIONS` in `report`.

A request that failed counts as infinitely slow in every latency, so a server that drops its slow
requests does not look fast. One that the plan cancelled is neither: what it showed until then counts.
None is "unknown": nobody said so, or nothing was there to be timed. It is never zero.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from loadtest.errors import PlanInvalid
from loadtest.percentiles import Distribution, distribution
from loadtest.plan import Plan, PlannedRequest
from loadtest.record import RequestRecord
from loadtest.timings import UNCOUNTED, Timings, deadlines, num_tokens, timings_of, token_gaps


class SLO(msgspec.Struct, frozen=True, kw_only=True):
    """What counts as good. None: not asked for. TTFT and E2E count from the intended start."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    session_s: float | None = None
    """From the first turn's intended start to the last answer's end."""

    def validated(self) -> "SLO":
        """Return self.

        Raises:
            PlanInvalid: naming the first limit that no server could meet.
        """
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:  # NaN fails too
                option = f"--slo-{name.removesuffix('_s')}"
                raise PlanInvalid(f"{option} is {value:g}; it must be more than 0 and finite")
        return self


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """What met the SLO, and its rate over the pass."""

    num: int
    """Requests, tokens or sessions that were judged; of a failed request, the tokens it was asked for."""
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
    token_goodput: Goodput | None
    """None where the tokens of some answer are unknown."""
    session_goodput: Goodput
    fluidity: float | None
    """Share of token deadlines met; None unless the SLO names both TTFT and TPOT."""

    hits: Hits
    first_turn_hits: Hits
    later_turn_hits: Hits
    drift: Drift

    tokens_per_event: float | None
    """Above 1, gaps between events are not gaps between tokens: read `itl_spread` and `tpot`."""
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
    plans = {request.id: request for request in plan.requests}
    slo = slo or SLO()
    active_s = _active_s(records)
    done = [record for record in records if record.fault is None]
    num_failed = len(records) - len(done)
    num_cancelled = sum(record.cancelled for record in done)
    output_tokens = _sum_known(num_tokens(record) for record in done)
    prompt_tokens = _sum_known(record.num_prompt_tokens for record in done if not record.cancelled)
    sessions = _by_session(records)

    return Measures(
        duration_s=duration_s,
        active_s=active_s,
        num_requests=len(records),
        num_succeeded=len(done) - num_cancelled,
        num_failed=num_failed,
        num_cancelled=num_cancelled,
        error_share=_ratio(num_failed, len(records) - num_cancelled),
        faults=_faults(records),
        itl=_pooled_gaps(records, plans, spread=False),
        itl_spread=_pooled_gaps(records, plans, spread=True),
        **_latencies(records),
        job_completion=distribution(list(_job_times(sessions).values())),
        num_prompt_tokens=None if prompt_tokens is None else round(prompt_tokens),
        num_output_tokens=None if output_tokens is None else round(output_tokens),
        requests_per_s=_rate(len(done) - num_cancelled, duration_s),
        output_tokens_per_s=None if output_tokens is None else _rate(output_tokens, duration_s),
        active_output_tokens_per_s=None if output_tokens is None else _rate(output_tokens, active_s),
        prompt_tokens_per_s=None if prompt_tokens is None else _rate(prompt_tokens, duration_s),
        slo=slo,
        request_goodput=_request_goodput(records, slo, duration_s),
        token_goodput=_token_goodput(records, plans, slo, duration_s),
        session_goodput=_session_goodput(sessions, slo, duration_s),
        fluidity=_fluidity(records, plans, slo),
        hits=_hits(records, plans, ideal),
        first_turn_hits=_hits([record for record in records if record.turn == 0], plans, ideal),
        later_turn_hits=_hits([record for record in records if record.turn > 0], plans, ideal),
        drift=_drift(records, plans, overhead or {}),
        tokens_per_event=_tokens_per_event(records),
        token_sources=dict(Counter(record.token_source for record in done)),
    )


def _latencies(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """One distribution for each field of `Timings`, over the records that have it."""
    timings = [timings_of(record) for record in records]
    return {
        name: distribution([value for timing in timings if (value := getattr(timing, name)) is not None])
        for name in Timings.__struct_fields__
    }


def _pooled_gaps(
    records: Sequence[RequestRecord], plans: Mapping[str, PlannedRequest], *, spread: bool
) -> Distribution:
    """Each token that a failed request still owed is a gap without an end."""
    gaps = [token_gaps(record, spread=spread) for record in records]
    owed = 0
    for record in records:
        if record.fault is not None:
            owed += max(1, plans[record.id].max_tokens - round(sum(record.content_tokens)))
    return distribution(np.concatenate([*gaps, np.full(owed, math.inf)]))


def _verdict(record: RequestRecord, timing: Timings, slo: SLO) -> bool | None:
    """Whether it met the SLO; None for one that was cancelled before it could miss it."""
    if record.fault is not None:
        return False
    first = record.ended_at - record.scheduled_at if timing.ttft_sched is None else timing.ttft_sched
    if slo.ttft_s is not None and first > slo.ttft_s:
        return False
    if slo.tpot_s is not None and timing.tpot is not None and timing.tpot > slo.tpot_s:
        return False
    if record.cancelled:
        return None
    last = record.ended_at - record.scheduled_at if timing.e2e_sched is None else timing.e2e_sched
    return slo.e2e_s is None or last <= slo.e2e_s


def _request_goodput(records: Sequence[RequestRecord], slo: SLO, duration_s: float) -> Goodput:
    verdicts = [_verdict(record, timings_of(record), slo) for record in records]
    num_good = verdicts.count(True)
    return Goodput(num=num_good + verdicts.count(False), num_good=num_good, per_s=_rate(num_good, duration_s))


def _token_goodput(
    records: Sequence[RequestRecord], plans: Mapping[str, PlannedRequest], slo: SLO, duration_s: float
) -> Goodput | None:
    num = num_good = 0.0
    for record in records:
        verdict = _verdict(record, timings_of(record), slo)
        if verdict is None:
            continue
        tokens = plans[record.id].max_tokens if record.fault is not None else num_tokens(record)
        if tokens is None:
            return None
        num += tokens
        num_good += tokens if verdict else 0
    return Goodput(num=round(num), num_good=round(num_good), per_s=_rate(num_good, duration_s))


def _by_session(records: Sequence[RequestRecord]) -> dict[str, list[RequestRecord]]:
    sessions: dict[str, list[RequestRecord]] = {}
    for record in records:
        sessions.setdefault(record.session, []).append(record)
    return sessions


def _job_times(sessions: Mapping[str, Sequence[RequestRecord]]) -> dict[str, float]:
    """By session; infinite with a failure in it, and left out where every turn was cancelled."""
    found = {}
    for name, turns in sessions.items():
        if any(turn.fault is not None for turn in turns):
            found[name] = math.inf
        elif not all(turn.cancelled for turn in turns):
            found[name] = max(_end(turn) for turn in turns) - min(turn.scheduled_at for turn in turns)
    return found


def _end(record: RequestRecord) -> float:
    """Of the answer: its last content, or where it had none, the stream's end."""
    return record.ended_at if record.cancelled or record.last_token_at is None else record.last_token_at


def _session_goodput(sessions: Mapping[str, Sequence[RequestRecord]], slo: SLO, duration_s: float) -> Goodput:
    """A session is good when none of its turns missed, and the whole of it was in time."""
    jobs = _job_times(sessions)
    num_good = 0
    for name, job_s in jobs.items():
        in_time = math.isfinite(job_s) and (slo.session_s is None or job_s <= slo.session_s)
        met = all(_verdict(turn, timings_of(turn), slo) is not False for turn in sessions[name])
        num_good += in_time and met
    return Goodput(num=len(jobs), num_good=num_good, per_s=_rate(num_good, duration_s))


def _fluidity(
    records: Sequence[RequestRecord], plans: Mapping[str, PlannedRequest], slo: SLO
) -> float | None:
    if slo.ttft_s is None or slo.tpot_s is None:
        return None
    num = met = 0
    for record in records:
        limits = plans[record.id]
        due, kept = deadlines(record, ttft_s=slo.ttft_s, tpot_s=slo.tpot_s, max_tokens=limits.max_tokens)
        num += due
        met += kept
    return _ratio(met, num)


def _hits(
    records: Sequence[RequestRecord],
    plans: Mapping[str, PlannedRequest],
    ideal: Mapping[str, int] | None,
) -> Hits:
    prompt = cached = planned = best = num = 0
    for record in records:
        if record.fault is None and record.num_cached_tokens is not None and record.num_prompt_tokens:
            num += 1
            prompt += record.num_prompt_tokens
            cached += record.num_cached_tokens
            planned += plans[record.id].num_prompt_tokens
            best += ideal[record.id] if ideal is not None else 0
    hit = _ratio(cached, prompt)
    bound = _ratio(best, planned) if ideal is not None else None
    return Hits(
        num_requests=num,
        num_prompt_tokens=prompt,
        num_cached_tokens=cached,
        hit=hit,
        ideal=bound,
        capture=hit / bound if hit is not None and bound else None,
    )


def _drift(
    records: Sequence[RequestRecord], plans: Mapping[str, PlannedRequest], overhead: Mapping[str, int]
) -> Drift:
    planned = counted = extra = 0
    for record in records:
        if record.fault is None and record.num_prompt_tokens is not None:
            planned += plans[record.id].num_prompt_tokens
            counted += record.num_prompt_tokens
            extra += overhead.get(record.id, 0)
    return Drift(
        num_planned=planned,
        num_counted=counted,
        num_overhead=extra,
        share=_ratio(counted - planned - extra, planned),
    )


def _faults(records: Sequence[RequestRecord]) -> dict[str, int]:
    faults = [record.fault for record in records if record.fault is not None]
    kinds = (fault.kind if fault.status is None else f"{fault.kind} {fault.status}" for fault in faults)
    return dict(Counter(kinds).most_common())


def _tokens_per_event(records: Sequence[RequestRecord]) -> float | None:
    known = [record for record in records if record.fault is None and record.token_source != UNCOUNTED]
    return _ratio(
        sum(sum(record.content_tokens) for record in known),
        sum(len(record.content_times) for record in known),
    )


def _active_s(records: Sequence[RequestRecord]) -> float:
    """The length of the union of all [sent, ended]."""
    spans = sorted((record.sent_at, record.ended_at) for record in records if record.sent_at is not None)
    total, reached = 0.0, -math.inf
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _sum_known(values: Iterable[float | None]) -> float | None:
    """None where one of them is unknown: a sum without it would look like less work."""
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _rate(amount: float, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else 0.0


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
