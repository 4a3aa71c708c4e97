"""The process executor: the worker in a spawned child, so that only the child imports torch."""

import asyncio
import contextlib
from collections.abc import Callable

from core.config import EngineConfig
from core.engine.child import Child
from core.engine.executor import same_size
from core.engine.frames import (
    Answer,
    Execute,
    Executed,
    Load,
    Loaded,
    MemoryRead,
    NumberedCall,
    QueryMemory,
    Refused,
    StepRaised,
    refusal_of,
)
from core.errors import StepFailed, WorkerFailed
from core.execution.worker_info import WorkerInfo, WorkerMemory
from core.scheduler.plan import StepPlan, StepResult

CLOSE_GRACE_S = 5.0
"""How long a worker may take to close before it is killed."""


class ProcessExecutor:
    """Satisfies `Executor`. At most one child at a time; calls may overlap and are answered in order."""

    def __init__(self, config: EngineConfig, *, worker: str, on_failure: Callable[[], None]) -> None:
        self._config = config
        self._worker = worker
        self._on_failure = on_failure
        self._child: Child | None = None
        self._closing = False

    @property
    def failure(self) -> WorkerFailed | None:
        return None if self._child is None else self._child.failure

    @property
    def pid(self) -> int:
        """The child's process id."""
        assert self._child is not None, "start() comes first"
        return self._child.pid

    async def start(self) -> WorkerInfo:
        assert self._child is None, "started twice"
        child = Child(on_end=self._on_child_end)
        await child.spawn()
        self._child = child
        try:
            answer = await self._ask(
                lambda call_id: Load(call_id=call_id, config=self._config, worker=self._worker),
                deadline_s=self._config.load_deadline_s,
                what="loading the worker",
            )
        except BaseException:
            await self._kill("loading was given up")
            raise
        if isinstance(answer, Refused):
            await self._kill("the worker refused to load")
            raise refusal_of(answer)
        assert isinstance(answer, Loaded)
        self._config = same_size(self._config, answer.info)
        return answer.info

    async def execute(self, plan: StepPlan) -> StepResult:
        answer = await self._ask(
            lambda call_id: Execute(call_id=call_id, plan=plan),
            deadline_s=self._config.step_deadline_s,
            what=f"step {plan.step_id}",
        )
        if isinstance(answer, StepRaised):
            raise StepFailed(answer.message)
        assert isinstance(answer, Executed)
        return answer.result

    async def memory(self) -> WorkerMemory:
        # It may queue behind a step that uses the whole of its own deadline.
        answer = await self._ask(
            lambda call_id: QueryMemory(call_id=call_id),
            deadline_s=2 * self._config.step_deadline_s,
            what="a memory query",
        )
        assert isinstance(answer, MemoryRead)
        return answer.memory

    async def restart(self) -> WorkerInfo:
        await self._kill("the worker is being restarted")
        self._child = None
        return await self.start()

    async def close(self) -> None:
        child = self._child
        if child is None:
            return
        self._closing = True
        try:
            child.ask_to_exit()
            if child.failure is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(child.ended.wait(), CLOSE_GRACE_S)
        finally:
            await self._kill("the executor was closed")

    async def _ask(self, make: Callable[[int], NumberedCall], *, deadline_s: float, what: str) -> Answer:
        """One call and its answer.

        Raises:
            WorkerFailed: the child ended, or was killed for passing the deadline.
        """
        assert self._child is not None, "start() comes first"
        try:
            async with asyncio.timeout(deadline_s):
                return await self._child.call(make)
        except TimeoutError:
            await self._kill(f"{what} took longer than {deadline_s:g} s")
            assert self._child.failure is not None
            raise self._child.failure from None

    async def _kill(self, reason: str) -> None:
        """End the child now, whatever it is doing, and reap it."""
        if self._child is not None:
            self._child.kill(reason)
            await self._child.ended.wait()

    def _on_child_end(self) -> None:
        if not self._closing:
            self._on_failure()


create = ProcessExecutor
