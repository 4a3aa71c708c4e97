"""A trace as a plan: the same arrivals, sharing and pauses, at a size that the server under test can take."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from loadtest.arrivals import quantum_of, spread_bursts
from loadtest.conversation import scaled
from loadtest.errors import PlanInvalid
from loadtest.plan import Plan, PlannedRequest, Segment, plan_of
from loadtest.traces import Trace, TraceRequest


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is done to the trace on the way."""

    scale: float = 1.0
    """Multiplies tokens, part by part, so that what was shared is shared."""
    time_scale: float = 1.0
    """Multiplies arrivals and pauses."""
    max_requests: int | None = None
    """The first so many. Of traces by session: whole sessions, until there are so many."""
    max_context: int = 131_072
    """Requests whose prompt and answer pass it are left out; of a session also all that follow."""
    seed: int = 0

    def validated(self) -> "ReplayOptions":
        """Raises PlanInvalid for the first number out of its bounds."""
        bounds: tuple[tuple[str, float | None, float, float], ...] = (
            ("--scale", self.scale, 1e-4, 100.0),
            ("--time-scale", self.time_scale, 0.0, 1000.0),
            ("--max-requests", self.max_requests, 1, 10_000_000),
            ("--max-context", self.max_context, 16, 10_000_000),
        )
        for name, value, low, high in bounds:
            if value is not None and not low <= value <= high:  # NaN fails too
                raise PlanInvalid(f"{name} is {value}; it must be between {low:g} and {high:g}")
        return self


def replay(trace: Trace, options: ReplayOptions | None = None) -> Plan:
    """The plan; its notes say what was done.

    Raises:
        PlanInvalid: an option is out of bounds, the trace is a plan, or nothing of it fits.
    """
    options = (options or ReplayOptions()).validated()
    if trace.format == "planned":
        raise PlanInvalid(f"{trace.name} is a plan already: it can be run as it is")
    notes = [
        f"trace {trace.name} ({trace.format}), tokens x {options.scale:g}, times x {options.time_scale:g}",
        *trace.notes,
    ]
    if trace.clock == "session":
        requests = list(_by_session(trace.requests, options))
        total = len(trace.requests)
    else:
        total = len(trace.requests)
        arrivals, quantum = _unquantised(trace.requests[: options.max_requests], seed=options.seed)
        if quantum:
            notes.append(
                f"timestamps stood on multiples of {quantum:g} s: spread over them, seed {options.seed}"
            )
        requests = list(_by_clock(arrivals, options))
    if len(requests) < total:
        notes.append(f"{len(requests)} of {total} requests are played")
    if not requests:
        raise PlanInvalid(
            f"nothing of {trace.name} fits into --max-context {options.max_context}: lower --scale"
        )
    return plan_of(trace.name, requests, notes=notes)


def _unquantised(requests: Sequence[TraceRequest], *, seed: int) -> tuple[list[TraceRequest], float | None]:
    times = [request.at_s for request in requests]
    if quantum := quantum_of(times):
        times = spread_bursts(times, quantum, seed=seed)
    moved = (msgspec.structs.replace(request, at_s=at) for request, at in zip(requests, times, strict=True))
    return sorted(moved, key=lambda request: request.at_s), quantum


def _by_clock(requests: Sequence[TraceRequest], options: ReplayOptions) -> Iterator[PlannedRequest]:
    start = requests[0].at_s
    for index, request in enumerate(requests):
        planned = _planned(request, f"r{index}", options)
        if planned is not None:
            yield msgspec.structs.replace(planned, at_s=round((request.at_s - start) * options.time_scale, 6))


def _by_session(requests: Sequence[TraceRequest], options: ReplayOptions) -> Iterator[PlannedRequest]:
    sessions: dict[str | None, list[TraceRequest]] = defaultdict(list)
    for request in requests:
        sessions[request.session].append(request)
    played = 0
    for number, calls in enumerate(sessions.values()):
        if options.max_requests is not None and played >= options.max_requests:
            return
        chain = _Chain(f"s{number}", float(number))
        for index, call in enumerate(sorted(calls, key=lambda call: call.at_s)):
            planned = _planned(call, f"s{number}.{index}", options)
            if planned is None:
                chain.leave(call.agent)
            elif call.agent not in chain.left:
                yield chain.add(planned, call, options.time_scale)
                played += 1


class _Chain:
    """One session's calls, each after the one before; sub-agents are sent out, and waited for."""

    def __init__(self, session: str, at_unit: float) -> None:
        self._session = session
        self._at_unit = at_unit
        self._last: dict[str, str] = {}
        self.left: set[str] = set()

    def leave(self, agent: str) -> None:
        self.left.add(agent)

    def add(self, planned: PlannedRequest, call: TraceRequest, time_scale: float) -> PlannedRequest:
        own, main = self._last.get(call.agent), self._last.get("")
        waits_for = [name for name in (own or main,) if name]
        if not call.agent:
            waits_for += [self._last.pop(agent) for agent in list(self._last) if agent]
        self._last[call.agent] = planned.id
        if not waits_for:
            return msgspec.structs.replace(planned, session=self._session, at_unit=self._at_unit)
        return msgspec.structs.replace(
            planned,
            session=self._session,
            after=tuple(waits_for),
            delay_s=round((call.pause_s or 0.0) * time_scale, 3),
        )


def _planned(request: TraceRequest, request_id: str, options: ReplayOptions) -> PlannedRequest | None:
    """The request at its new size, or None where it is too long."""
    parts: Iterable[tuple[str, int]] = request.parts or ((f"{request_id}-own", request.num_input_tokens),)
    segments = tuple(Segment(name, scaled(tokens, options.scale)) for name, tokens in parts)
    answer = scaled(request.num_output_tokens, options.scale)
    if sum(segment.num_tokens for segment in segments) + answer > options.max_context:
        return None
    return PlannedRequest(
        id=request_id, session=request.session or request_id, segments=segments, max_tokens=answer
    )
