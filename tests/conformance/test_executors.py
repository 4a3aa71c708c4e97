"""One suite for every executor: a new file beside thread.py and process.py is tested by being named here."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import get_args

import pytest

from core.config import EngineConfig, ExecutorKind
from core.engine.executor import Executor, find_executor
from core.errors import CheckpointError, ConfigError, EngineError, StepFailed, UnsupportedModel, WorkerFailed
from core.request import SamplingParams
from core.scheduler.plan import PlannedTokens, StepPlan
from tests.core.engine import odd_workers
from tests.core.engine.leftovers import nothing_left_behind
from tests.core.engine.loops import on_each_loop
from tests.fakes.kv_worker import generate_alone

FAKE = "tests.fakes.kv_worker:load_worker"
GREEDY = SamplingParams(max_tokens=1, temperature=0.0, seed=0)

pytestmark = [
    pytest.mark.parametrize("kind", get_args(ExecutorKind)),
    pytest.mark.usefixtures("no_leftovers"),
]


@pytest.fixture
def no_leftovers() -> Iterator[None]:
    with nothing_left_behind():
        yield


def config(checkpoint: str = "fake:", **options: float) -> EngineConfig:
    return EngineConfig(checkpoint=checkpoint, num_blocks=int(options.pop("num_blocks", 64)), **options)  # type: ignore[arg-type]


def plan(
    step_id: int, token_ids: tuple[int, ...] = (1, 2, 3), *, first_position: int = 0, block_size: int = 16
) -> StepPlan:
    """A plan of one request that computes these tokens and samples one more."""
    table = array("i", range(-(-(first_position + len(token_ids)) // block_size)))
    item = PlannedTokens(
        request_id="a",
        token_ids=token_ids,
        first_position=first_position,
        block_table=table.tobytes(),
        num_samples=1,
        sampling=GREEDY,
    )
    return StepPlan(step_id=step_id, items=(item,))


class Failures:
    """Counts how often an executor said that its worker is gone."""

    def __init__(self) -> None:
        self.count = 0
        self.seen = asyncio.Event()

    def __call__(self) -> None:
        self.count += 1
        self.seen.set()


def make(
    kind: ExecutorKind, options: EngineConfig, *, worker: str = FAKE, failures: Failures | None = None
) -> Executor:
    return find_executor(kind)(options, worker=worker, on_failure=failures or Failures())


@asynccontextmanager
async def started(
    kind: ExecutorKind, options: EngineConfig, *, worker: str = FAKE, failures: Failures | None = None
) -> AsyncIterator[Executor]:
    executor = make(kind, options, worker=worker, failures=failures)
    try:
        await executor.start()
        yield executor
    finally:
        await executor.close()


@on_each_loop
async def test_a_started_executor_computes_steps_and_tells_its_memory(kind: ExecutorKind) -> None:
    failures = Failures()
    executor = make(kind, config(block_size=4), failures=failures)
    info = await executor.start()
    assert (info.architecture, info.num_blocks, info.namespace) == ("fake", 64, b"fake")
    for step_id in (1, 2, 3):
        prompt = (step_id, 2, 3, 4, 5)
        result = await executor.execute(plan(step_id, prompt, block_size=4))
        assert result.step_id == step_id
        assert [list(sample.token_ids) for sample in result.samples] == [generate_alone(prompt, GREEDY)]
    assert (await executor.memory()).anonymous_bytes > 0
    assert executor.failure is None
    await executor.close()
    assert failures.count == 0, "an orderly end is no failure"


@on_each_loop
async def test_a_plan_of_128k_tokens_crosses(kind: ExecutorKind) -> None:
    prompt = tuple(range(128_000))
    async with started(kind, config(), worker=f"{odd_workers.THIS}:load_summing_worker") as executor:
        result = await executor.execute(plan(1, prompt))
        assert result.samples[0].token_ids == (sum(prompt), 8_000 * 4)


@on_each_loop
async def test_a_step_that_raises_leaves_the_worker_alive(kind: ExecutorKind) -> None:
    async with started(kind, config("fake:raise_on_step=1")) as executor:
        with pytest.raises(StepFailed, match="RuntimeError: the fake worker was told to fail in step 1"):
            await executor.execute(plan(1))
        assert executor.failure is None
        assert (await executor.execute(plan(2))).step_id == 2


@on_each_loop
async def test_a_hung_step_fails_at_its_deadline_and_its_late_result_is_dropped(kind: ExecutorKind) -> None:
    failures = Failures()
    options = config("fake:hang_on_step=1,hang_s=0.4", step_deadline_s=0.2)
    async with started(kind, options, failures=failures) as executor:
        with pytest.raises(WorkerFailed, match=r"step 1 took longer than 0\.2 s"):
            await executor.execute(plan(1))
        failure = executor.failure
        assert failure is not None
        assert "step 1" in str(failure)
        for call in (executor.execute(plan(2)), executor.memory()):
            with pytest.raises(WorkerFailed, match="step 1"):
                await call
        await executor.restart()
        assert executor.failure is None
        assert (await executor.execute(plan(2))).step_id == 2
    assert failures.count == 1


@on_each_loop
async def test_a_worker_that_ends_in_a_step_fails_every_open_call_at_once(kind: ExecutorKind) -> None:
    failures = Failures()
    async with started(
        kind, config(), worker=f"{odd_workers.THIS}:load_exiting_worker", failures=failures
    ) as executor:
        calls = await asyncio.gather(executor.execute(plan(1)), executor.memory(), return_exceptions=True)
        assert [type(outcome) for outcome in calls] == [WorkerFailed, WorkerFailed]
        assert "SystemExit: no more" in str(calls[0])
        with pytest.raises(WorkerFailed):
            await executor.execute(plan(2))
    assert failures.count >= 1


@on_each_loop
async def test_a_restarted_worker_has_the_size_of_the_first(kind: ExecutorKind) -> None:
    executor = make(kind, config(num_blocks=0), worker=f"{odd_workers.THIS}:load_worker_of_any_size")
    first = await executor.start()
    assert first.num_blocks > 0
    assert await executor.restart() == first
    await executor.close()


@on_each_loop
async def test_a_restarted_worker_has_forgotten_everything(kind: ExecutorKind) -> None:
    async with started(kind, config()) as executor:
        await executor.execute(plan(1, (1, 2, 3)))
        remembering = await executor.execute(plan(2, (4,), first_position=3))
        await executor.restart()
        forgetful = await executor.execute(plan(2, (4,), first_position=3))
        assert list(remembering.samples[0].token_ids) == generate_alone((1, 2, 3, 4), GREEDY)
        assert forgetful.samples != remembering.samples


@pytest.mark.parametrize(
    ("name", "refusal", "message"),
    [
        ("checkpoint", CheckpointError, "model.gguf: is 3 bytes long"),
        ("unsupported", UnsupportedModel, "model.gguf: has the architecture 'abacus'"),
        ("config", ConfigError, "num_threads is 9; there are 2 cores"),
        ("strange", CheckpointError, "model.gguf: smells"),
    ],
)
@on_each_loop
async def test_named_refusals_cross_with_class_and_message(
    kind: ExecutorKind, name: str, refusal: type[EngineError], message: str
) -> None:
    executor = make(kind, config(name), worker=f"{odd_workers.THIS}:load_refusing_worker")
    with pytest.raises(refusal) as raised:
        await executor.start()
    assert str(raised.value) == message
    if isinstance(raised.value, CheckpointError):
        assert raised.value.path == "model.gguf"
    await executor.close()


@pytest.mark.parametrize(
    ("options", "worker", "message"),
    [
        ("fake:raise_on_load=1", FAKE, "RuntimeError: the fake worker was told to fail while loading"),
        ("fake:load_s=0.6", FAKE, r"loading the worker took longer than 0\.3 s"),
        ("fake:", "no.such.module:load", "ModuleNotFoundError: No module named 'no'"),
    ],
)
@on_each_loop
async def test_loading_that_fails_without_a_name_or_hangs_is_a_failed_worker(
    kind: ExecutorKind, options: str, worker: str, message: str
) -> None:
    deadline_s = 0.3 if "load_s" in options else 60.0
    executor = make(kind, config(options, load_deadline_s=deadline_s), worker=worker)
    with pytest.raises(WorkerFailed, match=message):
        await executor.start()
    await executor.close()


@on_each_loop
async def test_a_cancelled_call_leaves_the_next_one_its_own_answer(kind: ExecutorKind) -> None:
    async with started(kind, config("fake:step_s=0.05")) as executor:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(executor.execute(plan(1)), 0.01)
        assert executor.failure is None
        assert (await executor.execute(plan(2))).step_id == 2


@on_each_loop
async def test_closing_in_the_middle_of_a_step_fails_that_step(kind: ExecutorKind) -> None:
    executor = make(kind, config("fake:step_s=0.2"))
    await executor.start()
    async with asyncio.TaskGroup() as tasks:
        step = tasks.create_task(outcome_of(executor, plan(1)))
        await asyncio.sleep(0)
        await executor.close()
    assert step.result() in ("done", "failed")
    with pytest.raises(WorkerFailed):
        await executor.execute(plan(2))


async def outcome_of(executor: Executor, step: StepPlan) -> str:
    try:
        await executor.execute(step)
    except WorkerFailed:
        return "failed"
    return "done"


@on_each_loop
async def test_closing_twice_or_without_a_start_is_harmless(kind: ExecutorKind) -> None:
    executor = make(kind, config())
    await executor.close()
    await executor.start()
    await executor.close()
    await executor.close()


@on_each_loop
async def test_loading_given_up_by_its_caller_leaves_nothing_running(kind: ExecutorKind) -> None:
    executor = make(kind, config("fake:load_s=0.3"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(executor.start(), 0.05)
    await executor.close()


@pytest.mark.parametrize("num_turns", range(6))
@on_each_loop
async def test_a_start_given_up_at_any_moment_leaves_nothing_running(
    kind: ExecutorKind, num_turns: int
) -> None:
    executor = make(kind, config("fake:load_s=0.3"))
    start = asyncio.ensure_future(executor.start())
    for _ in range(num_turns):
        await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    await executor.close()


@on_each_loop
async def test_the_event_loop_runs_on_while_a_step_computes(kind: ExecutorKind) -> None:
    async with started(kind, config("fake:step_s=0.2")) as executor, asyncio.TaskGroup() as tasks:
        step = tasks.create_task(executor.execute(plan(1)))
        ticks = 0
        while not step.done():
            await asyncio.sleep(0.01)
            ticks += 1
    assert ticks >= 5, "the loop stood still"
