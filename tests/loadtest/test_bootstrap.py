import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.bootstrap import grouped_median_interval, median, median_interval

VALUES = st.lists(st.floats(min_value=0.0, max_value=1e6), min_size=1, max_size=20)


def test_one_value_is_its_own_interval() -> None:
    found = median_interval([2.5])
    assert (found.low, found.median, found.high) == (2.5, 2.5, 2.5)


def test_three_values_span_the_interval() -> None:
    found = median_interval([1.0, 2.0, 3.0])
    assert (found.low, found.median, found.high) == (1.0, 2.0, 3.0)


def test_the_same_seed_gives_the_same_interval() -> None:
    values = [float(i * i % 37) for i in range(40)]
    assert median_interval(values, seed=3) == median_interval(values, seed=3)


def test_more_values_of_one_kind_make_the_interval_narrower() -> None:
    few = median_interval([float(i) for i in range(10)])
    many = median_interval([float(i % 10) for i in range(1000)])
    assert many.high - many.low < few.high - few.low


def test_the_median_of_mostly_failures_is_a_failure() -> None:
    assert median([1.0, math.inf, math.inf]) == math.inf
    assert median([1.0, math.inf]) == math.inf
    found = median_interval([1.0, math.inf, math.inf, math.inf])
    assert found.median == found.high == math.inf
    assert not math.isnan(found.low)


def test_groups_are_resampled_each_for_itself() -> None:
    """Were they pooled, a resample could hold one group alone and the interval would reach 0 and 10."""
    found = grouped_median_interval([[0.0] * 50, [10.0] * 50])
    assert found.low == found.median == found.high == 5.0


@settings(max_examples=30, deadline=None)
@given(values=VALUES, seed=st.integers(min_value=0, max_value=9))
def test_an_interval_lies_within_the_values_and_about_the_median(values: list[float], seed: int) -> None:
    found = median_interval(values, seed=seed, num_resamples=200)
    slack = 1e-9 * max(values)
    assert min(values) - slack <= found.low <= found.high <= max(values) + slack
    assert min(values) - slack <= found.median <= max(values) + slack


def test_an_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    """200 samples of 40 from a uniform distribution, whose median is 0.5; seeded, so never by luck."""
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        found = median_interval(list(generator.random(40)), num_resamples=400)
        covered += found.low <= 0.5 <= found.high
    assert 0.88 <= covered / 200 <= 1.0
