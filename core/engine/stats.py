"""What the engine counts, as plain numbers: no metrics library, no names of series."""

from collections import deque
from collections.abc import Iterable, Mapping

import msgspec

from core.request import FinishReason, TokenOutput
from core.scheduler.stats import SchedulerStats

NUM_RECENT_STEPS = 1024
"""Steps that are remembered one by one; about half a MiB."""

SUMMED = (
    "num_requests", "num_prefill_tokens", "num_recomputed_tokens", "num_decode_tokens", "num_output_tokens",
    "schedule_s", "execute_s", "build_s", "forward_s", "sample_s", "deliver_s",
)  # fmt: skip
"""Fields of `StepStats` whose totals are kept."""


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Times in seconds; `execute_s - build_s - forward_s - sample_s` is the executor's overhead.

    The three kinds of computed tokens add up to the step's tokens.
    """

    step_id: int
    num_requests: int
    num_prefill_tokens: int
    """Of prompts, for the first time."""
    num_recomputed_tokens: int
    """Whose KV their request had and lost by a preemption."""
    num_decode_tokens: int
    """Generated ones, for the first time."""
    num_output_tokens: int
    failed: bool
    schedule_s: float
    """From the end of the turn before (or the end of idleness) until the plan was there."""
    execute_s: float
    build_s: float
    forward_s: float
    sample_s: float
    deliver_s: float
    """From the executor's answer until every stream has its tokens."""
    loop_lag_s: float
    """The worst lateness of a timer on the event loop since the step before."""
    num_waiting: int
    num_running: int
    num_free_blocks: int
    num_evictable_blocks: int
    num_held_blocks: int
    num_cached_blocks: int
    waste: float
    """The share of slots in held blocks in which nothing stands."""
    num_query_tokens: int
    num_hit_tokens: int
    num_preemptions: int
    """These three of all steps so far."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the start, and in `scheduler` this moment's queues and blocks."""

    num_requests: int
    num_finished: dict[FinishReason, int]
    """How streams ended, as their readers were told. Counts a request once, restarts or not."""
    num_steps: int
    num_failed_steps: int
    num_batched_requests: int
    """The sum of the steps' batch sizes."""
    num_prefill_tokens: int
    num_recomputed_tokens: int
    num_decode_tokens: int
    num_output_tokens: int
    schedule_s: float
    execute_s: float
    build_s: float
    forward_s: float
    sample_s: float
    deliver_s: float
    slowest_s: float
    """The longest execution of a step."""
    request_s: dict[str, float]
    """State -> time that finished requests spent in it (`explain.py` says what each means)."""
    num_restarts: int
    scheduler: SchedulerStats


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Whether requests get anywhere. Judged by the worker's life and by the progress of steps."""

    alive: bool
    reason: str | None
    """Why not, where `alive` is False."""
    stalled: str | None
    """What has taken far longer than it ever did; short of a deadline, and so not yet given up."""
    accepting: bool
    """New requests are taken. False while draining and after the last failure."""
    last_step_age_s: float | None
    """Since the newest step ended; None before the first. Grows while idle."""
    num_waiting: int
    num_running: int
    num_restarts: int


class StepLog:
    """Adds up steps and finished requests, and remembers the newest steps. Bounded."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_finished = dict.fromkeys(FinishReason, 0)
        self.slowest_s = 0.0
        """The longest step so far."""
        self._recent: deque[StepStats] = deque(maxlen=NUM_RECENT_STEPS)
        self._num_steps = 0
        self._num_failed_steps = 0
        self._totals: dict[str, float] = dict.fromkeys(SUMMED, 0)

    def add(self, step: StepStats) -> None:
        self._recent.append(step)
        self._num_steps += 1
        self._num_failed_steps += step.failed
        for name in SUMMED:
            self._totals[name] += getattr(step, name)
        self.slowest_s = max(self.slowest_s, step.execute_s)

    def after(self, step_id: int) -> tuple[StepStats, ...]:
        """Remembered steps with a higher id, oldest first."""
        newer: list[StepStats] = []
        for step in reversed(self._recent):
            if step.step_id <= step_id:
                break
            newer.append(step)
        return tuple(reversed(newer))

    def snapshot(
        self, scheduler: SchedulerStats, *, num_restarts: int, request_s: Mapping[str, float]
    ) -> EngineStats:
        totals = dict(self._totals)
        num_batched_requests = int(totals.pop("num_requests"))
        return EngineStats(
            num_requests=self.num_requests,
            num_finished=dict(self.num_finished),
            num_steps=self._num_steps,
            num_failed_steps=self._num_failed_steps,
            num_batched_requests=num_batched_requests,
            **totals,  # type: ignore[arg-type]  # each total has the type of its field
            slowest_s=self.slowest_s,
            request_s=dict(request_s),
            num_restarts=num_restarts,
            scheduler=scheduler,
        )


def count_tokens(outputs: Iterable[TokenOutput]) -> int:
    return sum(len(output.token_ids) for output in outputs)
