"""Plays a plan once: every request at its intended time, and exactly one record for each.

Open loop: requests start by the schedule, whatever became of the others. Closed loop: so many sessions
live at once, the next starts when one ends. In both a request with `after` starts its think time after
the END of the answers it waits for. The intended start is written down with every request, so that a
client or server that falls behind cannot hide it.
"""

import asyncio
import gc
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Literal, Protocol

import msgspec

from loadtest.client import Call
from loadtest.dialects import Ask
from loadtest.errors import PlanInvalid
from loadtest.filler import Filler, messages
from loadtest.health import Health, HealthMeter
from loadtest.plan import Plan, PlannedRequest, answer_segments
from loadtest.record import Fault, RequestRecord

History = Literal["recorded", "live"]
PREPARED_BYTES = 256 << 20
"""Bodies made before the run. What is beyond is made while the answer waited for is being read."""
AHEAD_S = 0.5
"""A body that was not made before the run is made so long before its time."""
STOPPED = "the run was stopped before this request's answer had ended"


class Sender(Protocol):
    """What the runner needs of `client.Client`."""

    async def send(self, call: Call) -> RequestRecord: ...


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a plan is played."""

    model: str
    concurrency: int | None = None
    """Closed loop over so many live sessions; None: open loop."""
    history: History = "recorded"
    ignore_eos: bool = True
    continuous_usage: bool = True
    extra: dict[str, Any] = {}
    prepared_bytes: int = PREPARED_BYTES


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a pass is."""

    num_planned: int
    num_running: int
    num_ended: int
    num_failed: int


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """One play of a plan."""

    records: tuple[RequestRecord, ...]
    """In plan order, one for each request."""
    started_at: float
    """On the clock of the records."""
    duration_s: float
    """From the first intended start to the end of the last answer."""
    health: Health
    interrupted: bool = False


def check_history(plan: Plan, history: History) -> None:
    """
    Raises:
        PlanInvalid: live answers have no place in the plan.
    """
    if history == "live" and not answer_segments(plan) and any(request.after for request in plan.requests):
        raise PlanInvalid(
            f"plan {plan.name} marks no recorded answers (role assistant), so live ones have no place: "
            "use --history recorded"
        )


class Bodies:
    """Request bodies, made ahead of their time as far as memory allows."""

    def __init__(
        self, plan: Plan, *, filler: Filler, options: RunOptions, encode: Callable[[Ask], bytes]
    ) -> None:
        """Raises PlanInvalid where `check_history` does."""
        check_history(plan, options.history)
        self._filler = filler
        self._options = options
        self._encode = encode
        self._made: dict[str, bytes] = {}
        self._answers: dict[str, str] = {}
        """Live answers by segment id."""
        self._segments_of: dict[str, list[str]] = {}
        """Request id to the segments that stand for its answer."""
        if options.history == "live":
            for segment_id, request_id in answer_segments(plan).items():
                self._segments_of.setdefault(request_id, []).append(segment_id)

    def make(self, request: PlannedRequest) -> bytes:
        """The body, from memory or made now. Live history needs the answers first: make it after `learn`."""
        made = self._made.pop(request.id, None)
        if made is None:
            ask = Ask(
                model=self._options.model,
                messages=messages(request, self._filler, self._answers or None),
                max_tokens=request.max_tokens,
                ignore_eos=self._options.ignore_eos,
                continuous_usage=self._options.continuous_usage,
                session=request.session,
                extra=self._options.extra,
            )
            made = self._encode(ask)
        return made

    def prepare(self, request: PlannedRequest) -> None:
        """Make it and keep it for `make`."""
        self._made[request.id] = self.make(request)

    def prepare_all(self, requests: Iterable[PlannedRequest]) -> None:
        """In the order given, until the memory for it is full. Live history has only first turns ready."""
        room = self._options.prepared_bytes
        for request in requests:
            if self.waits_for_answers(request):
                continue
            self.prepare(request)
            room -= len(self._made[request.id])
            if room <= 0:
                return

    def is_prepared(self, request: PlannedRequest) -> bool:
        return request.id in self._made

    def waits_for_answers(self, request: PlannedRequest) -> bool:
        return self._options.history == "live" and bool(request.after)

    def keeps_answer_of(self, request: PlannedRequest) -> bool:
        return request.id in self._segments_of

    def learn(self, record: RequestRecord) -> None:
        """Keep a live answer for the turns that follow."""
        for segment_id in self._segments_of.get(record.id, ()):
            self._answers[segment_id] = record.text


