"""The thread executor: the worker in a thread of this process. The simplest; tests use it first."""

import asyncio
import contextlib
import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from core.config import EngineConfig
from core.engine.executor import same_size
from core.engine.worker_host import WorkerHost
from core.errors import CheckpointError, ConfigError, StepFailed, WorkerFailed
from core.execution.worker_info import WorkerInfo, WorkerMemory
from core.scheduler.plan import StepPlan, StepResult

CLOSE_GRACE_S = 5.0
"""How long a worker may take to close before its thread is left behind."""

T = TypeVar("T")


class ThreadExecutor:
    """Satisfies `Executor`. A hung thread cannot be killed: it is abandoned, and its late result dropped.

    Abandoned threads are daemons and end by themselves if their step ever returns.
    """

    def __init__(self, config: EngineConfig, *, worker: str, on_failure: Callable[[], None]) -> None:
        self._config = config
        self._worker = worker
        self._on_failure = on_failure
        self._thread: _WorkerThread | None = None
        self._failure: WorkerFailed | None = None

    @property
    def failure(self) -> WorkerFailed | None:
        return self._failure

    async def start(self) -> WorkerInfo:
        assert self._thread is None, "started twice"
        self._thread = _WorkerThread()
        try:
            info = await self._ask(
                lambda host: host.load(self._config, self._worker),
                deadline_s=self._config.load_deadline_s,
                what="loading the worker",
            )
        except BaseException:
            self._thread.stop("loading was given up")
            raise
        self._config = same_size(self._config, info)
        return info

    async def execute(self, plan: StepPlan) -> StepResult:
        return await self._ask(
            lambda host: host.execute(plan),
            deadline_s=self._config.step_deadline_s,
            what=f"step {plan.step_id}",
        )

    async def memory(self) -> WorkerMemory:
        # It may queue behind a step that uses the whole of its own deadline.
        return await self._ask(
            WorkerHost.memory, deadline_s=2 * self._config.step_deadline_s, what="a memory query"
        )

    async def restart(self) -> WorkerInfo:
        if self._thread is not None:
            self._thread.stop("the worker is being restarted")
        self._thread, self._failure = None, None
        return await self.start()

    async def close(self) -> None:
        if self._thread is None:
            return
        self._thread.stop("the executor was closed")
        if self._failure is None:
            self._failure = WorkerFailed("the executor was closed")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._thread.ended.wait(), CLOSE_GRACE_S)
                self._thread.join()

    async def _ask(self, job: "Callable[[WorkerHost], T]", *, deadline_s: float, what: str) -> T:
        """Run one job in the thread.

        Raises:
            WorkerFailed: the worker ended, or was abandoned for passing the deadline.
        """
        assert self._thread is not None, "start() comes first"
        if self._failure is not None:
            raise self._failure
        try:
            async with asyncio.timeout(deadline_s):
                return await self._thread.submit(job)
        except TimeoutError:
            failure = self._fail(WorkerFailed(f"{what} took longer than {deadline_s:g} s"))
            self._thread.stop(str(failure))
            raise failure from None
        except WorkerFailed as error:
            raise self._fail(error) from None

    def _fail(self, failure: WorkerFailed) -> WorkerFailed:
        if self._failure is None:
            self._failure = failure
            self._on_failure()
        return self._failure


class _WorkerThread:
    """One daemon thread around one `WorkerHost`. Jobs run in order; every future gets an answer.

    `_serve` and what it calls run in the thread, everything else on the loop.
    """

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[Callable[[WorkerHost], bool] | None] = SimpleQueue()
        self._open: set[asyncio.Future[Any]] = set()
        self._failure: WorkerFailed | None = None
        self._thread = threading.Thread(target=self._serve, name="tidegate-worker", daemon=True)
        self._thread.start()

    def submit(self, job: "Callable[[WorkerHost], T]") -> "asyncio.Future[T]":
        future: asyncio.Future[T] = self._loop.create_future()
        if self._failure is not None:
            future.set_exception(self._failure)
            return future
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        self._jobs.put(lambda host: self._run(host, job, future))
        return future

    def stop(self, reason: str) -> None:
        """Fail the open calls and end the thread after its current job."""
        self._failure = self._failure or WorkerFailed(reason)
        for future in tuple(self._open):
            _reject(future, self._failure)
        self._jobs.put(None)

    def join(self) -> None:
        """Wait for the thread itself, once `ended` is set: it has nothing left to do."""
        self._thread.join()

    def _serve(self) -> None:
        host = WorkerHost()
        try:
            while (job := self._jobs.get()) is not None and self._failure is None:
                if not job(host):
                    break
            host.close()
        finally:
            self._post(self._on_end)

    def _run(self, host: WorkerHost, job: "Callable[[WorkerHost], T]", future: "asyncio.Future[T]") -> bool:
        """Do one job and post its outcome. False: the worker is no more."""
        try:
            self._post(_resolve, future, job(host))
        except (StepFailed, CheckpointError, ConfigError) as error:
            self._post(_reject, future, error)
            return isinstance(error, StepFailed)
        except BaseException as error:  # this thread's end is the worker's death: say why
            traceback.print_exception(error)
            self._post(self.stop, f"the worker ended: {type(error).__name__}: {error}")
            return False
        return True

    def _post(self, callback: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # an abandoned thread may outlive the loop
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _on_end(self) -> None:
        self.stop("the worker ended")
        self.ended.set()


def _resolve(future: "asyncio.Future[T]", answer: T) -> None:
    if not future.done():  # a caller that left, or whose deadline passed, wants no answer
        future.set_result(answer)


def _reject(future: "asyncio.Future[T]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


create = ThreadExecutor
