import asyncio
import re
import time

import pytest

from loadtest.health import Health, HealthBounds, HealthMeter
from tests.loadtest.raw_server import until

FINE = Health(duration_s=10.0, cpu_s=2.0, lag_p50_s=0.0, lag_p99_s=0.001, lag_max_s=0.002, num_ticks=1000)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_client_with_room_to_spare_voids_nothing():
    assert FINE.void_reasons(HealthBounds()) == ()


@pytest.mark.parametrize(
    ("changes", "bounds", "says"),
    [
        ({"cpu_s": 9.5}, HealthBounds(), "95% of a core, above 90%"),
        ({"lag_p99_s": 0.05}, HealthBounds(), r"50.0 ms late \(p99\), above 10.0 ms"),
        ({}, HealthBounds(max_cpu_share=0.1), "20% of a core"),
    ],
)
def test_client_is_the_bottleneck_a_busy_or_late_client_voids_the_run(changes, bounds, says):
    fields = {name: getattr(FINE, name) for name in FINE.__struct_fields__} | changes
    (reason,) = Health(**fields).void_reasons(bounds)
    assert re.search(says, reason)


async def test_every_tick_that_a_blocked_loop_missed_counts():
    clock = Clock()
    meter = HealthMeter(tick_s=0.01, clock=clock, cpu_clock=lambda: 0.0)
    with meter:
        clock.now += 1.01  # the loop was blocked: one tick is late by 1 s, and 100 never ran
    health = meter.health()
    assert health.num_ticks == 101
    assert health.lag_max_s == pytest.approx(1.0)
    assert health.lag_p50_s == pytest.approx(0.5)
    assert health.duration_s == pytest.approx(1.01)


async def test_a_loop_that_really_was_blocked_shows_its_lag():
    meter = HealthMeter()
    with meter:
        time.sleep(0.2)  # noqa: ASYNC251 - blocking it is the point
        await asyncio.sleep(0)
    health = meter.health()
    assert health.lag_max_s > 0.15
    assert health.void_reasons(HealthBounds())


async def test_the_clients_own_work_counts_as_its_cpu():
    cpu = iter([1.0, 4.5])
    clock = Clock()
    meter = HealthMeter(clock=clock, cpu_clock=lambda: next(cpu))
    with meter:
        clock.now += 7.0
    assert meter.health().cpu_share == pytest.approx(0.5)


async def test_an_idle_loop_is_sampled_again_and_again():
    meter = HealthMeter(tick_s=0.001)
    with meter:
        await until(lambda: len(meter._lags) >= 5)
    assert meter.health().num_ticks >= 5
