import math

import pytest

from loadtest.arrivals import schedule
from loadtest.calibration import Speed, calibrate, estimate, shrink
from loadtest.errors import PlanInvalid, TargetUnusable
from loadtest.filler import Filler
from loadtest.mock.script import MockOptions
from tests.loadtest.plans import plan, request
from tests.loadtest.test_checks import questions_to

SPEED = Speed(prefill=100.0, decode=10.0, num_streams=2)


def expected(some, *, concurrency=None):
    return estimate(some, speed=SPEED, starts=schedule(some, rate=1.0), concurrency=concurrency)


async def test_the_speed_of_a_server_is_found_in_a_few_questions():
    options = MockOptions(ttft_s=0.0, prefill_s_per_token=0.001, itl_s=0.02)
    some = plan(request("r0", ("a", 256), max_tokens=10), request("r1", session="x", max_tokens=10))
    async with questions_to(options) as questions:
        speed = await calibrate(questions, Filler(nonce="n"), plan=some, budget_s=2.0)
    assert 0 < speed.prefill <= 1000  # a busy machine can only be slower than the mock was told to be
    assert 0 < speed.decode < math.inf
    assert speed.num_streams == 2
    assert speed.decode_together == 2 * speed.decode


async def test_calibration_leaves_a_server_that_decodes_for_longer_than_its_time():
    some = plan(request("r0", ("a", 16), max_tokens=100_000))
    async with questions_to(MockOptions(ttft_s=0.001, itl_s=0.01)) as questions:
        speed = await calibrate(questions, Filler(nonce="n"), plan=some, budget_s=0.4)
    assert 0 < speed.decode < math.inf


async def test_a_server_too_slow_to_show_two_tokens_in_time_is_still_given_a_speed():
    some = plan(request("r0", ("a", 16), max_tokens=100))
    async with questions_to(MockOptions(ttft_s=0.3, itl_s=0.01)) as questions:
        speed = await calibrate(questions, Filler(nonce="n"), plan=some, budget_s=0.2)
    assert 0 < speed.decode < math.inf


async def test_answers_of_one_token_have_no_decode_speed_and_cost_no_time():
    some = plan(request("r0", ("a", 16), max_tokens=1))
    async with questions_to(MockOptions(ttft_s=0.001)) as questions:
        speed = await calibrate(questions, Filler(nonce="n"), plan=some, budget_s=0.2)
    assert speed.decode == math.inf
    assert estimate(some, speed=speed, starts={"r0": 0.0}).expected_s < math.inf


async def test_a_server_that_fails_in_the_calibration_is_unusable():
    async with questions_to(MockOptions(fail="error event", fail_after_tokens=0)) as questions:
        with pytest.raises(TargetUnusable, match="failed a question before the run"):
            await calibrate(questions, Filler(nonce="n"), plan=plan(request()), budget_s=0.2)


def test_one_request_takes_its_prefill_and_its_tokens():
    some = plan(request("r0", ("a", 100), max_tokens=20))
    assert expected(some).expected_s == pytest.approx(1.0 + 2.0)


def test_a_session_takes_its_turns_and_its_pauses_and_the_cache_spares_its_history():
    some = plan(
        request("r0", ("a", 100), max_tokens=10),
        request("r1", ("a", 100), ("b", 100), max_tokens=10, after=("r0",), delay_s=3.0),
    )
    found = expected(some)
    assert found.expected_s == pytest.approx((1 + 1) + 3 + (1 + 1))
    assert found.uncached_s == pytest.approx((1 + 1) + 3 + (2 + 1))


def test_a_server_that_is_full_takes_as_long_as_all_its_work():
    some = plan(*(request(f"r{i}", (f"a{i}", 100), session=f"s{i}", max_tokens=20) for i in range(10)))
    assert expected(some).expected_s == pytest.approx(10 * (1.0 + 20 / 20))


def test_a_closed_loop_takes_its_sessions_in_turns():
    some = plan(
        *(request(f"r{i}", (f"a{i}", 10), session=f"s{i}", max_tokens=10, at_s=100.0 * i) for i in range(4))
    )
    assert expected(some).expected_s == pytest.approx(300 + 1.1)
    assert expected(some, concurrency=1).expected_s == pytest.approx(4 * 1.1)


def test_a_plan_is_cut_to_its_first_sessions_and_says_so():
    some = plan(*(request(f"r{i}", (f"a{i}", 100), session=f"s{i}", max_tokens=20) for i in range(10)))
    cut = shrink(some, max_s=9.0, speed=SPEED, starts=schedule(some, rate=1.0))
    assert [one.id for one in cut.requests] == ["r0", "r1", "r2", "r3"]
    assert "first 4 of 10 sessions" in cut.notes[-1]
    assert cut.sha256 != some.sha256


def test_a_plan_that_is_short_enough_stays_itself():
    some = plan(request())
    assert shrink(some, max_s=1000.0, speed=SPEED, starts={"r0": 0.0}) is some


def test_a_plan_of_which_no_session_fits_is_refused():
    some = plan(request("r0", ("a", 10_000)))
    with pytest.raises(PlanInvalid, match="first session alone is expected to take longer than 5 s"):
        shrink(some, max_s=5.0, speed=SPEED, starts={"r0": 0.0})


def test_a_long_chain_in_any_order_is_estimated():
    links = [request(f"r{i}", session="s", **({"after": (f"r{i - 1}",)} if i else {})) for i in range(300)]
    forward, backward = plan(*links), plan(*reversed(links))
    assert expected(forward).expected_s == pytest.approx(expected(backward).expected_s)
