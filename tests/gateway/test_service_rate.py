"""How long a refused client should stay away: longer for more in the queue and for a slower server."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.service_rate import ServiceRate


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def busy_rate(*, every_s: float, num_departures: int) -> ServiceRate:
    """A server all of whose places are taken, and from which somebody leaves every `every_s`."""
    clock = Clock()
    rate = ServiceRate(now=clock)
    rate.became_busy()
    for _ in range(num_departures):
        clock.now_s += every_s
        rate.departed()
    return rate


def test_the_wait_is_the_queue_divided_by_the_rate() -> None:
    for num_departures in (1, 10, 64, 500):
        rate = busy_rate(every_s=0.5, num_departures=num_departures)
        assert rate.wait_s(20) == 10


@given(
    every_s=st.floats(1e-6, 1e4),
    num_departures=st.integers(0, 200),
    num_ahead=st.integers(0, 10_000),
)
def test_the_wait_is_bounded_and_never_shorter_for_more_who_wait(
    every_s: float, num_departures: int, num_ahead: int
) -> None:
    rate = busy_rate(every_s=every_s, num_departures=num_departures)
    assert 1 <= rate.wait_s(num_ahead) <= rate.wait_s(num_ahead + 1) <= 60
    slower = busy_rate(every_s=every_s * 2, num_departures=num_departures)
    assert slower.wait_s(num_ahead) >= rate.wait_s(num_ahead)


def test_the_wait_grows_while_nobody_leaves() -> None:
    clock = Clock()
    rate = ServiceRate(now=clock)
    rate.became_busy()
    waits = []
    for _ in range(5):
        clock.now_s += 3
        waits.append(rate.wait_s(1))
    assert waits == [3, 6, 9, 12, 15]


def test_quiet_hours_say_nothing_about_speed() -> None:
    clock = Clock()
    rate = ServiceRate(now=clock)
    for _ in range(10):
        clock.now_s += 3600
        rate.departed()
    rate.became_busy()
    rate.became_busy()
    for _ in range(4):
        clock.now_s += 0.25
        rate.departed()
    assert rate.wait_s(8) == 2
    rate.became_idle()
    assert rate.wait_s(1000) == 1
