"""A prompt that parts from the tree inside a block gets the rows before that point as a copy."""

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.cache.manager import KVCacheManager
from core.cache.radix_tree import RadixTree
from core.request import Request, SamplingParams
from core.scheduler.plan import BlockCopy
from tests.core.cache.test_manager import cache, compute, request_for
from tests.properties.profiles import budget


def attach(manager: KVCacheManager, request: Request) -> tuple[BlockCopy, ...]:
    num_tokens = len(request.token_ids)
    assert manager.attach_prefix(request, room_for=num_tokens)
    assert manager.try_grow(request, num_tokens - request.num_computed_tokens)
    return manager.take_copies([request])


def test_the_rows_up_to_the_token_that_differs_are_copied_and_count_as_cached():
    manager = KVCacheManager(8, 4)
    cache(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    request = request_for([1, 2, 3, 4, 5, 6, 9, 9, 9])
    copies = attach(manager, request)
    manager.check([request])
    assert copies == (BlockCopy(source=1, target=request.block_table[1], num_tokens=2),)
    assert request.num_computed_tokens == request.num_cached_tokens == manager.num_hit_tokens == 6
    assert request.block_table[1] != 1, "the tree's own block is never written"


def test_a_copy_is_given_to_one_plan_and_to_the_one_that_names_its_request():
    manager = KVCacheManager(8, 4)
    cache(manager, [1, 2, 3, 4])
    request, other = request_for([1, 2, 9, 9, 9]), request_for([5] * 4, "other")
    assert manager.attach_prefix(request, room_for=5)
    assert manager.try_grow(request, 3)
    assert attach(manager, other) == ()
    assert len(manager.take_copies([other, request])) == 1
    assert manager.take_copies([other, request]) == ()


def test_the_likest_of_all_sisters_is_copied_from():
    manager = KVCacheManager(16, 4)
    for sister in ([1, 2, 8, 8], [1, 2, 3, 8], [1, 9, 3, 4]):
        cache(manager, sister)
    request = request_for([1, 2, 3, 4, 5])
    (copy,) = attach(manager, request)
    assert (copy.source, copy.num_tokens) == (1, 3)


@pytest.mark.parametrize("length", [2, 3, 4])
def test_of_a_prompt_that_ends_inside_a_cached_block_all_but_the_last_token_is_copied(length):
    manager = KVCacheManager(8, 4)
    cache(manager, [1, 2, 3, 4])
    request = request_for([1, 2, 3, 4][:length])
    (copy,) = attach(manager, request)
    assert copy.num_tokens == request.num_computed_tokens == length - 1


def test_nothing_is_copied_where_not_one_token_is_common():
    manager = KVCacheManager(8, 4)
    cache(manager, [1, 2, 3, 4])
    assert attach(manager, request_for([2, 2, 3, 4, 5])) == ()


def test_nothing_is_copied_from_another_namespace_nor_where_the_prompt_must_be_computed():
    manager = KVCacheManager(16, 4)
    cache(manager, [1, 2, 3, 4])
    assert attach(manager, request_for([1, 2, 3, 9, 9], namespace=b"b")) == ()
    scored = request_for([1, 2, 3, 9, 9], "scored")
    scored.sampling = SamplingParams(max_tokens=8, seed=0, prompt_logprobs=0)
    assert attach(manager, scored) == ()
    assert scored.num_computed_tokens == 0


def test_nothing_is_copied_without_a_prefix_cache():
    manager = KVCacheManager(8, 4, prefix_cache=False)
    cache(manager, [1, 2, 3, 4])
    assert attach(manager, request_for([1, 2, 3, 9, 9])) == ()


def test_the_source_is_neither_evicted_nor_reused_before_the_plan_has_landed():
    manager = KVCacheManager(3, 4)
    cache(manager, [1, 2, 3, 4])
    request = request_for([1, 2, 9, 9])
    (copy,) = attach(manager, request)
    request.num_scheduled_tokens = 2
    late = request_for([7] * 5, "late")
    assert not manager.attach_prefix(late, room_for=5), "two blocks of three are in the plan"
    manager.check([request])
    request.num_computed_tokens, request.num_scheduled_tokens = 4, 0
    manager.commit(request)
    manager.check([request])
    assert manager.attach_prefix(late, room_for=5)
    assert manager.try_grow(late, 5)
    manager.check([request, late])
    assert copy.source in late.block_table


def test_where_the_source_would_take_the_last_room_the_request_goes_without_a_copy():
    manager = KVCacheManager(2, 4)
    cache(manager, [1, 2, 3, 4])
    request = request_for([1, 2, 9, 9, 9])
    assert attach(manager, request) == ()
    manager.check([request])
    assert request.num_computed_tokens == 0


def test_a_request_that_ends_before_its_plan_gives_the_source_back():
    manager = KVCacheManager(4, 4)
    cache(manager, [1, 2, 3, 4])
    request = request_for([1, 2, 9, 9])
    assert manager.attach_prefix(request, room_for=4)
    manager.release(request)
    manager.check()
    assert manager.take_copies([]) == ()
    assert manager.num_available_blocks == 4


def test_a_block_of_a_long_edge_is_held_without_the_rest_of_it():
    manager = KVCacheManager(8, 4)
    cache(manager, [1, 2, 3, 4] + [5] * 16)
    request = request_for([1, 2, 9, 9])
    attach(manager, request)
    manager.check([request])
    assert manager.num_held_blocks == 2


def test_a_plan_that_lands_without_its_copies_is_our_own_mistake():
    manager = KVCacheManager(8, 4)
    cache(manager, [1, 2, 3, 4])
    request = request_for([1, 2, 9, 9])
    assert manager.attach_prefix(request, room_for=4)
    assert manager.try_grow(request, 2)
    with pytest.raises(AssertionError, match="without the copies"):
        compute(manager, request)


@budget(examples=200)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_tree_knows_to_the_token_how_much_is_cached(seed: int) -> None:
    """Against a comparison with everything that was put in; some of it was evicted again."""
    choose = random.Random(seed)
    block_size = choose.choice((1, 2, 5))
    tree = RadixTree(block_size)
    kept: list[list[int]] = []
    next_block_id = 0
    for _ in range(12):
        num_blocks = choose.randrange(1, 5)
        token_ids = [choose.choice((0, 1, 300)) for _ in range(num_blocks * block_size)]
        tree.insert(b"a", array("i", token_ids), range(next_block_id, next_block_id + num_blocks))
        next_block_id += num_blocks
        kept.append(token_ids)
    tree.evict(choose.randrange(tree.num_evictable))
    tree.check()
    kept = [token_ids[: tree.match(b"a", array("i", token_ids))[2]] for token_ids in kept]
    for _ in range(20):
        asked = [choose.choice((0, 1, 300)) for _ in range(choose.randrange(5 * block_size))]
        longest = max(_num_common(asked, token_ids) for token_ids in kept)
        assert tree.match_length(b"a", array("i", asked)) == longest
        node, _, num_tokens = tree.match(b"a", array("i", asked))
        _, num_more = tree.nearest(node, array("i", asked[num_tokens : num_tokens + block_size]))
        assert num_tokens + num_more == longest
        tree.check()


def _num_common(some: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(some, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(some), len(other)))
