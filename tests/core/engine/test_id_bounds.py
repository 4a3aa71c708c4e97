"""The quick look at many ids says what `min` and `max` would."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.engine.id_bounds import are_below

BOUNDS = st.one_of(st.integers(1, 2**31 - 1), st.sampled_from([1, 255, 256, 257, 49152, 65536, 151936]))


@given(BOUNDS, st.data())
def test_it_agrees_with_min_and_max(bound: int, data: st.DataObject) -> None:
    near = st.integers(max(-(2**31), bound - 300), min(2**31 - 1, bound + 300))
    anywhere = st.integers(-(2**31), 2**31 - 1)
    inside = st.integers(0, bound - 1)
    ids = data.draw(st.lists(st.one_of(inside, inside, near, anywhere), min_size=1, max_size=30))
    assert are_below(array("i", ids), bound) is (min(ids) >= 0 and max(ids) < bound)


@pytest.mark.parametrize("wrong", [-1, 49152, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("place", [0, 5000, 9999])
def test_one_wrong_id_among_many_is_found(wrong: int, place: int) -> None:
    ids = array("i", range(10_000))
    assert are_below(ids, 49152)
    ids[place] = wrong
    assert not are_below(ids, 49152)
