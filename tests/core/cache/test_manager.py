from array import array

import pytest

from core.cache.manager import KVCacheManager
from core.request import Request, SamplingParams


def request_for(token_ids: list[int], name: str = "r", namespace: bytes = b"a") -> Request:
    return Request(
        request_id=name,
        token_ids=array("i", token_ids),
        num_prompt_tokens=len(token_ids),
        sampling=SamplingParams(max_tokens=8, seed=0),
        namespace=namespace,
    )


def start(manager: KVCacheManager, request: Request) -> bool:
    """Attach what is cached and take room for the rest."""
    num_tokens = len(request.token_ids)
    if not manager.attach_prefix(request, room_for=num_tokens):
        return False
    grown = manager.try_grow(request, num_tokens - request.num_computed_tokens)
    manager.take_copies([request])
    return grown


def compute(manager: KVCacheManager, request: Request) -> None:
    """As if a step had computed all that is known."""
    request.num_computed_tokens = len(request.token_ids)
    manager.commit(request)


def cache(manager: KVCacheManager, token_ids: list[int], namespace: bytes = b"a") -> None:
    """Leave the full blocks of a prompt in the tree, held by nobody."""
    request = request_for(token_ids, "earlier", namespace)
    assert start(manager, request)
    compute(manager, request)
    manager.release(request)
    manager.check()


def test_the_second_request_for_a_prompt_starts_with_its_full_blocks():
    manager = KVCacheManager(8, 4)
    cache(manager, list(range(10)))
    request = request_for(list(range(10)))
    assert start(manager, request)
    manager.check([request])
    assert request.num_computed_tokens == request.num_cached_tokens == 8
    assert (manager.num_hit_tokens, manager.num_query_tokens) == (8, 20)


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(7, 6), (8, 7), (9, 8)])
def test_at_least_one_token_is_always_computed(num_tokens, num_cached):
    manager = KVCacheManager(8, 4)
    cache(manager, list(range(8)))
    request = request_for(list(range(num_tokens)))
    assert start(manager, request)
    assert request.num_computed_tokens == num_cached


def test_another_namespace_hits_nothing():
    manager = KVCacheManager(8, 4)
    cache(manager, list(range(8)))
    request = request_for(list(range(8)), namespace=b"b")
    assert start(manager, request)
    assert request.num_cached_tokens == 0


def test_without_a_prefix_cache_nothing_is_kept():
    manager = KVCacheManager(8, 4, prefix_cache=False)
    cache(manager, list(range(8)))
    assert (manager.num_free_blocks, manager.num_cached_blocks) == (8, 0)
    request = request_for(list(range(8)))
    assert start(manager, request)
    manager.check([request])
    assert request.num_cached_tokens == 0


def test_growing_evicts_what_nobody_holds():
    manager = KVCacheManager(4, 4)
    cache(manager, list(range(16)))
    assert (manager.num_free_blocks, manager.num_available_blocks) == (0, 4)
    request = request_for([9] * 9)
    assert start(manager, request)
    manager.check([request])
    assert (manager.num_free_blocks, manager.num_available_blocks, manager.num_held_blocks) == (0, 1, 3)


def test_growing_takes_all_or_nothing():
    manager = KVCacheManager(4, 4)
    request = request_for([1] * 8)
    assert start(manager, request)
    request.num_computed_tokens = 8
    assert not manager.try_grow(request, 9)
    manager.check([request])
    assert len(request.block_table) == 2
    assert manager.num_free_blocks == 2
    assert manager.try_grow(request, 8)


def test_a_prefix_that_would_leave_no_room_for_the_rest_is_not_attached():
    manager = KVCacheManager(4, 4)
    cache(manager, [1] * 8)
    holder = request_for([2] * 8, "holder")
    assert start(manager, holder)
    request = request_for([1] * 9 + [3] * 4)
    assert not manager.attach_prefix(request, room_for=17), (
        "two cached blocks and three more are five of four"
    )
    manager.check([holder])
    assert not request.block_table
    assert request.num_cached_tokens is None
    assert manager.attach_prefix(request, room_for=8)


