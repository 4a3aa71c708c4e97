"""What is remembered of the engine's work: steps added up, requests explained, a trace if one is wanted."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from core.engine.cruise import Cruise
from core.engine.explain import (
    DECODING,
    PREFILLING,
    QUEUED,
    STALLED,
    STATES,
    Account,
    Explanation,
    RequestBooks,
    Writer,
)
from core.engine.lag import LagProbe
from core.engine.stats import EngineStats, StepLog, StepStats, count_tokens
from core.engine.trace import Trace
from core.request import FinishReason, Request, TokenOutput
from core.scheduler.plan import PlannedTokens, StepPlan, StepResult
from core.scheduler.stats import SchedulerStats

SHOWN_STATES = {QUEUED: "queued", PREFILLING: "prefill", DECODING: "decode", STALLED: "stalled"}
"""As the trace names them."""

NOBODY: Writer = (None, "")

FindNearest = Callable[[Request], tuple[int, int | None]]
"""How many tokens of a prompt the cached sequence that comes closest has too, and the block with the last."""


@dataclass(slots=True)
class Turn:
    """One turn of the loop: who is in its step, and when its parts began."""

    plan: StepPlan
    began_at: float
    scheduled_at: float
    submitted_at: float = 0.0
    """When the executor was given the plan, and when it had answered."""
    computed_at: float = 0.0
    accounts: list[Account] = field(default_factory=list)
    """Those that do not cruise."""
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    num_recomputed_tokens: int = 0

    @property
    def num_decode_tokens(self) -> int:
        return self.num_tokens - self.num_prefill_tokens - self.num_recomputed_tokens


class Recorder:
    """Sees every turn and every request once. Touched by the event loop alone; its clock is an argument.

    A turn costs a look at each item of its plan, and O(1) for each that does not just decode as it did
    in the turn before; a request costs a walk down the prefix tree, once.
    """

    def __init__(self, *, find_nearest: FindNearest, block_size: int, trace: Trace | None = None) -> None:
        self.log = StepLog()
        self.books = RequestBooks()
        self.lag = LagProbe()
        self._find_nearest = find_nearest
        self._block_size = block_size
        self._trace = trace
        self._writers: dict[int, Writer] = {}
        """Block -> its newest writer. No larger than the pool."""
        self._cruise = Cruise()
        self._turn_ended_at: float | None = None

    def submitted(self, request: Request, caller_id: str, *, at: float) -> None:
        account = Account(request, caller_id=caller_id, at=at)
        self.books.open(account)
        self.log.num_requests += 1
        if self._trace is not None:
            details = {"request_id": caller_id, "prompt_tokens": request.num_prompt_tokens}
            self._trace.begin("request", at, track=request.request_id, args=details)
            self._show(account, QUEUED, at)

    def requeued(self, request: Request) -> None:
        """A restart put a new object in a request's place."""
        self.books[request.request_id].request = request

    def ended(self, engine_id: str, reason: FinishReason, *, at: float) -> None:
        self.log.num_finished[reason] += 1
        if engine_id in self._cruise:
            self._cruise.leave(engine_id)
        account = self.books.close(engine_id, reason, at=at)
        trace = self._trace
        if trace is None:
            return
        if not account.in_turn and at > account.at:
            self._show(account, account.waiting_state, account.at)
        if account.traced >= 0:
            trace.end(SHOWN_STATES[account.traced], at, track=engine_id)
        request = account.request
        details = {
            "reason": reason.value,
            "output_tokens": request.num_output_tokens,
            "cached_tokens": request.num_cached_tokens or 0,
            "preemptions": request.num_preemptions,
        }
        trace.end("request", at, track=engine_id, args=details)

    def idle(self) -> None:
        """The loop has nothing to do: the next turn begins when it has."""
        self._turn_ended_at = None

    def begin(self, plan: StepPlan, *, began_at: float, scheduled_at: float) -> Turn:
        """A plan was made. What the loop did since the last turn counts with this one."""
        if self._turn_ended_at is not None:
            began_at = self._turn_ended_at
        else:
            self._stop_cruising(self._cruise)
        self._turn_ended_at = None
        turn = Turn(plan, began_at=began_at, scheduled_at=scheduled_at)
        cruise, size = self._cruise, self._block_size
        others = [item for item in plan.items if item.request_id not in cruise or len(item.token_ids) != 1]
        if len(plan.items) - len(others) != len(cruise):
            cruising = {item.request_id for item in plan.items} - {item.request_id for item in others}
            self._stop_cruising(engine_id for engine_id in tuple(cruise) if engine_id not in cruising)
        for item in plan.items:
            if item.first_position % size == 0:  # the others' chunks are seen below, wherever they begin
                self._remember_writer(self.books[item.request_id], item.first_position, num_tokens=1)
        turn.num_tokens = len(cruise)
        self._take_in(turn, others)
        return turn

    def _stop_cruising(self, engine_ids: Iterable[str]) -> None:
        for engine_id in tuple(engine_ids):
            self._cruise.leave(engine_id)

    def _take_in(self, turn: Turn, items: Iterable[PlannedTokens]) -> None:
        """Those of a turn that do not cruise: what kind their tokens are, and whose time the step's is."""
        prefilling: list[tuple[Account, int]] = []
        for item in items:
            account = self.books[item.request_id]
            if account.at < turn.began_at or account.num_steps == 0:
                self._admit(account, turn.began_at)
            num_tokens = len(item.token_ids)
            num_new, num_lost = account.begin(item.first_position, num_tokens)
            turn.accounts.append(account)
            turn.num_tokens += num_tokens
            if num_new or num_lost:
                turn.num_prefill_tokens += num_new
                turn.num_recomputed_tokens += num_lost
                prefilling.append((account, num_new + num_lost))
            if num_tokens > 1:
                self._remember_writer(account, item.first_position, num_tokens=num_tokens)
        num_all = turn.num_prefill_tokens + turn.num_recomputed_tokens
        self._cruise.begin(stall_share=num_all / turn.num_tokens)
        for account in turn.accounts:
            account.stall_share = num_all / turn.num_tokens
        for account, num_own in prefilling:
            account.stall_share = (num_all - num_own) / turn.num_tokens
        if self._trace is not None:
            for account in turn.accounts:
                is_kept = account.state == DECODING and account.stall_share > 0.5
                self._show(account, STALLED if is_kept else account.state, max(account.at, turn.began_at))

    def end(
        self,
        turn: Turn,
        result: StepResult | None,
        *,
        outputs: Sequence[TokenOutput],
        scheduler: SchedulerStats,
        at: float,
    ) -> None:
        """The turn's tokens are delivered, or its failure is."""
        self._turn_ended_at = at
        self._cruise.end(at, began_at=turn.began_at)
        for account in turn.accounts:
            if account.in_turn:
                account.end(at)
                if account.state == DECODING and account.is_open and self._trace is None:
                    self._cruise.join(account)
        step = _step_stats(
            turn, result, outputs=outputs, scheduler=scheduler, at=at, loop_lag_s=self.lag.take()
        )
        self.log.add(step)
        if self._trace is not None:
            self._draw(turn, step, at)

    def explain(self, request_id: str, *, at: float) -> tuple[Explanation, ...]:
        """All requests that their caller named so, oldest first."""
        self._update()
        return self.books.explain(request_id, at=at)

    def live(self, *, at: float) -> tuple[Explanation, ...]:
        """All that have not ended, oldest first."""
        self._update()
        return self.books.live(at=at)

    def _update(self) -> None:
        for engine_id in tuple(self._cruise):
            self._cruise.update(engine_id)

    def snapshot(self, scheduler: SchedulerStats, *, num_restarts: int) -> EngineStats:
        return self.log.snapshot(
            scheduler, num_restarts=num_restarts, request_s=dict(zip(STATES, self.books.seconds, strict=True))
        )

    def _admit(self, account: Account, began_at: float) -> None:
        """Book the wait before this turn; at its first step look what of its prompt others have left."""
        if account.num_steps == 0:
            num_tokens, block_id = self._find_nearest(account.request)
            writer = NOBODY if block_id is None else self._writers.get(block_id, NOBODY)
            account.saw_nearest(num_tokens, writer)
        if account.at < began_at:
            waited_from = account.at
            state = account.wait(began_at)
            if self._trace is not None:
                self._show(account, state, waited_from)

    def _remember_writer(self, account: Account, first: int, *, num_tokens: int) -> None:
        table, size = account.request.block_table, self._block_size
        writer = (account.caller_id, account.request.session_id)
        for index in range(first // size, (first + num_tokens - 1) // size + 1):
            self._writers[table[index]] = writer

    def _show(self, account: Account, state: int, at: float) -> None:
        """Change the state that a request's track shows."""
        assert self._trace is not None
        if account.traced == state:
            return
        track = account.request.request_id
        if account.traced >= 0:
            self._trace.end(SHOWN_STATES[account.traced], at, track=track)
        self._trace.begin(SHOWN_STATES[state], at, track=track)
        account.traced = state

    def _draw(self, turn: Turn, step: StepStats, at: float) -> None:
        """A turn's slices. The worker tells how long its parts took, not when: they stand in a row."""
        trace = self._trace
        assert trace is not None
        numbers = {name: getattr(step, name) for name in TRACED_NUMBERS}
        trace.slice(f"step {step.step_id}", turn.began_at, ended_at=at, args=numbers)
        trace.slice("schedule", turn.began_at, ended_at=turn.scheduled_at)
        trace.slice("execute", turn.submitted_at, ended_at=turn.computed_at)
        began_at = turn.submitted_at
        for name, duration_s in (
            ("build", step.build_s), ("forward", step.forward_s), ("sample", step.sample_s),
        ):  # fmt: skip
            ended_at = min(began_at + duration_s, turn.computed_at)
            trace.slice(name, began_at, ended_at=ended_at)
            began_at = ended_at
        trace.slice("deliver", turn.computed_at, ended_at=at)
        blocks = {
            "free": step.num_free_blocks,
            "held": step.num_held_blocks,
            "evictable": step.num_evictable_blocks,
        }
        trace.count("blocks", at, values=blocks)
        trace.count("requests", at, values={"running": step.num_running, "waiting": step.num_waiting})
        trace.count("loop lag", at, values={"ms": round(step.loop_lag_s * 1e3, 3)})


TRACED_NUMBERS = (
    "num_requests", "num_prefill_tokens", "num_recomputed_tokens", "num_decode_tokens", "num_output_tokens",
    "num_waiting", "num_running", "num_free_blocks", "num_held_blocks", "num_cached_blocks",
    "num_hit_tokens", "num_query_tokens", "num_preemptions", "waste", "failed",
)  # fmt: skip
"""What a step's slice says when it is clicked: fields of `StepStats`."""


def _step_stats(
    turn: Turn,
    result: StepResult | None,
    *,
    outputs: Sequence[TokenOutput],
    scheduler: SchedulerStats,
    at: float,
    loop_lag_s: float,
) -> StepStats:
    return StepStats(
        step_id=turn.plan.step_id,
        num_requests=len(turn.plan.items),
        num_prefill_tokens=turn.num_prefill_tokens,
        num_recomputed_tokens=turn.num_recomputed_tokens,
        num_decode_tokens=turn.num_decode_tokens,
        num_output_tokens=count_tokens(outputs),
        failed=result is None,
        schedule_s=turn.scheduled_at - turn.began_at,
        execute_s=turn.computed_at - turn.submitted_at,
        build_s=result.build_s if result else 0.0,
        forward_s=result.forward_s if result else 0.0,
        sample_s=result.sample_s if result else 0.0,
        deliver_s=at - turn.computed_at,
        loop_lag_s=loop_lag_s,
        num_waiting=scheduler.num_waiting,
        num_running=scheduler.num_running,
        num_free_blocks=scheduler.num_free_blocks,
        num_evictable_blocks=scheduler.num_evictable_blocks,
        num_held_blocks=scheduler.num_held_blocks,
        num_cached_blocks=scheduler.num_cached_blocks,
        waste=scheduler.waste,
        num_query_tokens=scheduler.num_query_tokens,
        num_hit_tokens=scheduler.num_hit_tokens,
        num_preemptions=scheduler.num_preemptions,
    )
