"""The engine over both executors: what every request gets, and what leaving a stream gives back."""

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import get_args

import pytest

import core
from core import (
    CheckpointError,
    ConfigError,
    Engine,
    EngineDraining,
    FinishReason,
    RequestTooLong,
    SamplingParams,
)
from core.config import ExecutorKind
from core.engine.engine import cache_namespace
from tests.core.engine.leftovers import nothing_left_behind
from tests.core.engine.loops import on_each_loop
from tests.core.engine.running import assert_sound, collect, config, greedy, ids, opened, wait_for
from tests.fakes.kv_worker import generate_alone

on_each_executor = pytest.mark.parametrize("kind", get_args(ExecutorKind))


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    with nothing_left_behind():
        yield


@on_each_executor
@on_each_loop
async def test_many_at_once_get_what_each_gets_alone(kind: ExecutorKind) -> None:
    rng = random.Random(7)
    shared = [rng.randrange(100) for _ in range(20)]
    prompts = [
        (shared if n % 3 else []) + [rng.randrange(100) for _ in range(rng.randint(1, 60))] for n in range(32)
    ]
    samplings = [
        SamplingParams(max_tokens=rng.randint(1, 40), temperature=n % 2, seed=n, stop_token_ids=(n % 100,))
        for n in range(32)
    ]
    async with opened(config(executor=kind)) as engine:
        async with asyncio.TaskGroup() as tasks:
            both = zip(prompts, samplings, strict=True)
            running = [tasks.create_task(collect(engine, prompt, sampling)) for prompt, sampling in both]
        for task, prompt, sampling in zip(running, prompts, samplings, strict=True):
            outputs = task.result()
            expected = generate_alone(prompt, sampling)
            assert ids(outputs) == expected
            stopped = expected[-1] in sampling.stop_token_ids
            assert outputs[-1].finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        stats = engine.stats()
        assert stats.scheduler.num_preemptions > 0, "the pool was too large to test anything"
        assert stats.scheduler.num_hit_tokens > 0
        assert sum(stats.num_finished.values()) == stats.num_requests == 32
        await assert_sound(engine)


@on_each_executor
@on_each_loop
async def test_leaving_after_any_number_of_outputs_frees_the_blocks(kind: ExecutorKind) -> None:
    async with opened(config(executor=kind)) as engine:
        for num_outputs in range(8):
            async with engine.generate("a", range(50), greedy(20)) as stream:
                for _ in range(num_outputs):
                    await anext(stream)
            engine._scheduler.check()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            await assert_sound(engine)
        assert engine.stats().num_finished[FinishReason.ABORT] == 8


@on_each_executor
@on_each_loop
async def test_a_reader_cancelled_at_any_await_leaves_a_sound_engine(kind: ExecutorKind) -> None:
    async with opened(config("fake:step_s=0.0005", executor=kind)) as engine:
        for num_rounds in range(60):
            async with asyncio.TaskGroup() as tasks:
                others = [tasks.create_task(collect(engine, (n, 2, 3), greedy(4))) for n in range(3)]
                reader = tasks.create_task(collect(engine, range(50), greedy(10)))
                for _ in range(num_rounds):
                    await asyncio.sleep(0)
                reader.cancel()
            for n, other in enumerate(others):
                assert ids(other.result()) == generate_alone((n, 2, 3), greedy(4))
            engine._scheduler.check()
        await assert_sound(engine)


@on_each_executor
async def test_everyone_leaving_at_once_is_survived(kind: ExecutorKind) -> None:
    async with opened(config(executor=kind)) as engine:
        readers = [asyncio.ensure_future(collect(engine, (n % 100, 1), greedy(100))) for n in range(200)]
        await wait_for(lambda: engine.stats().num_output_tokens > 20)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        await assert_sound(engine)


