"""What streams give besides tokens, siblings, and embeddings, over both executors."""

import asyncio
from collections.abc import Iterator
from typing import get_args

import pytest

from core import EngineDraining, RequestTooLong, SamplingParams
from core.config import ExecutorKind
from core.errors import StepFailed
from tests.core.engine.leftovers import nothing_left_behind
from tests.core.engine.running import assert_sound, collect, config, greedy, ids, opened, wait_for
from tests.fakes.kv_worker import generate_alone, pool_alone, score_alone

on_each_executor = pytest.mark.parametrize("kind", get_args(ExecutorKind))


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    with nothing_left_behind():
        yield


@on_each_executor
async def test_log_probabilities_arrive_with_their_tokens_and_the_prompts_first(kind: ExecutorKind) -> None:
    sampling = SamplingParams(max_tokens=9, temperature=0.0, num_logprobs=2, prompt_logprobs=1)
    prompt = tuple(range(70))
    async with opened(config(executor=kind)) as engine:
        outputs = await collect(engine, prompt, sampling)
        assert list(outputs[0].prompt_logprobs) == score_alone(prompt, 1)
        assert not any(output.prompt_logprobs for output in outputs[1:])
        for output in outputs:
            assert [each.token_id for each in output.logprobs] == list(output.token_ids)
            assert all(len(each.top) == 2 for each in output.logprobs)
        await assert_sound(engine)


@on_each_executor
async def test_siblings_share_the_prompt_that_the_first_computes(kind: ExecutorKind) -> None:
    prompt = tuple(range(70))
    async with opened(config(executor=kind)) as engine:
        async with (
            engine.generate("a", prompt, greedy(5)) as leader,
            engine.generate("b", prompt, greedy(6)) as second,
            engine.generate("c", prompt, greedy(7)) as third,
        ):
            for stream, max_tokens in ((third, 7), (second, 6), (leader, 5)):
                outputs = [output async for output in stream]
                assert ids(outputs) == generate_alone(prompt, greedy(max_tokens))
                assert outputs[-1].num_cached_tokens >= (0 if stream is leader else 68)
        await assert_sound(engine)


async def test_a_sibling_goes_on_when_the_first_leaves() -> None:
    prompt = tuple(range(70))
    async with opened(config()) as engine:
        async with engine.generate("a", prompt, greedy(5)):
            second = engine.generate("b", prompt, greedy(6))
            await second.__aenter__()
        assert ids([output async for output in second]) == generate_alone(prompt, greedy(6))
        await second.__aexit__(None, None, None)
        await assert_sound(engine)


@on_each_executor
async def test_an_embedding_is_the_mean_over_the_tokens(kind: ExecutorKind) -> None:
    prompt = tuple(range(70))
    expected = [memoryview(pool_alone(prompt)).cast("d")[0] / 70]
    async with opened(config(executor=kind)) as engine:
        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(collect(engine, (n, 2, 3), greedy(9))) for n in range(3)]
            embeddings = [tasks.create_task(engine.embed("e", prompt)) for _ in range(3)]
        assert [task.result() for task in embeddings] == [expected] * 3
        assert [ids(task.result()) for task in others] == [
            generate_alone((n, 2, 3), greedy(9)) for n in range(3)
        ]
        await assert_sound(engine)


async def test_an_embedding_is_refused_aborted_and_failed_like_any_request() -> None:
    async with opened(config("fake:raise_on_step=1,step_s=0.02")) as engine:
        with pytest.raises(StepFailed, match="told to fail in step 1"):
            await engine.embed("e", (1, 2, 3))
        with pytest.raises(RequestTooLong):
            await engine.embed("e", (1,) * 257)
        task = asyncio.ensure_future(engine.embed("e", (1,) * 200))
        await wait_for(lambda: engine.health().num_running > 0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await assert_sound(engine)
        await engine.drain(1.0)
        with pytest.raises(EngineDraining):
            await engine.embed("e", (1, 2, 3))
