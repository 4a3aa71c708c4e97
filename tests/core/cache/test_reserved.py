"""KV in contiguous runs, as before paging: how long runs are, where they fit, and what they waste."""

import random

import pytest

from core.cache.kinds import RESERVATIONS, make_manager
from core.cache.reserved import Lengths, ReservedManager, RunPool, reserve_power_of_two
from core.config import KVReservation
from core.request import Request
from tests.core.cache.test_manager import request_for

LIMIT = 64


def reserved(kind: KVReservation, num_blocks: int = 32, block_size: int = 4) -> ReservedManager:
    manager = make_manager(kind, num_blocks, block_size, prefix_cache=False, max_request_tokens=LIMIT)
    assert isinstance(manager, ReservedManager)
    return manager


def admit(manager: ReservedManager, request: Request) -> bool:
    if not manager.attach_prefix(request, room_for=len(request.token_ids) + 4):
        return False
    assert manager.try_grow(request, len(request.token_ids))
    return True


def compute(manager: ReservedManager, request: Request) -> None:
    request.num_computed_tokens = len(request.token_ids)
    manager.commit(request)


def test_the_first_run_that_is_long_enough_is_taken_and_neighbours_become_one_again():
    pool = RunPool(10)
    first, second, third = pool.allocate(3), pool.allocate(2), pool.allocate(3)
    assert (first, second, third, pool.num_free, pool.largest) == (0, 3, 5, 2, 2)
    pool.release(3, 2)
    assert (pool.num_free, pool.largest) == (4, 2), "free, but in two pieces"
    assert pool.allocate(3) is None
    pool.release(5, 3)
    pool.check()
    assert pool.largest == 7
    assert pool.allocate(7) == 3


def test_a_run_grows_in_place_only_into_free_blocks_right_behind_it():
    pool = RunPool(8)
    assert (pool.allocate(2), pool.allocate(2)) == (0, 2)
    assert not pool.extend(2, 1)
    assert not pool.extend(4, 5)
    assert pool.extend(4, 3)
    pool.check()
    assert (pool.num_free, pool.largest) == (1, 1)


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_taking_and_giving_back_loses_no_block(seed):
    choose = random.Random(seed)
    pool = RunPool(40)
    runs: list[list[int]] = []
    for _ in range(120):
        if runs and choose.random() < 0.45:
            pool.release(*runs.pop(choose.randrange(len(runs))))
        elif runs and choose.random() < 0.3:
            run = choose.choice(runs)
            if pool.extend(run[0] + run[1], 1):
                run[1] += 1
        else:
            count = choose.randint(1, 9)
            largest, first = pool.largest, pool.allocate(count)
            assert (first is not None) == (count <= largest)
            if first is not None:
                runs.append([first, count])
        pool.check()
        taken = [block for first, count in runs for block in range(first, first + count)]
        assert len(taken) == len(set(taken)) == 40 - pool.num_free
    for first, count in runs:
        pool.release(first, count)
    assert pool.largest == 40


@pytest.mark.parametrize(("kind", "num_blocks"), [("max", 16), ("power_of_two", 4), ("oracle", 5)])
def test_a_run_is_as_long_as_its_kind_says(kind, num_blocks):
    manager = reserved(kind)
    request = request_for(list(range(10)))  # and 8 more may come: 18 tokens
    assert admit(manager, request)
    manager.check([request])
    assert list(request.block_table) == list(range(num_blocks))
    assert manager.num_held_blocks == num_blocks


@pytest.mark.parametrize(
    ("needed", "reserved_tokens"), [(1, 1), (2, 2), (3, 4), (33, 64), (64, 64), (65, 100)]
)
def test_the_next_power_of_two_is_cut_at_the_longest_a_request_can_become(needed, reserved_tokens):
    assert reserve_power_of_two(Lengths(needed, 100, 100)) == reserved_tokens


def test_waste_is_the_share_of_reserved_slots_that_hold_nothing():
    manager = reserved("max")
    request = request_for(list(range(16)))
    assert admit(manager, request)
    assert manager.usage().waste == 1.0
    compute(manager, request)
    usage = manager.usage()
    assert (usage.num_live_tokens, usage.num_allocated_tokens, usage.waste) == (16, LIMIT, 0.75)
    manager.release(request)
    manager.check()
    assert (manager.usage().num_allocated_tokens, manager.usage().waste) == (0, 0.0)


def test_a_full_power_of_two_is_doubled_in_place_where_the_blocks_behind_it_are_free():
    manager = reserved("power_of_two")
    request = request_for([1] * 15)
    assert admit(manager, request)
    compute(manager, request)
    request.token_ids.extend([2, 3])
    assert manager.try_grow(request, 2)
    manager.check([request])
    assert list(request.block_table) == list(range(8))
    assert manager.take_copies([request]) == ()


def test_a_full_power_of_two_moves_with_all_its_rows_where_somebody_stands_behind_it():
    manager = reserved("power_of_two")
    request, other = request_for([1] * 15), request_for([2] * 3, "other")
    assert admit(manager, request)
    assert admit(manager, other)
    compute(manager, request)
    request.token_ids.extend([2, 3])
    assert manager.try_grow(request, 2)
    manager.check([request, other])
    assert list(request.block_table) == list(range(5, 13))
    copies = manager.take_copies([request, other])
    assert [(copy.source, copy.target, copy.num_tokens) for copy in copies] == [
        (0, 5, 4), (1, 6, 4), (2, 7, 4), (3, 8, 3),
    ]  # fmt: skip
    assert manager.take_copies([request, other]) == (), "given once"
    request.num_scheduled_tokens = 2
    assert manager.num_held_blocks == 4 + 1 + 8, "the plan in flight still reads the old run"
    request.num_computed_tokens, request.num_scheduled_tokens = 17, 0
    manager.commit(request)
    manager.check([request, other])
    assert manager.num_held_blocks == 1 + 8


def test_room_in_pieces_is_no_room():
    manager = reserved("oracle", num_blocks=10)
    requests = [request_for([n] * 2, f"r{n}") for n in range(3)]  # 10 tokens each: 3 blocks
    for request in requests:
        assert admit(manager, request)
    manager.release(requests[1])
    late = request_for([9] * 5, "late")
    assert manager.num_free_blocks == 4
    assert not admit(manager, late), "13 tokens are 4 blocks in a row"
    manager.check([requests[0], requests[2]])
    assert late.num_cached_tokens is None
    manager.release(requests[2])
    assert admit(manager, late)


def test_nothing_is_shared_in_a_reserved_pool():
    manager = reserved("oracle")
    first, second = request_for([1] * 8, "first"), request_for([1] * 8, "second")
    assert admit(manager, first)
    compute(manager, first)
    assert admit(manager, second)
    assert (second.num_computed_tokens, manager.num_hit_tokens, manager.num_query_tokens) == (0, 0, 16)
    assert not set(first.block_table) & set(second.block_table)
    assert manager.match_length(second) == 0


@pytest.mark.parametrize("kind", RESERVATIONS)
def test_reuse_of_prefixes_is_not_to_be_had_with_reserved_kv(kind):
    with pytest.raises(AssertionError, match="no prefix is reused"):
        make_manager(kind, 8, 4, prefix_cache=True, max_request_tokens=LIMIT)
