import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.percentiles import distribution, percentile

FINITE = st.floats(min_value=0.0, max_value=1e6)


def test_percentiles_lie_between_ranks_in_proportion() -> None:
    found = distribution([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (found.num, found.mean, found.p50, found.max) == (5, 3.0, 3.0, 5.0)
    assert found.p90 == pytest.approx(4.6)
    assert found.p99 == pytest.approx(4.96)


def test_one_failure_in_ten_leaves_the_median_and_fails_the_upper_percentiles() -> None:
    found = distribution([1.0] * 9 + [math.inf])
    assert (found.num, found.num_failed) == (10, 1)
    assert (found.mean, found.p50) == (1.0, 1.0)
    assert found.p90 == found.p99 == found.max == math.inf


def test_all_failed_is_infinite_and_has_no_mean() -> None:
    found = distribution([math.inf, math.inf])
    assert found.mean is None
    assert found.p50 == found.p99 == math.inf


def test_of_nothing_everything_is_unknown_and_nothing_is_zero() -> None:
    found = distribution([])
    assert found.num == 0
    assert {found.mean, found.p50, found.p90, found.p99, found.max} == {None}


def test_not_a_number_is_refused() -> None:
    with pytest.raises(AssertionError):
        distribution([1.0, math.nan])


@settings(max_examples=50, deadline=None)
@given(values=st.lists(FINITE, min_size=1, max_size=40), share=st.floats(min_value=0.0, max_value=1.0))
def test_percentiles_without_failures_are_numpys(values: list[float], share: float) -> None:
    expected = float(np.percentile(np.array(values), share * 100))
    assert percentile(sorted(values), share) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(values=st.lists(FINITE, min_size=1, max_size=30), num_failed=st.integers(min_value=0, max_value=30))
def test_a_failure_never_makes_a_percentile_smaller(values: list[float], num_failed: int) -> None:
    before = distribution(values)
    after = distribution([*values, *[math.inf] * num_failed])
    for name in ("p50", "p90", "p99", "max"):
        assert getattr(after, name) >= getattr(before, name) or getattr(after, name) == pytest.approx(
            getattr(before, name)
        )