class _Play:
    """The state of one pass. Belongs to its event loop."""

    def __init__(
        self,
        plan: Plan,
        *,
        starts: Mapping[str, float],
        client: Sender,
        bodies: Bodies,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._starts = starts
        self._client = client
        self._bodies = bodies
        self._on_progress = on_progress
        self._num_planned = len(plan.requests)
        self._num_running = self._num_failed = 0
        self._turns = turns_of(plan)
        self._sending = {request.id: asyncio.Event() for request in plan.requests}
        """Set when the request is being sent, or never will be."""
        self._ended = {request.id: asyncio.Event() for request in plan.requests}
        """Set when its record is there."""
        self.records: dict[str, RequestRecord] = {}

    async def play(self, request: PlannedRequest, *, origin: float) -> None:
        """One request, from its wait to its record. `origin` is when its start time counts from."""
        scheduled_at = time.monotonic()
        try:
            if request.after:
                await self._prepare_meanwhile(request)
                for name in request.after:
                    await self._ended[name].wait()
                before = [self.records[name] for name in request.after]
                scheduled_at = max(record.ended_at for record in before) + request.delay_s
                failed = [record.id for record in before if record.fault is not None]
                if failed:
                    why = f"it follows {', '.join(failed)}, which failed"
                    self._end(self._unsent(request, scheduled_at=scheduled_at, why=why))
                    return
            else:
                scheduled_at = origin + self._starts[request.id]
                await _sleep_until(scheduled_at - AHEAD_S)
            body = self._bodies.make(request)
            await _sleep_until(scheduled_at)
            self._end(await self._send(request, body=body, scheduled_at=scheduled_at))
        except asyncio.CancelledError:
            if request.id not in self.records:
                self._end(self._unsent(request, scheduled_at=scheduled_at, why=STOPPED))
            raise

    async def _prepare_meanwhile(self, request: PlannedRequest) -> None:
        """Make the body while the answers waited for are on their way, not when its time has come."""
        if self._bodies.is_prepared(request) or self._bodies.waits_for_answers(request):
            return
        for name in request.after:
            await self._sending[name].wait()
        self._bodies.prepare(request)

    async def _send(self, request: PlannedRequest, *, body: bytes, scheduled_at: float) -> RequestRecord:
        call = Call(
            id=request.id,
            session=request.session,
            turn=self._turns[request.id],
            body=body,
            scheduled_at=scheduled_at,
            num_planned_prompt_tokens=request.num_prompt_tokens,
            cancel_after_s=request.cancel_after_s,
            cancel_after_tokens=request.cancel_after_tokens,
            keep_text=self._bodies.keeps_answer_of(request),
        )
        self._sending[request.id].set()
        self._num_running += 1
        self._tell()
        try:
            return await self._client.send(call)
        finally:
            self._num_running -= 1

    def _end(self, record: RequestRecord) -> None:
        assert record.id not in self.records, f"{record.id} ended twice"
        self.records[record.id] = record
        self._num_failed += record.fault is not None
        self._bodies.learn(record)
        self._ended[record.id].set()
        self._sending[record.id].set()
        self._tell()

    def _unsent(self, request: PlannedRequest, *, scheduled_at: float, why: str) -> RequestRecord:
        return RequestRecord(
            id=request.id,
            session=request.session,
            turn=self._turns[request.id],
            scheduled_at=scheduled_at,
            ended_at=time.monotonic(),
            num_planned_prompt_tokens=request.num_prompt_tokens,
            fault=Fault(kind="unsent", message=why),
        )

    def fill_in(self, requests: Iterable[PlannedRequest]) -> None:
        """Records for what was never begun, because the run was stopped."""
        for request in requests:
            if request.id not in self.records:
                self._end(self._unsent(request, scheduled_at=time.monotonic(), why=STOPPED))

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(
                Progress(
                    num_planned=self._num_planned,
                    num_running=self._num_running,
                    num_ended=len(self.records),
                    num_failed=self._num_failed,
                )
            )


class _Stopped(Exception):
    """Ends the task group: the caller's stop event was set."""


async def run_once(
    plan: Plan,
    *,
    starts: Mapping[str, float],
    client: Sender,
    filler: Filler,
    encode: Callable[[Ask], bytes],
    options: RunOptions,
    on_progress: Callable[[Progress], None] | None = None,
    stop: asyncio.Event | None = None,
) -> Pass:
    """Play a plan once.

    Args:
        starts: seconds from the start for the requests without `after`, as `arrivals.schedule` gives them.
        encode: an ask as the dialect's body.
        stop: set it to end early with what there is.
    Raises:
        PlanInvalid: the plan and the options do not go together.
    """
    bodies = Bodies(plan, filler=filler, options=options, encode=encode)
    bodies.prepare_all(_by_start(plan, starts))
    play = _Play(plan, starts=starts, client=client, bodies=bodies, on_progress=on_progress)
    # What was made until now is not looked at by the collector again: its pauses would be ours.
    gc.collect()
    gc.freeze()
    interrupted = False
    meter = HealthMeter()
    started_at = time.monotonic()
    try:
        with meter:
            started_at = time.monotonic()
            if options.concurrency is None:
                work = _open_loop(play, plan, origin=started_at)
            else:
                work = _closed_loop(play, plan, starts=starts, concurrency=options.concurrency)
            interrupted = await _until_stopped(work, stop)
    finally:
        gc.unfreeze()
    play.fill_in(plan.requests)
    records = tuple(play.records[request.id] for request in plan.requests)
    return Pass(
        records=records,
        started_at=started_at,
        duration_s=max(r.ended_at for r in records) - min(r.scheduled_at for r in records),
        health=meter.health(),
        interrupted=interrupted,
    )


async def _until_stopped(work: Awaitable[None], stop: asyncio.Event | None) -> bool:
    """Do the work to its end, or until `stop` is set: then True."""

    async def watch(stop: asyncio.Event) -> None:
        await stop.wait()
        raise _Stopped

    stopped = False
    try:
        async with asyncio.TaskGroup() as tasks:
            watcher = tasks.create_task(watch(stop)) if stop is not None else None
            await work
            if watcher is not None:
                watcher.cancel()
    except* _Stopped:
        stopped = True
    return stopped


async def _open_loop(play: _Play, plan: Plan, *, origin: float) -> None:
    async with asyncio.TaskGroup() as tasks:
        for request in plan.requests:
            tasks.create_task(play.play(request, origin=origin))


async def _closed_loop(play: _Play, plan: Plan, *, starts: Mapping[str, float], concurrency: int) -> None:
    waiting = deque(linked_sessions(plan, starts))

    async def live() -> None:
        while waiting:
            session = waiting.popleft()
            first = min(starts[request.id] for request in session if not request.after)
            origin = time.monotonic() - first
            async with asyncio.TaskGroup() as tasks:
                for request in session:
                    tasks.create_task(play.play(request, origin=origin))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, len(waiting))):
            tasks.create_task(live())


