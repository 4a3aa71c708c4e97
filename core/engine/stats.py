"""What the engine counts, as plain numbers: no metrics library, no names of series."""

from collections import deque
from collections.abc import Iterable

import msgspec

from core.request import FinishReason, TokenOutput
from core.scheduler.stats import SchedulerStats

NUM_RECENT_STEPS = 1024
"""Steps that are remembered one by one; about half a MiB."""


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Times in seconds; `execute_s - build_s - forward_s - sample_s` is the executor's overhead.

    A request that computes exactly its newest, generated token decodes; all else is prefill,
    recomputation after a preemption included.
    """

    step_id: int
    num_requests: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_output_tokens: int
    failed: bool
    schedule_s: float
    execute_s: float
    build_s: float
    forward_s: float
    sample_s: float
    deliver_s: float
    """From the executor's answer until every stream has its tokens."""
    num_waiting: int
    num_running: int
    num_free_blocks: int
    num_held_blocks: int
    num_cached_blocks: int
    num_preemptions: int
    """Of all steps so far."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the start, and in `scheduler` this moment's queues and blocks."""

    num_requests: int
    num_finished: dict[FinishReason, int]
    """How streams ended, as their readers were told. Counts a request once, restarts or not."""
    num_steps: int
    num_failed_steps: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_output_tokens: int
    schedule_s: float
    execute_s: float
    forward_s: float
    deliver_s: float
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
        self._recent: deque[StepStats] = deque(maxlen=NUM_RECENT_STEPS)
        self._num_steps = 0
        self._num_failed_steps = 0
        self._num_prefill_tokens = 0
        self._num_decode_tokens = 0
        self._num_output_tokens = 0
        self._schedule_s = 0.0
        self._execute_s = 0.0
        self._forward_s = 0.0
        self._deliver_s = 0.0
        self.slowest_s = 0.0
        """The longest step so far."""

    def add(self, step: StepStats) -> None:
        self._recent.append(step)
        self._num_steps += 1
        self._num_failed_steps += step.failed
        self._num_prefill_tokens += step.num_prefill_tokens
        self._num_decode_tokens += step.num_decode_tokens
        self._num_output_tokens += step.num_output_tokens
        self._schedule_s += step.schedule_s
        self._execute_s += step.execute_s
        self._forward_s += step.forward_s
        self._deliver_s += step.deliver_s
        self.slowest_s = max(self.slowest_s, step.execute_s)

    def after(self, step_id: int) -> tuple[StepStats, ...]:
        """Remembered steps with a higher id, oldest first."""
        newer: list[StepStats] = []
        for step in reversed(self._recent):
            if step.step_id <= step_id:
                break
            newer.append(step)
        return tuple(reversed(newer))

    def snapshot(self, scheduler: SchedulerStats, *, num_restarts: int) -> EngineStats:
        return EngineStats(
            num_requests=self.num_requests,
            num_finished=dict(self.num_finished),
            num_steps=self._num_steps,
            num_failed_steps=self._num_failed_steps,
            num_prefill_tokens=self._num_prefill_tokens,
            num_decode_tokens=self._num_decode_tokens,
            num_output_tokens=self._num_output_tokens,
            schedule_s=self._schedule_s,
            execute_s=self._execute_s,
            forward_s=self._forward_s,
            deliver_s=self._deliver_s,
            num_restarts=num_restarts,
            scheduler=scheduler,
        )


def count_tokens(outputs: Iterable[TokenOutput]) -> int:
    return sum(len(output.token_ids) for output in outputs)
