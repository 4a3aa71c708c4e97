"""Percentiles in which failures are infinitely slow.

Linear interpolation between ranks, as numpy's default and most tools; where the upper of the two ranks
is a failure, the percentile is infinite too.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of one figure, in seconds. Infinity where a percentile falls among failures."""

    num: int
    """Values, failures included."""
    num_failed: int = 0
    mean: float | None = None
    """Of those that did not fail: a mean with one failure would be infinite."""
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


def percentile(ordered: Sequence[float] | NDArray[np.float64], share: float) -> float:
    """
    Args:
        ordered: ascending, at least one; infinities at its end.
        share: 0 to 1.
    """
    assert len(ordered) > 0
    assert 0.0 <= share <= 1.0
    rank = (len(ordered) - 1) * share
    below = math.floor(rank)
    low, high = float(ordered[below]), float(ordered[math.ceil(rank)])
    if math.isinf(high):
        return low if rank == below else high
    return low + (high - low) * (rank - below)


def distribution(values: Sequence[float] | NDArray[np.float64]) -> Distribution:
    """Of values in any order; infinite ones are failures. Of nothing, everything is unknown."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    assert not np.isnan(ordered).any(), "an unknown value is left out, not given as NaN"
    num_failed = int(np.isinf(ordered).sum())
    finite = ordered[: len(ordered) - num_failed]
    mean = float(finite.mean()) if len(finite) else None
    if len(ordered) == 0:
        return Distribution(num=0)
    return Distribution(
        num=len(ordered),
        num_failed=num_failed,
        mean=mean,
        p50=percentile(ordered, 0.5),
        p90=percentile(ordered, 0.9),
        p99=percentile(ordered, 0.99),
        max=float(ordered[-1]),
    )