async def test_what_could_never_fit_is_refused_before_it_is_queued() -> None:
    async with opened(config(num_blocks=8, max_model_len=1000)) as engine:
        with pytest.raises(RequestTooLong, match="KV cache is 32"):
            await collect(engine, range(20), greedy(13))
        assert engine.stats().num_requests == 0
        assert len(ids(await collect(engine, range(20), greedy(12)))) == 12


async def test_token_ids_outside_the_vocabulary_harm_only_their_sender() -> None:
    async with opened(config()) as engine:
        for prompt in ((), (100,), (-1,)):
            with pytest.raises(AssertionError):
                await collect(engine, prompt, greedy(1))
        await assert_sound(engine)


async def test_two_requests_of_one_name_are_two_requests() -> None:
    async with opened(config()) as engine, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(collect(engine, (1, 2), greedy(20), request_id="twin"))
        second = tasks.create_task(collect(engine, (3, 4), greedy(20), request_id="twin"))
    assert ids(first.result()) == generate_alone((1, 2), greedy(20))
    assert ids(second.result()) == generate_alone((3, 4), greedy(20))
    assert {output.request_id for output in first.result() + second.result()} == {"twin"}


async def test_a_slow_reader_finds_everything_in_one_output() -> None:
    async with opened(config()) as engine, engine.generate("a", (1, 2, 3), greedy(30)) as stream:
        await wait_for(lambda: engine.stats().num_finished[FinishReason.LENGTH] == 1)
        outputs = [output async for output in stream]
    (output,) = outputs
    assert list(output.token_ids) == generate_alone((1, 2, 3), greedy(30))
    assert output.finish_reason is FinishReason.LENGTH


async def test_a_stop_string_ends_a_request_after_the_tokens_that_count() -> None:
    async with opened(config()) as engine:
        async with engine.generate("a", (1, 2, 3), greedy(50)) as stream:
            num_tokens = 0
            async for output in stream:
                num_tokens += len(output.token_ids)
                if num_tokens >= 5:
                    stream.finish(5)
                    stream.finish(5)
        stats = engine.stats()
        assert stats.num_finished == {**dict.fromkeys(FinishReason, 0), FinishReason.STOP: 1}
        assert stats.scheduler.num_output_tokens == 5
        await assert_sound(engine)


async def test_a_seed_decides_the_output_and_without_one_it_differs() -> None:
    def sampling(seed: int | None) -> SamplingParams:
        return SamplingParams(max_tokens=20, temperature=1.0, seed=seed)

    async with opened(config()) as engine:
        fixed = [ids(await collect(engine, (1, 2), sampling(5))) for _ in range(2)]
        free = [ids(await collect(engine, (1, 2), sampling(None))) for _ in range(2)]
        assert fixed[0] == fixed[1]
        assert free[0] != free[1]
        for seed in (-1, 2**70):
            assert len(ids(await collect(engine, (1, 2), sampling(seed)))) == 20


async def test_only_callers_of_one_namespace_share_a_prefix() -> None:
    async with opened(config()) as engine:
        cached = [
            (await collect(engine, range(40), greedy(2), namespace=namespace))[-1].num_cached_tokens
            for namespace in (b"tenant a", b"tenant b", b"tenant a")
        ]
    assert cached == [0, 0, 39]


def test_namespaces_are_told_apart_wherever_they_are_cut() -> None:
    pairs = [(b"ab", b"c"), (b"a", b"bc"), (b"abc", b""), (b"", b"abc")]
    assert len({cache_namespace(worker, caller) for worker, caller in pairs}) == len(pairs)


@on_each_executor
async def test_draining_refuses_newcomers_and_lets_the_others_end(kind: ExecutorKind) -> None:
    async with opened(config(executor=kind)) as engine, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(collect(engine, (1, 2), greedy(50)))
        await wait_for(lambda: engine.stats().num_output_tokens > 0)
        drain = tasks.create_task(engine.drain(30.0))
        await asyncio.sleep(0)
        assert not engine.health().accepting
        assert engine.health().alive
        with pytest.raises(EngineDraining):
            await collect(engine, (1, 2), greedy(1))
        await drain
        assert ids(await running) == generate_alone((1, 2), greedy(50))


