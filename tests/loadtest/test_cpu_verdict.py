"""What the benchmark says of figures: which peer is best, by how much, and whether a goal holds."""

from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.cpu.verdict import Goal, Series, judge, times_better

SPEEDS = st.lists(st.floats(1.0, 1e6), min_size=1, max_size=9)


def series(name: str, *values: float, kl: float | None = None) -> Series:
    return Series(name=name, values=values, kl=kl)


def test_the_best_peer_is_the_fastest_where_more_is_better():
    verdict = judge(
        series("stable", 300.0),
        [series("slow", 100.0), series("fast", 200.0)],
        better="more",
        goal=Goal(times=1.2),
    )
    assert (verdict.peer, verdict.ratio, verdict.holds) == ("fast", 1.5, True)


def test_the_best_peer_is_the_quickest_where_less_is_better():
    verdict = judge(
        series("stable", 4.0),
        [series("slow", 9.0), series("quick", 6.0)],
        better="less",
        goal=Goal(times=2.0),
    )
    assert (verdict.peer, verdict.ratio, verdict.holds) == ("quick", 1.5, False)


def test_a_peer_of_worse_or_unknown_quality_is_no_measure_of_our_own_quality():
    peers = [series("coarse", 900.0, kl=0.28), series("unknown", 800.0), series("fine", 100.0, kl=0.0013)]
    ours = series("stable", 200.0, kl=0.003)
    assert judge(ours, peers, better="more", goal=Goal(times=1.5)).peer == "coarse"
    verdict = judge(ours, peers, better="more", goal=Goal(times=1.5, same_quality=True))
    assert (verdict.peer, verdict.ratio, verdict.holds) == ("fine", 2.0, True)


def test_a_goal_may_name_whose_peers_count():
    peers = [series("OpenVINO int8", 500.0), series("llama.cpp Q4_0", 100.0)]
    verdict = judge(series("stable", 250.0), peers, better="more", goal=Goal(times=2.0, peers=("llama.cpp",)))
    assert (verdict.peer, verdict.holds) == ("llama.cpp Q4_0", True)


def test_without_a_peer_that_counts_nothing_is_claimed():
    verdict = judge(
        series("stable", 250.0),
        [series("other", 1.0)],
        better="more",
        goal=Goal(times=2.0, same_quality=True),
    )
    assert (verdict.peer, verdict.ratio, verdict.holds) == (None, None, None)


def test_a_bound_is_met_by_our_own_median_on_its_better_side():
    ours = series("stable", 2.0, 9.0, 3.0)
    assert judge(ours, [], better="less", goal=Goal(bound=3.0)).holds is True
    assert judge(ours, [], better="less", goal=Goal(bound=2.9)).holds is False
    assert judge(ours, [], better="more", goal=Goal(bound=3.1)).holds is False


def test_a_ratio_is_of_rounds_that_were_played_beside_each_other():
    """A machine that halved its speed in the second round does not change who is faster, or by how much."""
    assert times_better([100.0, 50.0, 101.0], [50.0, 25.0, 50.5], better="more") == 2.0


@given(SPEEDS, st.floats(0.1, 10.0))
def test_a_peer_that_is_so_many_times_slower_is_found_to_be(values: list[float], factor: float):
    theirs = [value / factor for value in values]
    assert abs(times_better(values, theirs, better="more") / factor - 1.0) < 1e-9
    assert abs(times_better(theirs, values, better="less") / factor - 1.0) < 1e-9
