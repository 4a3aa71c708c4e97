"""Start times: the plan's, or a process of known mean and spread; bursts that a clock made, spread."""

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.arrivals import Process, quantum_of, schedule, spread_bursts, spread_plan
from loadtest.errors import PlanInvalid
from loadtest.plan import Plan
from tests.loadtest.plans import plan, request

MANY = 4_000


def starts(number: int = MANY) -> Plan:
    return plan(*(request(f"r{n}", at_unit=float(n)) for n in range(number)))


def gaps(process: Process, *, cv: float = 1.5, rate: float = 4.0) -> list[float]:
    times = schedule(starts(), rate=rate, process=process, cv=cv, seed=7)
    return [after - before for before, after in itertools.pairwise(times.values())]


def mean_and_cv(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    return mean, variance**0.5 / mean


def test_a_plans_units_are_divided_by_the_rate_and_its_seconds_are_left_alone() -> None:
    mixed = plan(
        request("u", at_unit=3.0), request("s", at_s=3.0), request("later", after=("u",), delay_s=1.0)
    )
    assert schedule(mixed, rate=2.0) == {"u": 1.5, "s": 3.0}


def test_constant_arrivals_have_one_gap() -> None:
    assert schedule(starts(4), rate=2.0, process="constant") == {"r0": 0.0, "r1": 0.5, "r2": 1.0, "r3": 1.5}


def test_poisson_arrivals_have_the_rate_and_a_cv_of_one() -> None:
    mean, cv = mean_and_cv(gaps("poisson"))
    assert mean == pytest.approx(0.25, rel=0.06)
    assert cv == pytest.approx(1.0, rel=0.08)


@pytest.mark.parametrize("wanted", [0.3, 1.5, 4.0])
def test_gamma_arrivals_have_the_rate_and_the_cv_asked_for(wanted: float) -> None:
    mean, cv = mean_and_cv(gaps("gamma", cv=wanted))
    assert mean == pytest.approx(0.25, rel=0.2)
    assert cv == pytest.approx(wanted, rel=0.2)


def test_a_process_keeps_the_plans_order_and_its_dictionary_the_plans_sequence() -> None:
    unordered = plan(
        request("late", at_unit=9.0), request("early", at_unit=1.0), request("next", at_unit=2.0)
    )
    times = schedule(unordered, rate=1.0, process="poisson")
    assert list(times) == ["late", "early", "next"]
    assert sorted(times, key=times.__getitem__) == ["early", "next", "late"]
    assert times["early"] == 0.0


def test_a_seed_says_everything() -> None:
    one, again, other = (schedule(starts(50), rate=1.0, process="gamma", seed=seed) for seed in (1, 1, 2))
    assert one == again != other


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rate": 0.0}, "the rate is 0.0; it must be between"),
        ({"rate": float("nan")}, "the rate is nan"),
        ({"rate": 1.0, "cv": 0.0}, "cv is 0.0; it must be between"),
        ({"rate": 1.0, "process": "bursty"}, "must be one of plan, poisson, gamma, constant"),
    ],
)
def test_options_out_of_bounds_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanInvalid, match=words):
        schedule(starts(1), **options)


def quantised(share: float, *, quantum: float = 3.0, number: int = 2_000) -> list[float]:
    """Arrivals of a steady stream, a share of whose clocks is cut down to whole quanta."""
    generator = random.Random(5)
    exact = sorted(generator.random() * number * 0.3 for _ in range(number))
    return [at // quantum * quantum if generator.random() < share else round(at, 3) for at in exact]


def test_timestamps_on_whole_quanta_are_noticed() -> None:
    assert quantum_of(quantised(0.72)) == 3.0
    assert quantum_of(quantised(1.0, quantum=0.5)) == 0.5


@pytest.mark.parametrize(
    "times",
    [
        [],
        [0.0] * 50,
        [float(n) for n in range(100)],
        quantised(0.0),
        quantised(0.3),
    ],
    ids=["none", "all at once", "steady", "exact", "few"],
)
def test_true_arrivals_are_left_alone(times: list[float]) -> None:
    assert quantum_of(times) is None


def test_spreading_makes_a_steady_stream_steady_again() -> None:
    """Mooncake FAST'25: a naive replay sends bursts of ten every three seconds."""
    times = quantised(1.0)
    burst = mean_and_cv([after - before for before, after in itertools.pairwise(times)])
    spread = sorted(spread_bursts(times, 3.0, seed=1))
    smooth = mean_and_cv([after - before for before, after in itertools.pairwise(spread)])
    assert burst[1] > 2.5
    assert smooth[1] == pytest.approx(1.0, abs=0.15)


@given(
    st.lists(st.one_of(st.integers(0, 20).map(lambda n: 3.0 * n), st.floats(0, 60)), max_size=40).map(sorted),
    st.integers(0, 5),
)
def test_spreading_moves_whole_quanta_forward_within_their_quantum_and_keeps_order(
    times: list[float], seed: int
) -> None:
    spread = spread_bursts(times, 3.0, seed=seed)
    assert spread == spread_bursts(times, 3.0, seed=seed)
    for before, after in zip(times, spread, strict=True):
        assert after == before or (abs(before % 3.0) < 1e-5 or abs(before % 3.0 - 3.0) < 1e-5)
        assert before <= after < before + 3.0
    for at in set(times):
        same = [after for before, after in zip(times, spread, strict=True) if before == at]
        assert same == sorted(same)


def test_a_plan_with_a_clocks_bursts_is_spread_and_says_so() -> None:
    bursts = plan(*(request(f"r{n}", at_s=at) for n, at in enumerate(quantised(1.0, number=300))))
    spread = spread_plan(bursts)
    assert len({request.at_s for request in spread.requests}) > 250
    assert spread.notes == ("100% of the start times were multiples of 3 s: spread over that time, seed 0",)
    assert spread.sha256 != bursts.sha256
    assert spread_plan(bursts) == spread


def test_a_plan_without_them_is_the_same_plan() -> None:
    steady = starts(30)
    assert spread_plan(steady) is steady
