"""Workers that misbehave in ways the fake KV worker cannot: factories for both executors."""

import ctypes
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from core.config import EngineConfig
from core.errors import CheckpointError, ConfigError, UnsupportedModel
from core.execution.worker_info import WorkerInfo, WorkerMemory
from core.scheduler.plan import SampledTokens, StepPlan, StepResult

THIS = "tests.core.engine.odd_workers"


class StrangeCheckpoint(CheckpointError):
    """A refusal the other process has never heard of."""

    code = "strange"


class OddWorker:
    """Answers every sampled row with token 1, after doing one odd thing."""

    def __init__(self, config: EngineConfig, *, oddity: Callable[[], None] = lambda: None) -> None:
        self._oddity = oddity
        self.info = WorkerInfo(
            num_blocks=config.num_blocks or 64,
            block_size=config.block_size,
            max_model_len=config.max_model_len or 4096,
            vocab_size=100,
            device="cpu",
            numerics=config.numerics,
            architecture="odd",
        )

    def execute(self, plan: StepPlan) -> StepResult:
        self._oddity()
        samples = (
            SampledTokens(request_id=item.request_id, token_ids=(1,))
            for item in plan.items
            if item.num_samples
        )
        return StepResult(step_id=plan.step_id, samples=tuple(samples))

    def memory(self) -> WorkerMemory:
        return WorkerMemory(rss_bytes=1)

    def close(self) -> None:
        pass


def load_exiting_worker(config: EngineConfig) -> OddWorker:
    """Its step ends the worker, not just the step."""
    return OddWorker(config, oddity=lambda: sys.exit("no more"))


def load_refusing_worker(config: EngineConfig) -> OddWorker:
    """Refuses to load, in the way that `config.checkpoint` names."""
    refusals = {
        "checkpoint": CheckpointError("model.gguf", "is 3 bytes long"),
        "unsupported": UnsupportedModel("model.gguf", "has the architecture 'abacus'"),
        "config": ConfigError("num_threads is 9; there are 2 cores"),
        "strange": StrangeCheckpoint("model.gguf", "smells"),
    }
    raise refusals[config.checkpoint]


def load_printing_worker(config: EngineConfig) -> OddWorker:
    print("a library says hello")
    return OddWorker(config, oddity=lambda: print("and again"))


def load_summing_worker(config: EngineConfig) -> "SummingWorker":
    return SummingWorker(config)


class SummingWorker(OddWorker):
    """Answers with the sum of all token ids it was sent, so that a long plan is checked cheaply."""

    def execute(self, plan: StepPlan) -> StepResult:
        samples = (
            SampledTokens(request_id=item.request_id, token_ids=(sum(item.token_ids), len(item.block_table)))
            for item in plan.items
        )
        return StepResult(step_id=plan.step_id, samples=tuple(samples))


def load_worker_of_any_size(config: EngineConfig) -> OddWorker:
    """As large as memory happens to allow, unless it is told."""
    free = secrets.randbelow(1 << 20) + 1
    return OddWorker(
        msgspec.structs.replace(
            config, num_blocks=config.num_blocks or free, max_model_len=config.max_model_len or free
        )
    )


def load_lying_worker(config: EngineConfig) -> "LyingWorker":
    return LyingWorker(config)


class LyingWorker(OddWorker):
    """Answers for requests that nobody planned."""

    def execute(self, plan: StepPlan) -> StepResult:
        samples = (SampledTokens(request_id="somebody else", token_ids=(1,)) for _ in plan.items)
        return StepResult(step_id=plan.step_id, samples=tuple(samples))


def load_worker_once(config: EngineConfig) -> OddWorker:
    """Loads once; then `config.checkpoint` exists, and the model file counts as gone. Its step ends it."""
    try:
        Path(config.checkpoint).touch(exist_ok=False)
    except FileExistsError:
        raise CheckpointError(config.checkpoint, "was deleted") from None
    return load_exiting_worker(config)


def load_hanging_worker(config: EngineConfig) -> OddWorker:
    """Its step says so on stderr and hangs."""
    return OddWorker(config, oddity=lambda: hang(time.sleep))


def load_stuck_worker(config: EngineConfig) -> OddWorker:
    """Its step hangs in C with the GIL held: no other thread of its process runs again.

    It also has a process of its own, as a compiler would be.
    """
    subprocess.Popen(["sleep", "600"])
    return OddWorker(config, oddity=lambda: hang(ctypes.PyDLL(None).sleep))


def hang(sleep: Callable[[int], object]) -> None:
    print("hanging", file=sys.stderr, flush=True)
    sleep(600)
