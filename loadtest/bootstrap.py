"""Intervals of medians by resampling: how far a median could lie elsewhere, were the run repeated.

Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), the percentile interval.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadtest.percentiles import percentile

NUM_RESAMPLES = 2000
LEVEL = 0.95
_MAX_CELLS = 4_000_000
"""Of one resampling matrix: 32 MB."""


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A median, and where it may lie. Infinite where failures reach so far."""

    median: float
    low: float
    high: float


def median(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Of at least one value; infinite where half of them or more are."""
    return percentile(np.sort(np.asarray(values, dtype=np.float64)), 0.5)


def median_interval(
    values: Sequence[float], *, seed: int = 0, level: float = LEVEL, num_resamples: int = NUM_RESAMPLES
) -> Interval:
    """The percentile bootstrap of the median; the same values and seed give the same interval."""
    return grouped_median_interval([values], seed=seed, level=level, num_resamples=num_resamples)


def grouped_median_interval(
    groups: Sequence[Sequence[float]],
    *,
    seed: int = 0,
    level: float = LEVEL,
    num_resamples: int = NUM_RESAMPLES,
) -> Interval:
    """The median of all values, resampled within each group (a stratum, such as one repeat).

    Args:
        groups: at least one value altogether; no NaN.
    """
    assert 0.0 < level < 1.0
    assert num_resamples > 0
    arrays = [np.asarray(group, dtype=np.float64) for group in groups if len(group)]
    assert arrays, "an interval needs a value"
    pooled = np.sort(np.concatenate(arrays))
    generator = np.random.default_rng(seed)
    rows_at_once = max(1, min(num_resamples, _MAX_CELLS // len(pooled)))
    medians: list[NDArray[np.float64]] = []
    for start in range(0, num_resamples, rows_at_once):
        rows = min(rows_at_once, num_resamples - start)
        medians.append(_medians(arrays, rows, generator))
    ordered = np.sort(np.concatenate(medians))
    tail = (1.0 - level) / 2
    return Interval(
        median=percentile(pooled, 0.5),
        low=percentile(ordered, tail),
        high=percentile(ordered, 1.0 - tail),
    )


def _medians(
    arrays: list[NDArray[np.float64]], rows: int, generator: np.random.Generator
) -> NDArray[np.float64]:
    """The median of each of `rows` resamples. Infinities need care: half of two of them is not a number."""
    sample = np.concatenate(
        [array[generator.integers(0, len(array), (rows, len(array)))] for array in arrays], axis=1
    )
    middle = sample.shape[1] // 2
    if sample.shape[1] % 2:
        return np.asarray(np.partition(sample, middle, axis=1)[:, middle])
    parted = np.partition(sample, (middle - 1, middle), axis=1)
    low, high = parted[:, middle - 1], parted[:, middle]
    return np.where(np.isinf(high), high, (low + np.where(np.isinf(high), low, high)) / 2)