@on_each_executor
async def test_what_still_runs_at_the_drain_deadline_ends_with_an_error(kind: ExecutorKind) -> None:
    async with opened(config("fake:step_s=0.01", executor=kind)) as engine, asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(collect(engine, (n, 2), greedy(200))) for n in range(12)]
        await wait_for(lambda: engine.stats().num_output_tokens > 0)
        await engine.drain(0.05)
        for reader in running:
            last = (await reader)[-1]
            assert last.finish_reason is FinishReason.ERROR
            assert "shut down" in (last.error or "")
        stats = engine.stats()
        assert stats.num_finished[FinishReason.ERROR] == 12


@on_each_executor
async def test_leaving_the_engine_ends_open_streams_with_an_error(kind: ExecutorKind) -> None:
    async with opened(config("fake:step_s=0.01", executor=kind)) as engine:
        readers = [engine.generate("a", (n, 1), greedy(200)) for n in range(3)]
        for stream in readers:
            await stream.__aenter__()
        await anext(readers[0])
    for stream in readers:
        last = [output async for output in stream][-1]
        assert last.finish_reason is FinishReason.ERROR
        await stream.__aexit__(None, None, None)
    assert not engine.health().alive
    with pytest.raises(EngineDraining):
        await collect(engine, (1,), greedy(1))


@on_each_executor
async def test_an_error_in_the_scope_comes_out_as_itself(kind: ExecutorKind) -> None:
    with pytest.raises(ZeroDivisionError):
        async with opened(config(executor=kind)):
            raise ZeroDivisionError


@on_each_executor
async def test_a_cancelled_scope_is_cancelled_and_cleaned_up(kind: ExecutorKind) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5), opened(config(executor=kind)):
            await asyncio.sleep(600)


@on_each_executor
async def test_a_refused_model_or_option_comes_out_as_itself(kind: ExecutorKind) -> None:
    with pytest.raises(CheckpointError, match="an option of the fake worker"):
        async with opened(config("fake:nonsense=1", executor=kind)):
            pass
    with pytest.raises(ConfigError, match="block_size is 999"):
        async with opened(config(executor=kind, block_size=999)):
            pass


@on_each_executor
async def test_steps_are_accounted_for(kind: ExecutorKind) -> None:
    async with opened(config(executor=kind)) as engine:
        await collect(engine, range(70), greedy(5))
        steps = engine.steps_after(0)
        assert [step.num_prefill_tokens for step in steps] == [32, 32, 6, 0, 0, 0, 0]
        assert [step.num_decode_tokens for step in steps] == [0, 0, 0, 1, 1, 1, 1]
        assert [step.num_output_tokens for step in steps] == [0, 0, 1, 1, 1, 1, 1]
        assert engine.steps_after(steps[-2].step_id) == steps[-1:]
        assert all(step.execute_s > 0 and step.schedule_s > 0 and step.deliver_s > 0 for step in steps)
        stats = engine.stats()
        assert (stats.num_steps, stats.num_prefill_tokens, stats.num_decode_tokens) == (7, 70, 4)
        assert (await engine.memory()).anonymous_bytes > 0
        health = engine.health()
        assert health.alive
        assert health.last_step_age_s is not None


def test_importing_core_or_running_a_worker_process_brings_no_torch_here() -> None:
    script = """
import asyncio, sys
from core import Engine, EngineConfig

async def main():
    config = EngineConfig(checkpoint="fake:", executor="process", num_blocks=8)
    async with Engine.open(config, worker="tests.fakes.kv_worker:load_worker") as engine:
        print(engine.info.architecture)

asyncio.run(main())
assert "torch" not in sys.modules
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout == "fake\n"


def test_the_public_names_are_few_sorted_and_there() -> None:
    assert len(core.__all__) <= 15
    assert list(core.__all__) == sorted(core.__all__)
    assert all(hasattr(core, name) for name in core.__all__)
    assert core.Engine is Engine
