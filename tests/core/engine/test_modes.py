"""Options that change who waits for whom, and where KV lies: told to the engine, seen in its numbers."""

import asyncio
from collections.abc import Iterator
from typing import get_args

import pytest

from core.config import ExecutorKind, KVReservation
from core.errors import ConfigError
from tests.core.engine.leftovers import nothing_left_behind
from tests.core.engine.running import assert_sound, collect, config, greedy, ids, opened
from tests.fakes.kv_worker import generate_alone


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    with nothing_left_behind():
        yield


@pytest.mark.parametrize("executor", get_args(ExecutorKind))
async def test_equal_prompts_that_arrive_together_are_computed_once(executor: ExecutorKind) -> None:
    prompt = tuple(range(70))
    async with opened(config(executor=executor)) as engine:
        results = await asyncio.gather(*(collect(engine, (*prompt, n), greedy(4)) for n in range(4)))
        stats = engine.stats().scheduler
        await assert_sound(engine)
    for n, outputs in enumerate(results):
        assert ids(outputs) == generate_alone((*prompt, n), greedy(4))
    assert stats.num_hit_tokens >= 3 * 68
    assert stats.num_computed_tokens == 4 * (71 + 3) - stats.num_hit_tokens


@pytest.mark.parametrize("executor", get_args(ExecutorKind))
async def test_rows_of_a_block_that_begins_alike_are_copied_by_the_worker(executor: ExecutorKind) -> None:
    async with opened(config(executor=executor)) as engine:
        await collect(engine, tuple(range(20)), greedy(2))
        outputs = await collect(engine, (*range(10), 90, 91), greedy(4))
        await assert_sound(engine)
    assert outputs[-1].num_cached_tokens == 10, "two blocks of four, and two rows of the third"
    assert ids(outputs) == generate_alone((*range(10), 90, 91), greedy(4))


@pytest.mark.parametrize(
    ("kind", "slots"),
    [("paged", {32, 36, 40, 44, 48, 52}), ("max", {128}), ("power_of_two", {32, 64}), ("oracle", {52})],
)
async def test_every_kind_of_reservation_gives_the_same_tokens_from_as_many_slots_as_it_says(
    kind: KVReservation, slots: set[int]
) -> None:
    """30 tokens of prompt and 20 of output, in blocks of 4."""
    options = config(kv_reservation=kind, prefix_cache=False, max_model_len=128)
    output_ids: list[int] = []
    async with opened(options) as engine:
        async with engine.generate("a", tuple(range(30)), greedy(20)) as stream:
            async for output in stream:
                output_ids += output.token_ids
                stats = engine.stats().scheduler
                assert stats.num_allocated_tokens in slots | {0}, "0: it has ended"
                assert stats.num_live_tokens <= stats.num_allocated_tokens
        await assert_sound(engine)
    assert output_ids == generate_alone(tuple(range(30)), greedy(20))


async def test_static_batching_and_whole_prompts_are_told_to_the_scheduler() -> None:
    options = config(batching="static", chunked_prefill=False)
    async with opened(options) as engine:
        prompts = [tuple(range(n, n + 50)) for n in range(3)]
        results = await asyncio.gather(*(collect(engine, prompt, greedy(5)) for prompt in prompts))
        steps = engine.steps_after(0)
        await assert_sound(engine)
    for prompt, outputs in zip(prompts, results, strict=True):
        assert ids(outputs) == generate_alone(prompt, greedy(5))
    assert max(step.num_prefill_tokens for step in steps) >= 50, "more than max_prefill_tokens"


@pytest.mark.parametrize("kind", ["max", "power_of_two", "oracle"])
async def test_reserved_kv_with_reuse_of_prefixes_is_refused_at_the_start(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_reservation is {kind}; .*set prefix_cache to false"):
        async with opened(config(kv_reservation=kind)):
            pass
