"""How long will this take? A few seconds of measuring the server, then an estimate for the plan.

The estimate is for a person who waits, and for `--max-seconds`; no figure of a report comes from it.
"""

import asyncio
from collections.abc import Mapping

import msgspec

from loadtest.checks import Questions
from loadtest.dialects import Message
from loadtest.errors import PlanInvalid
from loadtest.filler import Filler
from loadtest.ideal import IdealHit, ideal_hit
from loadtest.plan import Plan, PlannedRequest, plan_of
from loadtest.record import RequestRecord
from loadtest.runner import linked_sessions

CALIBRATION_S = 5.0
_FIRST_PROMPT = 64
_STREAMS = 4
_ANSWER_TOKENS = 512
"""Of a stream that is left when its time is over."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """What the server did in the calibration, in tokens a second."""

    prefill: float
    decode: float
    """Of one of a few streams at once."""
    num_streams: int

    @property
    def decode_together(self) -> float:
        return self.decode * self.num_streams


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that one pass of a plan should take."""

    expected_s: float
    uncached_s: float
    """Without any hit in a prefix cache."""


async def calibrate(
    questions: Questions, filler: Filler, *, plan: Plan, budget_s: float = CALIBRATION_S
) -> Speed:
    """Measure prefill with growing prompts for half of the time, decode with a few streams for the other.

    Prompts and answers stay within the plan's own lengths, which the server must take anyway.

    Raises:
        TargetUnusable: a request failed.
    """
    longest = max(request.num_prompt_tokens for request in plan.requests)
    prefill = await _prefill_speed(questions, filler, longest=longest, budget_s=budget_s / 2)
    most = max(request.max_tokens for request in plan.requests)
    num_streams = min(_STREAMS, len({request.session for request in plan.requests}))
    decode = await _decode_speed(
        questions, filler, num_streams=num_streams, most=min(most, _ANSWER_TOKENS), budget_s=budget_s / 2
    )
    return Speed(prefill=prefill, decode=decode, num_streams=num_streams)


async def _prefill_speed(questions: Questions, filler: Filler, *, longest: int, budget_s: float) -> float:
    """Of the longest prompt that fits the time: each is twice the one before."""
    left_s, size, speed = budget_s, min(_FIRST_PROMPT, longest), 0.0
    for attempt in range(32):
        record = await questions.ask([Message("user", filler.text(f"prefill-{attempt}", size))])
        took_s = max(
            1e-6, (record.first_token_at or record.ended_at) - (record.sent_at or record.scheduled_at)
        )
        speed = size / took_s
        left_s -= took_s
        if size == longest or left_s < 2 * took_s:
            break
        size = min(2 * size, longest)
    return speed


async def _decode_speed(
    questions: Questions, filler: Filler, *, num_streams: int, most: int, budget_s: float
) -> float:
    """Tokens a second of one stream among `num_streams`."""
    async with asyncio.TaskGroup() as tasks:
        streams = [
            tasks.create_task(
                questions.try_to_ask(
                    [Message("user", filler.text(f"decode-{i}", _FIRST_PROMPT // 4))],
                    max_tokens=most,
                    cancel_after_s=budget_s,
                )
            )
            for i in range(num_streams)
        ]
    speeds = [speed for stream in streams if (speed := _stream_speed(stream.result())) is not None]
    if (
        not speeds and most > 1
    ):  # too slow to show two tokens in that time: one stream has as long as it needs
        message = Message("user", filler.text("decode-alone", _FIRST_PROMPT // 4))
        alone = _stream_speed(await questions.ask([message], max_tokens=min(most, _STREAMS)))
        return float("inf") if alone is None else alone / num_streams
    return sum(speeds) / len(speeds) if speeds else float("inf")


def _stream_speed(record: RequestRecord) -> float | None:
    """None for a stream too short to tell."""
    times = record.content_times
    if len(times) < 2 or times[-1] <= times[0]:
        return None
    counted = sum(record.content_tokens[1:]) or len(times) - 1
    return counted / (times[-1] - times[0])


def estimate(
    plan: Plan,
    *,
    speed: Speed,
    starts: Mapping[str, float],
    concurrency: int | None = None,
    ideal: IdealHit | None = None,
) -> Estimate:
    """The longest of: all the server's work at full batches, the slowest session, and closed loops' turns."""
    ideal = ideal or ideal_hit(plan)
    cached = ideal.num_cached_tokens
    return Estimate(
        expected_s=_duration(plan, speed=speed, starts=starts, concurrency=concurrency, cached=cached),
        uncached_s=_duration(plan, speed=speed, starts=starts, concurrency=concurrency, cached={}),
    )


def _duration(
    plan: Plan,
    *,
    speed: Speed,
    starts: Mapping[str, float],
    concurrency: int | None,
    cached: Mapping[str, int],
) -> float:
    def prefill_s(request: PlannedRequest) -> float:
        return (request.num_prompt_tokens - cached.get(request.id, 0)) / speed.prefill

    work_s = sum(prefill_s(r) + r.max_tokens / speed.decode_together for r in plan.requests)
    ends: dict[str, float] = {}
    lengths = []
    for group in linked_sessions(plan, starts):
        first = min(starts[request.id] for request in group if not request.after)
        for request in _after_order(group):
            begin = max((ends[name] for name in request.after), default=starts.get(request.id, 0.0))
            ends[request.id] = (
                begin + request.delay_s + prefill_s(request) + request.max_tokens / speed.decode
            )
        lengths.append(max(ends[request.id] for request in group) - (first if concurrency else 0.0))
    turns_s = sum(lengths) / concurrency if concurrency else 0.0
    return max(work_s, *lengths, turns_s)


def _after_order(group: tuple[PlannedRequest, ...]) -> list[PlannedRequest]:
    """Each request behind those it waits for."""
    ordered: list[PlannedRequest] = []
    done: set[str] = set()
    pending = list(group)
    while pending:
        late = []
        for request in pending:
            if done.issuperset(request.after):
                ordered.append(request)
                done.add(request.id)
            else:
                late.append(request)
        assert len(late) < len(pending), "a checked plan has no circle"
        pending = late
    return ordered


def shrink(
    plan: Plan,
    *,
    max_s: float,
    speed: Speed,
    starts: Mapping[str, float],
    concurrency: int | None = None,
) -> Plan:
    """The plan's first sessions, as many as are expected to end in time.

    Raises:
        PlanInvalid: not even one is.
    """
    groups = linked_sessions(plan, starts)

    def first(count: int) -> Plan:
        kept = {request.id for group in groups[:count] for request in group}
        note = f"shrunk to the first {count} of {len(groups)} sessions, to end within {max_s:.0f} s"
        requests = [request for request in plan.requests if request.id in kept]
        return plan_of(plan.name, requests, notes=(*plan.notes, note))

    low, high = 0, len(groups)
    while low < high:
        middle = (low + high + 1) // 2
        trial = estimate(first(middle), speed=speed, starts=starts, concurrency=concurrency)
        low, high = (middle, high) if trial.expected_s <= max_s else (low, middle - 1)
    if low == 0:
        raise PlanInvalid(
            f"plan {plan.name}: its first session alone is expected to take longer than {max_s:.0f} s a pass"
        )
    return plan if low == len(groups) else first(low)
