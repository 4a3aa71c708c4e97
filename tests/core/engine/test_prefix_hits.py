"""What was found in the cache gives the tokens that a cold engine gives, wherever the prefix ends."""

import pytest

from core.config import EngineConfig
from tests.core.engine.running import collect, config, greedy, ids, opened
from tests.fakes.kv_worker import generate_alone

BLOCK_SIZE = 4


def small() -> EngineConfig:
    return config(block_size=BLOCK_SIZE)


@pytest.mark.parametrize("length", range(1, 3 * BLOCK_SIZE + 2))
async def test_a_prompt_asked_twice_gives_the_same_at_every_length_around_a_block_border(length: int) -> None:
    prompt = tuple(range(1, length + 1))
    async with opened(small()) as engine:
        cold = await collect(engine, prompt, greedy(9))
        warm = await collect(engine, prompt, greedy(9))
    assert ids(cold) == ids(warm) == generate_alone(prompt, greedy(9))
    assert warm[-1].num_cached_tokens == length - 1, "the last token is computed anew"


@pytest.mark.parametrize("common", range(1, 2 * BLOCK_SIZE + 2))
async def test_prompts_that_part_at_any_place_are_told_apart(common: int) -> None:
    stem = tuple(range(1, common + 1))
    one, other = stem + (50, 51, 52, 53, 54), stem + (60, 61, 62, 63, 64)
    async with opened(small()) as engine:
        await collect(engine, one, greedy(3))
        outputs = await collect(engine, other, greedy(9))
    assert ids(outputs) == generate_alone(other, greedy(9))
    assert outputs[-1].num_cached_tokens == common, "what a block has in common is copied"


@pytest.mark.parametrize("num_kept", range(2 * BLOCK_SIZE + 1))
async def test_after_an_answer_cut_by_a_stop_string_the_next_turn_is_as_if_nothing_had_been_cached(
    num_kept: int,
) -> None:
    prompt = (1, 2, 3, 4, 5)
    whole = generate_alone(prompt, greedy(12))
    async with opened(small()) as engine:
        async with engine.generate("cut", prompt, greedy(12)) as stream:
            num_seen = 0
            async for output in stream:
                num_seen += len(output.token_ids)
                if num_seen >= num_kept:
                    stream.finish(num_kept)
        for next_turn in (
            (*prompt, *whole[:num_kept], 70, 71, 72, 73, 74),  # goes on from what was shown
            (*prompt, *whole[:12], 80, 81),  # goes on from what was cut off
        ):
            assert ids(await collect(engine, next_turn, greedy(6))) == generate_alone(next_turn, greedy(6))
