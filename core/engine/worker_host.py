"""The synchronous end that both executors share: one worker and the calls made of it."""

import importlib
import os
import traceback
from collections.abc import MutableMapping

from core.config import EngineConfig
from core.engine.executor import Worker, WorkerFactory
from core.errors import StepFailed
from core.execution.worker_info import WorkerInfo, WorkerMemory
from core.scheduler.plan import StepPlan, StepResult


class WorkerHost:
    """Loads a worker and calls it. Lives in, and is touched by, the computing thread alone."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def load(self, config: EngineConfig, worker: str) -> WorkerInfo:
        """Import the factory here (with it torch, which takes seconds) and call it.

        Raises:
            CheckpointError, ConfigError: the worker's named refusals.
            Exception: whatever else loading raises; the caller takes it for the worker's death.
        """
        bound_spinning(os.environ)
        module_name, _, function_name = worker.partition(":")
        load_worker: WorkerFactory = getattr(importlib.import_module(module_name), function_name)
        self._worker = load_worker(config)
        return self._worker.info

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step.

        Raises:
            StepFailed: the worker raised. The traceback went to stderr: the exception itself would
                keep the step's tensors alive.
        """
        assert self._worker is not None, "a step before load()"
        try:
            return self._worker.execute(plan)
        except Exception as error:
            traceback.print_exception(error)
            message = f"{type(error).__name__}: {error}"
        raise StepFailed(message)

    def memory(self) -> WorkerMemory:
        assert self._worker is not None, "a memory query before load()"
        return self._worker.memory()

    def close(self) -> None:
        """Free the worker, if one was loaded."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


def bound_spinning(environment: MutableMapping[str, str]) -> None:
    """Make idle OpenMP threads sleep soon, unless the user has decided.

    GNU libgomp spins at barriers: with as many threads as cores, a step beside any other busy
    process then waits for whole scheduler ticks. It reads these once, when torch loads it.
    """
    if "OMP_WAIT_POLICY" not in environment and "GOMP_SPINCOUNT" not in environment:
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        environment["GOMP_SPINCOUNT"] = "10000"
