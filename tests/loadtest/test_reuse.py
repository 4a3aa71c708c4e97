"""Reuse distances: against an LRU cache that is played block by block."""

import random
from collections import OrderedDict

import pytest

from loadtest.reuse import reuse_of
from loadtest.traces import Parts


def random_prompts(seed: int) -> list[Parts]:
    """Sessions that grow, part and share beginnings; parts of odd sizes."""
    generator = random.Random(seed)
    sizes: dict[str, int] = {}
    prompts: list[Parts] = []
    for _ in range(30):
        base = generator.choice(prompts) if prompts and generator.random() < 0.7 else ()
        kept = base[: generator.randint(0, len(base))]
        new = [generator.choice("abcdefgh") for _ in range(generator.randint(0 if kept else 1, 4))]
        prompts.append((*kept, *((name, sizes.setdefault(name, generator.randint(1, 9))) for name in new)))
    return prompts


def blocks_of(parts: Parts, block_tokens: int) -> list[tuple[object, ...]]:
    """Whole blocks, each named by all tokens up to its end."""
    tokens = [(index, name, n) for index, (name, size) in enumerate(parts) for n in range(size)]
    return [tuple(tokens[:end]) for end in range(block_tokens, len(tokens) + 1, block_tokens)]


def played(prompts: list[Parts], *, block_tokens: int, capacity: int) -> int:
    """Blocks that an LRU cache hits; it grows while a request is looked up, and is cut back after it."""
    cache: OrderedDict[object, None] = OrderedDict()
    hits = 0
    for parts in prompts:
        blocks = blocks_of(parts, block_tokens)
        known = 0
        while known < len(blocks) and blocks[known] in cache:
            known += 1
        hits += known
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("block_tokens", [1, 4])
def test_the_curve_is_what_an_lru_cache_of_each_size_hits(seed: int, block_tokens: int) -> None:
    prompts = random_prompts(seed)
    reuse = reuse_of(prompts, range(len(prompts)), block_tokens=block_tokens)
    total = sum(tokens for parts in prompts for _, tokens in parts)
    assert reuse.num_prompt_tokens == total
    for capacity in (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, reuse.num_blocks):
        expected = played(prompts, block_tokens=block_tokens, capacity=capacity) * block_tokens / total
        assert reuse.hit(capacity) == pytest.approx(expected), capacity
    assert reuse.hit(reuse.num_blocks) == pytest.approx(reuse.ideal)
    distinct = {block for parts in prompts for block in blocks_of(parts, block_tokens)}
    assert reuse.num_blocks == len(distinct)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("share", [0.3, 0.9, 1.0])
def test_the_smallest_cache_for_a_share_is_the_smallest(seed: int, share: float) -> None:
    prompts = random_prompts(seed)
    reuse = reuse_of(prompts, range(len(prompts)), block_tokens=2)
    capacity = reuse.capacity_for(share)
    goal = share * reuse.ideal
    assert reuse.hit(capacity) >= goal - 1e-9
    assert capacity == 0 or reuse.hit(capacity - 1) < goal


def test_what_is_held_is_what_was_used_and_will_be_again() -> None:
    prompts: list[Parts] = [(("a", 8), ("b", 4)), (("c", 8),), (("a", 8), ("d", 4)), (("c", 8),)]
    reuse = reuse_of(prompts, [0.0, 1.0, 5.0, 7.0], block_tokens=4)
    # a's two blocks from 0 to 5, c's from 1 to 7: 2, then 4, then 2 again.
    assert list(zip(reuse.held_blocks.tolist(), reuse.held_s.tolist(), strict=True)) == [
        (2, 1.0), (4, 4.0), (2, 2.0)
    ]  # fmt: skip


def test_nothing_that_comes_back_is_held_by_nobody() -> None:
    reuse = reuse_of([(("a", 8),), (("b", 8),)], [0.0, 1.0], block_tokens=4)
    assert reuse.ideal == 0.0
    assert reuse.capacity_for(0.9) == 0
    assert reuse.held_blocks.max() == 0
    assert reuse.num_blocks == 4


def test_prompts_shorter_than_a_block_own_none() -> None:
    reuse = reuse_of([(("a", 3),), (("a", 3),), ()], [0.0, 1.0, 2.0], block_tokens=4)
    assert (reuse.num_blocks, reuse.ideal) == (0, 0.0)
    assert reuse.hit(10) == 0.0