async def _sleep_until(at: float) -> None:
    """Never too early: a loop's timers may be of milliseconds, and go off before their time."""
    while (left := at - time.monotonic()) > 0:  # noqa: ASYNC110 - it waits for a time, not for an event
        await asyncio.sleep(left)


def turns_of(plan: Plan) -> dict[str, int]:
    """Each request's place in its session, in plan order."""
    counts: dict[str, int] = {}
    turns = {}
    for request in plan.requests:
        turns[request.id] = counts.get(request.session, 0)
        counts[request.session] = turns[request.id] + 1
    return turns


def linked_sessions(plan: Plan, starts: Mapping[str, float]) -> list[tuple[PlannedRequest, ...]]:
    """Sessions in order of their start. Those that wait for each other's answers are played as one.

    Played apart, one could hold its place for ever, waiting for another that has none.
    """
    leader = {request.session: request.session for request in plan.requests}

    def find(session: str) -> str:
        while leader[session] != session:
            leader[session] = leader[leader[session]]
            session = leader[session]
        return session

    session_of = {request.id: request.session for request in plan.requests}
    for request in plan.requests:
        for name in request.after:
            leader[find(request.session)] = find(session_of[name])
    groups: dict[str, list[PlannedRequest]] = {}
    for request in plan.requests:
        groups.setdefault(find(request.session), []).append(request)

    def start(group: list[PlannedRequest]) -> float:
        return min(starts[request.id] for request in group if not request.after)

    return [tuple(group) for group in sorted(groups.values(), key=start)]


def _by_start(plan: Plan, starts: Mapping[str, float]) -> list[PlannedRequest]:
    """First the requests that the schedule starts, then those that wait, in plan order."""
    return sorted(plan.requests, key=lambda r: (bool(r.after), starts.get(r.id, 0.0)))
