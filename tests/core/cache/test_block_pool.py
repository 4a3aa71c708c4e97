import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.cache.block_pool import BlockPool
from core.errors import OutOfBlocks
from tests.properties.profiles import budget


def test_a_new_pool_is_all_free():
    pool = BlockPool(3)
    assert pool.num_free == 3
    pool.check()


def test_allocated_blocks_are_distinct_and_leave_the_free_list():
    pool = BlockPool(4)
    block_ids = pool.allocate(3)
    assert len(set(block_ids)) == 3
    assert pool.num_free == 1
    pool.check()


def test_asking_for_too_many_blocks_takes_none():
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(OutOfBlocks) as caught:
        pool.allocate(3)
    assert (caught.value.needed, caught.value.free) == (3, 2)
    assert pool.num_free == 2
    pool.check()


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go():
    pool = BlockPool(1)
    block_ids = pool.allocate(1)
    pool.share(block_ids)
    pool.release(block_ids)
    assert pool.num_free == 0
    pool.check()
    pool.release(block_ids)
    assert pool.num_free == 1
    pool.check()


def test_releasing_a_free_block_is_our_own_mistake():
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="block 0 is already free"):
        pool.release([0])


def test_sharing_a_free_block_is_our_own_mistake():
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="block 0 is free"):
        pool.share([0])


@budget(examples=200)
@given(num_blocks=st.integers(1, 12), choices=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 8))))
def test_any_order_of_taking_sharing_and_releasing_keeps_count(
    num_blocks: int, choices: list[tuple[int, int]]
):
    pool = BlockPool(num_blocks)
    held: list[int] = []
    for kind, number in choices:
        if kind == 0 and number <= pool.num_free:
            held += pool.allocate(number)
        elif kind == 1 and held:
            pool.share([held[number % len(held)]])
            held.append(held[number % len(held)])
        elif held:
            pool.release([held.pop(number % len(held))])
        pool.check()
        assert pool.num_free == num_blocks - len(set(held))
        assert all(pool.num_holders(block_id) == held.count(block_id) for block_id in held)