def test_a_held_prefix_is_not_evicted():
    manager = KVCacheManager(3, 4)
    cache(manager, [1] * 8)
    request = request_for([1] * 9)
    assert start(manager, request)
    assert not manager.try_grow(request, 8)
    manager.check([request])


def test_what_two_requests_computed_twice_is_kept_once():
    manager = KVCacheManager(8, 4)
    first, second = request_for([1] * 8, "first"), request_for([1] * 8, "second")
    assert start(manager, first)
    assert start(manager, second)
    assert manager.num_held_blocks == 4
    compute(manager, first)
    compute(manager, second)
    manager.check([first, second])
    assert first.block_table == second.block_table
    assert manager.num_held_blocks == 2


def test_a_replaced_block_that_a_plan_in_flight_names_stays_until_the_plan_has_landed():
    manager = KVCacheManager(8, 4)
    first, second = request_for([1] * 8, "first"), request_for([1] * 8, "second")
    assert start(manager, first)
    assert start(manager, second)
    compute(manager, first)
    second.num_computed_tokens, second.num_scheduled_tokens = 4, 4
    manager.commit(second)
    manager.check([first, second])
    assert manager.num_held_blocks == 4, "the duplicate is still held"
    second.num_computed_tokens, second.num_scheduled_tokens = 8, 0
    manager.commit(second)
    manager.check([first, second])
    assert manager.num_held_blocks == 2


def test_releasing_with_tokens_in_flight_is_our_own_mistake():
    manager = KVCacheManager(8, 4)
    request = request_for([1] * 8)
    assert start(manager, request)
    request.num_scheduled_tokens = 8
    with pytest.raises(AssertionError, match="in flight"):
        manager.release(request)


def test_only_computed_tokens_are_committed():
    manager = KVCacheManager(8, 4)
    request = request_for([1] * 12)
    assert start(manager, request)
    request.num_computed_tokens, request.num_scheduled_tokens = 7, 5
    manager.commit(request)
    manager.check([request])
    assert manager.num_cached_blocks == 1


def test_a_request_cut_short_takes_its_last_blocks_out_of_the_tree():
    manager = KVCacheManager(8, 4)
    request = request_for(list(range(16)))
    assert start(manager, request)
    compute(manager, request)
    manager.release(request, num_kept_tokens=9)
    manager.check()
    assert (manager.num_cached_blocks, manager.num_free_blocks) == (2, 6)


def test_a_preempted_request_cut_short_takes_its_last_blocks_out_of_the_tree():
    manager = KVCacheManager(8, 4)
    cache(manager, list(range(16)))
    manager.forget_beyond(request_for(list(range(16))), 9)
    manager.check()
    assert (manager.num_cached_blocks, manager.num_free_blocks) == (2, 6)


def test_what_another_request_still_holds_stays_in_the_tree():
    manager = KVCacheManager(8, 4)
    request, other = request_for(list(range(12))), request_for(list(range(13)), "other")
    assert start(manager, request)
    compute(manager, request)
    assert start(manager, other)
    manager.release(request, num_kept_tokens=4)
    manager.check([other])
    assert manager.num_cached_blocks == 3


def test_a_cleared_cache_hits_nothing():
    manager = KVCacheManager(8, 4)
    cache(manager, list(range(16)))
    manager.clear()
    manager.check()
    assert (manager.num_cached_blocks, manager.num_free_blocks) == (0, 8)


def test_a_prompt_of_a_hundred_thousand_tokens_is_committed_in_chunks_and_found_whole():
    manager = KVCacheManager(6300, 16)
    prompt_ids = [n * 7919 % 50_000 for n in range(100_000)]
    request = request_for(prompt_ids, "long")
    assert start(manager, request)
    for num_computed in range(500, 100_001, 500):
        request.num_computed_tokens = num_computed
        manager.commit(request)
    manager.release(request)
    manager.check()
    again = request_for([*prompt_ids, 1])
    assert start(manager, again)
    assert again.num_cached_tokens == 100_000
