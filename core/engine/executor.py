"""Where steps are computed: the contract that the thread and the process executor both keep.

`ls` of this folder's `thread.py` and `process.py` is the list of executors. A `Worker` is the
synchronous thing inside: it owns tensors, computes one plan at a time and knows no asyncio.
"""

import importlib
from collections.abc import Callable
from typing import Protocol

import msgspec

from core.config import EngineConfig, ExecutorKind
from core.errors import WorkerFailed
from core.execution.worker_info import WorkerInfo, WorkerMemory
from core.scheduler.plan import StepPlan, StepResult

DEFAULT_WORKER = "core.execution.worker:load_worker"
"""`module:function` of the factory of the real worker; importing the module imports torch."""


class Worker(Protocol):
    """Computes plans. Called from one thread only."""

    info: WorkerInfo

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step. May raise anything: then the plan's requests end with `error`."""
        ...

    def memory(self) -> WorkerMemory: ...

    def close(self) -> None:
        """Free what the worker holds. Called once, also after a failed step."""
        ...


WorkerFactory = Callable[[EngineConfig], Worker]


class Executor(Protocol):
    """Runs a `Worker` away from the event loop.

    `execute` is called with one plan at a time. After `WorkerFailed` the executor is dead:
    every later call raises it again, until `restart()` has loaded a fresh worker.
    """

    @property
    def failure(self) -> WorkerFailed | None:
        """Why the worker is gone, as soon as that is noticed, between steps too; None while it lives."""
        ...

    async def start(self) -> WorkerInfo:
        """Load the worker.

        Raises:
            CheckpointError, ConfigError: the worker's own named refusals, passed on as they are.
            WorkerFailed: it died or passed `load_deadline_s`.
        """
        ...

    async def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step.

        Raises:
            StepFailed: the step raised, and the worker lives on.
            WorkerFailed: the worker died or passed `step_deadline_s`; its late result is dropped.
        """
        ...

    async def memory(self) -> WorkerMemory: ...

    async def restart(self) -> WorkerInfo:
        """Load a fresh worker, of the first one's size: the scheduler's books stay right.

        Raises:
            CheckpointError, ConfigError, WorkerFailed: as `start()`.
        """
        ...

    async def close(self) -> None:
        """Stop the worker and free its memory; no process or thread is left. Never raises."""
        ...


class ExecutorFactory(Protocol):
    """What each executor's file offers as `create`."""

    def __call__(self, config: EngineConfig, *, worker: str, on_failure: Callable[[], None]) -> Executor:
        """Make an executor; nothing starts yet.

        Args:
            worker: `module:function` of a `WorkerFactory`, imported where the worker runs.
            on_failure: called on the event loop when `failure` is set.
        """
        ...


def find_executor(kind: ExecutorKind) -> ExecutorFactory:
    """The factory in the file of that name."""
    create: ExecutorFactory = importlib.import_module(f"core.engine.{kind}").create
    return create


def same_size(config: EngineConfig, info: WorkerInfo) -> EngineConfig:
    """The config under which a restarted worker has as many blocks as the first, whatever memory is free."""
    return msgspec.structs.replace(config, num_blocks=info.num_blocks, max_model_len=info.max_model_len)
