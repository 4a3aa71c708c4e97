"""Whether the client was a fair instrument: its own CPU and the lag of its event loop.

A client that is short of CPU stamps late and sends late, and its figures describe itself. Above the
bounds a run is void: it is reported, and says so first.
"""

import asyncio
import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

TICK_S = 0.01
_MAX_MISSED_TICKS = 100_000


class HealthBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Above one of these a run is void."""

    max_cpu_share: float = 0.9
    """Of one core: the client is one thread."""
    max_lag_p99_s: float = 0.01


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The client during one pass."""

    duration_s: float
    cpu_s: float
    """Of the whole client process, user and system."""
    lag_p50_s: float
    lag_p99_s: float
    lag_max_s: float
    num_ticks: int
    """Samples of lag, those a blocked loop missed included."""

    @property
    def cpu_share(self) -> float:
        return self.cpu_s / self.duration_s if self.duration_s > 0 else 0.0

    def void_reasons(self, bounds: HealthBounds) -> tuple[str, ...]:
        """Why the pass cannot be trusted; empty where it can."""
        reasons = []
        if self.cpu_share > bounds.max_cpu_share:
            reasons.append(
                f"the client used {self.cpu_share:.0%} of a core, above {bounds.max_cpu_share:.0%}: "
                "it may have measured itself"
            )
        if self.lag_p99_s > bounds.max_lag_p99_s:
            reasons.append(
                f"the client's event loop was {self.lag_p99_s * 1000:.1f} ms late (p99), "
                f"above {bounds.max_lag_p99_s * 1000:.1f} ms: its times are off by as much"
            )
        return tuple(reasons)


class HealthMeter:
    """Samples the running loop's lag for the length of a `with` scope. For the loop's thread alone.

    A blocked loop runs no timer, so each tick it missed is counted with the lag it would have had:
    otherwise a stall of three seconds were one sample among hundreds, and no percentile would show it.
    """

    def __init__(
        self,
        *,
        tick_s: float = TICK_S,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._tick_s = tick_s
        self._lags: list[float] = []
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._started_at = self._ended_at = 0.0
        self._cpu_at_start = self._cpu_at_end = 0.0

    def __enter__(self) -> Self:
        self._started_at, self._cpu_at_start = self._clock(), self._cpu_clock()
        self._arm(self._started_at + self._tick_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._timer is not None
        self._timer.cancel()
        self._timer = None
        self._ended_at, self._cpu_at_end = self._clock(), self._cpu_clock()
        if self._ended_at > self._due:
            self._count(self._ended_at)  # blocked up to the very end

    def _arm(self, due: float) -> None:
        self._due = due
        self._timer = self._loop.call_later(max(0.0, due - self._clock()), self._tick)

    def _tick(self) -> None:
        now = self._clock()
        self._count(now)
        self._arm(now + self._tick_s)

    def _count(self, now: float) -> None:
        """The tick that was due, and those that should have followed it by now."""
        lag = max(0.0, now - self._due)
        missed = min(int(lag / self._tick_s), _MAX_MISSED_TICKS)
        self._lags.extend(lag - i * self._tick_s for i in range(missed + 1))

    def health(self) -> Health:
        """Of the scope, once it is left."""
        assert self._timer is None, "health is read after the scope"
        lags = sorted(self._lags)
        return Health(
            duration_s=self._ended_at - self._started_at,
            cpu_s=self._cpu_at_end - self._cpu_at_start,
            lag_p50_s=_rank(lags, 0.5),
            lag_p99_s=_rank(lags, 0.99),
            lag_max_s=lags[-1] if lags else 0.0,
            num_ticks=len(lags),
        )


def _rank(ordered: list[float], share: float) -> float:
    """The nearest-rank percentile; 0 of nothing."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
