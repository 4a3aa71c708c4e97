"""The loop's lateness, by a clock that the test moves."""

from core.engine.lag import LagProbe


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def test_a_timer_that_fires_in_time_shows_no_lag() -> None:
    clock = Clock()
    probe = LagProbe(now=clock)
    assert probe.take() == 0.0
    probe.expect(1.0)
    clock.now += 1.0
    probe.fired()
    assert probe.take() == 0.0


def test_the_worst_lateness_since_the_last_look_is_told_once() -> None:
    clock = Clock()
    probe = LagProbe(now=clock)
    for late_s in (0.25, 2.0, 0.5):
        probe.expect(1.0)
        clock.now += 1.0 + late_s
        probe.fired()
    assert probe.take() == 2.0
    assert probe.take() == 0.0


def test_a_timer_that_is_still_waited_for_counts_so_far() -> None:
    clock = Clock()
    probe = LagProbe(now=clock)
    probe.expect(1.0)
    clock.now += 0.5
    assert probe.take() == 0.0
    clock.now += 3.5
    assert probe.take() == 3.0
