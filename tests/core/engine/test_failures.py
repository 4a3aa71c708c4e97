"""Steps that raise, workers that die or hang: everyone hears of it once; the engine goes on or says no."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from core import Engine, EngineConfig, EngineFailed, FinishReason, TokenOutput, WorkerInfo
from core.config import ExecutorKind
from core.engine.executor import Executor
from core.errors import WorkerFailed
from core.execution.worker_info import WorkerMemory
from core.scheduler.plan import StepPlan, StepResult
from tests.core.engine import odd_workers
from tests.core.engine.leftovers import children, nothing_left_behind
from tests.core.engine.loops import on_each_loop
from tests.core.engine.running import assert_sound, collect, config, greedy, ids, opened, wait_for
from tests.fakes.kv_worker import generate_alone

on_each_executor = pytest.mark.parametrize("kind", get_args(ExecutorKind))


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    with nothing_left_behind():
        yield


def assert_failed(outputs: list[TokenOutput], message: str) -> None:
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert message in (outputs[-1].error or "")


@on_each_executor
@on_each_loop
async def test_a_step_that_raises_ends_its_requests_and_nobody_else(kind: ExecutorKind) -> None:
    options = config("fake:raise_on_step=3", executor=kind, max_running=2)
    async with opened(options) as engine, asyncio.TaskGroup() as tasks:
        readers = [tasks.create_task(collect(engine, (n, 1, 2), greedy(9))) for n in range(4)]
        results = await asyncio.gather(*readers)
        for outputs in results[:2]:
            assert_failed(outputs, "RuntimeError: the fake worker was told to fail in step 3")
        for n, outputs in enumerate(results[2:], 2):
            assert ids(outputs) == generate_alone((n, 1, 2), greedy(9))
        assert engine.health().alive
        assert engine.stats().num_failed_steps == 1
        await assert_sound(engine)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("thread", "fake:hang_on_step=3,hang_s=0.5,load_s=0.2", "step 3 took longer than 0.2 s"),
        ("process", "fake:hang_on_step=3", "step 3 took longer than 0.2 s"),
        ("process", "fake:die_on_step=3", "exited with code 13"),
    ],
)
@on_each_loop
async def test_a_dead_or_hung_worker_ends_who_ran_and_keeps_who_waited(
    kind: ExecutorKind, options: str, message: str
) -> None:
    async with opened(config(options, executor=kind, step_deadline_s=0.2, max_running=2)) as engine:
        async with asyncio.TaskGroup() as tasks:
            readers = [tasks.create_task(collect(engine, (n, 1, 2), greedy(9))) for n in range(4)]
            results = await asyncio.gather(*readers[:2])
            for outputs in results:
                assert_failed(outputs, message)
            health = engine.health()
            assert not health.alive
            assert message in (health.reason or "")
            latecomer = tasks.create_task(collect(engine, (50, 1), greedy(5)))
        for n, reader in enumerate(readers[2:], 2):
            assert ids(reader.result()) == generate_alone((n, 1, 2), greedy(9))
        assert ids(latecomer.result()) == generate_alone((50, 1), greedy(5))
        health = engine.health()
        assert (health.alive, health.reason, health.accepting, health.num_restarts) == (True, None, True, 1)
        stats = engine.stats()
        assert stats.num_finished[FinishReason.ERROR] == 2
        assert stats.num_finished[FinishReason.LENGTH] == 3
        await assert_sound(engine)


@on_each_executor
async def test_nothing_cached_before_a_restart_is_found_after_it(kind: ExecutorKind) -> None:
    options = config("fake:hang_on_step=4,hang_s=0.5", executor=kind, step_deadline_s=0.2)
    async with opened(options) as engine:
        await collect(engine, range(40), greedy(2))
        assert engine.stats().scheduler.num_cached_blocks > 0
        assert_failed(await collect(engine, (1, 2), greedy(2)), "step 4")
        outputs = await collect(engine, range(40), greedy(2))
        assert outputs[-1].num_cached_tokens == 0
        assert ids(outputs) == generate_alone(range(40), greedy(2))


@on_each_executor
@on_each_loop
async def test_a_second_death_is_final_for_everyone(kind: ExecutorKind) -> None:
    worker = f"{odd_workers.THIS}:load_exiting_worker"
    async with opened(config(executor=kind, max_running=1), worker=worker) as engine:
        async with asyncio.TaskGroup() as tasks:
            readers = [tasks.create_task(collect(engine, (n, 1), greedy(5))) for n in range(4)]
        for reader in readers:
            assert_failed(reader.result(), "SystemExit: no more")
        health = engine.health()
        assert (health.alive, health.accepting, health.num_restarts) == (False, False, 1)
        with pytest.raises(EngineFailed, match="SystemExit"):
            await collect(engine, (1,), greedy(1))
        assert (await engine.memory()).rss_bytes == 0


@on_each_executor
async def test_a_worker_that_cannot_be_loaded_again_is_final(kind: ExecutorKind, tmp_path: Path) -> None:
    options = config(str(tmp_path / "model"), executor=kind, max_running=1)
    async with opened(options, worker=f"{odd_workers.THIS}:load_worker_once") as engine:
        first, second = await asyncio.gather(
            collect(engine, (1, 2), greedy(5)), collect(engine, (1, 2), greedy(5))
        )
        assert_failed(first, "SystemExit: no more")
        assert_failed(second, "model: was deleted, on the restart after: ")
        assert "was deleted" in (engine.health().reason or "")
        with pytest.raises(EngineFailed):
            await collect(engine, (1,), greedy(1))


@on_each_loop
async def test_a_worker_killed_while_idle_is_replaced_before_anyone_asks() -> None:
    async with opened(config(executor="process")) as engine:
        await assert_sound(engine)
        (pid,) = children()
        os.kill(pid, signal.SIGKILL)
        await wait_for(lambda: not engine.health().alive)
        await wait_for(lambda: engine.health().alive)
        assert engine.health().num_restarts == 1
        await assert_sound(engine)
        assert engine.stats().num_finished[FinishReason.ERROR] == 0


@on_each_executor
async def test_a_request_dropped_in_a_hung_step_does_not_come_back(kind: ExecutorKind) -> None:
    options = config("fake:hang_on_step=2,hang_s=0.5", executor=kind, step_deadline_s=0.2)
    async with opened(options) as engine:
        async with engine.generate("a", (1, 2, 3), greedy(9)) as stream:
            await anext(stream)
        await wait_for(lambda: engine.health().num_restarts == 1)
        await assert_sound(engine)
        finished = engine.stats().num_finished
        assert (finished[FinishReason.ABORT], finished[FinishReason.ERROR]) == (1, 0)


@on_each_executor
async def test_an_engine_left_in_a_hung_step_or_a_restart_is_left_promptly(kind: ExecutorKind) -> None:
    options = config("fake:hang_on_step=1,hang_s=0.5,load_s=0.3", executor=kind, step_deadline_s=0.1)
    async with opened(options) as engine:
        assert_failed(await collect(engine, (1,), greedy(1)), "step 1")
        assert not engine.health().alive


class StuckExecutor:
    """Satisfies `Executor`; its one step never ends, and no deadline of its own stops it."""

    def __init__(self) -> None:
        self.failure: WorkerFailed | None = None

    async def start(self) -> WorkerInfo:
        return WorkerInfo(
            num_blocks=8,
            block_size=4,
            max_model_len=32,
            vocab_size=100,
            device="cpu",
            numerics="stable",
            architecture="stuck",
        )

    async def execute(self, plan: StepPlan) -> StepResult:
        await asyncio.Event().wait()
        raise AssertionError(plan)

    async def memory(self) -> WorkerMemory:
        return WorkerMemory()

    async def restart(self) -> WorkerInfo:
        return await self.start()

    async def close(self) -> None: ...


async def test_health_turns_red_while_a_step_overruns_its_deadline() -> None:
    executor: Executor = StuckExecutor()
    options = EngineConfig(checkpoint="", step_deadline_s=0.05)
    engine = Engine(options, executor, info=await executor.start(), wake=asyncio.Event())
    async with asyncio.TaskGroup() as tasks:
        loop = tasks.create_task(engine._run())
        async with engine.generate("a", (1,), greedy(1)):
            assert engine.health().alive
            await wait_for(lambda: not engine.health().alive)
            assert "a step has been running for" in (engine.health().reason or "")
        loop.cancel()


async def test_a_broken_promise_in_the_loop_ends_every_stream_and_the_scope() -> None:
    """A worker that answers for a request it was not asked about is a bug of ours: loud, and nobody hangs."""
    outputs: list[TokenOutput] = []

    async def read_to_the_end() -> None:
        worker = f"{odd_workers.THIS}:load_lying_worker"
        async with (
            Engine.open(config(), worker=worker) as engine,
            engine.generate("a", (1, 2), greedy(3)) as stream,
        ):
            try:
                await asyncio.Event().wait()
            finally:
                outputs.extend([output async for output in stream])

    with pytest.raises(ExceptionGroup) as raised:
        await read_to_the_end()
    assert raised.group_contains(AssertionError)
    assert_failed(outputs, "the engine has ended")


@on_each_executor
async def test_asking_for_memory_while_a_worker_is_loaded_anew_does_not_cost_the_restart(
    kind: ExecutorKind,
) -> None:
    """A load may take far longer than a step may; who asks meanwhile is told nothing, and harms nothing."""
    options = config("fake:hang_on_step=2,hang_s=0.5,load_s=1", executor=kind, step_deadline_s=0.2)
    async with opened(options) as engine, asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(collect(engine, (1, 2, 3), greedy(9)))
        await wait_for(lambda: not engine.health().alive)
        while not engine.health().alive:
            assert await engine.memory() == WorkerMemory()
            await asyncio.sleep(0.02)
        assert_failed(await reader, "took longer than 0.2 s")
        assert engine.health().num_restarts == 1
        assert await engine.memory() != WorkerMemory()
