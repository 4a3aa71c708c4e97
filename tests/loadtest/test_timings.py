import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.record import RequestRecord
from loadtest.timings import deadlines, num_tokens, timings_of, token_gaps, token_times
from tests.loadtest.record_factory import answered, failed


def test_latencies_worked_out_by_hand() -> None:
    record = answered(times=[10.3, 10.4, 10.7, 10.8], scheduled_at=10.0, sent_at=10.1)
    found = timings_of(record)
    assert found.queue_client == pytest.approx(0.1)
    assert found.ttft == pytest.approx(0.2)
    assert found.ttft_sched == pytest.approx(0.3)
    assert found.tpot == pytest.approx(0.5 / 3)
    assert found.max_gap == pytest.approx(0.3)
    assert found.e2e == pytest.approx(0.7)
    assert found.e2e_sched == pytest.approx(0.8)


def test_complaint_1_waiting_in_the_client_shows_in_latency_from_the_intended_start() -> None:
    found = timings_of(answered(times=[5.1], scheduled_at=0.0, sent_at=5.0))
    assert found.ttft == pytest.approx(0.1)
    assert found.ttft_sched == pytest.approx(5.1)
    assert found.queue_client == pytest.approx(5.0)


def test_complaint_2_two_tokens_an_event_leave_tpot_unchanged_and_their_sum() -> None:
    single = answered(times=[0.1 + 0.02 * i for i in range(41)])
    paired = answered(times=[0.1 + 0.04 * i for i in range(21)], tokens=[1.0] + [2.0] * 20)
    assert timings_of(paired).tpot == pytest.approx(timings_of(single).tpot)
    assert token_gaps(paired, spread=True) == pytest.approx(token_gaps(single, spread=True))
    pooled = sorted(token_gaps(paired))
    assert pooled == pytest.approx([0.0] * 20 + [0.04] * 20)


def test_complaint_2_further_tokens_of_the_first_event_have_no_gap() -> None:
    record = answered(times=[1.0, 1.3], tokens=[3.0, 2.0])
    assert list(token_gaps(record)) == pytest.approx([0.0, 0.0, 0.3, 0.0])
    assert list(token_gaps(record, spread=True)) == pytest.approx([0.0, 0.0, 0.15, 0.15])


def test_complaint_4_reasoning_has_its_own_first_token_and_never_a_tpot_of_zero() -> None:
    record = answered(times=[1.0, 2.0, 3.0], first_visible_at=3.0)
    assert (timings_of(record).ttft, timings_of(record).ttfot) == (1.0, 3.0)
    at_once = answered(times=[1.0], tokens=[50.0])
    assert timings_of(at_once).tpot is None
    only_reasoning = answered(times=[1.0, 2.0], first_visible_at=None)
    assert timings_of(only_reasoning).ttfot is None


def test_complaint_8_a_failure_is_infinitely_slow_wherever_it_failed() -> None:
    cut = answered(times=[0.1, 0.2], fault=failed(kind="cut").fault)
    for record in (cut, failed(kind="connect"), failed(kind="unsent", sent_at=None)):
        found = timings_of(record)
        assert found.ttft == found.ttft_sched == found.tpot == found.e2e == found.max_gap == math.inf
    assert timings_of(failed(kind="unsent", sent_at=None)).queue_client is None


def test_a_cancelled_request_has_what_it_showed_and_no_e2e() -> None:
    found = timings_of(answered(times=[1.0, 1.5, 2.0], cancelled=True, num_output_tokens=None))
    assert (found.ttft, found.tpot) == (1.0, 0.5)
    assert found.e2e is None
    assert found.e2e_sched is None


def test_an_answer_without_content_has_no_latency_and_not_zero() -> None:
    found = timings_of(answered(times=[], ended_at=1.0, num_output_tokens=0))
    assert (found.ttft, found.tpot, found.max_gap, found.e2e) == (None, None, None, None)


def test_tokens_that_nobody_counted_are_unknown() -> None:
    record = answered(times=[1.0, 2.0], tokens=[0.0, 0.0], token_source="unknown", num_output_tokens=None)
    assert num_tokens(record) is None
    assert token_times(record) == []
    assert timings_of(record).tpot is None
    assert timings_of(record).max_gap == 1.0


def test_the_servers_count_goes_before_the_events() -> None:
    assert num_tokens(answered(times=[1.0, 2.0], num_output_tokens=9)) == 9


def test_fractions_of_tokens_add_up_before_they_are_rounded() -> None:
    record = answered(times=[1.0, 2.0, 3.0, 4.0], tokens=[1.25] * 4, token_source="by text length")
    assert sum(count for _, count in token_times(record)) == 5


def test_every_token_in_time_meets_its_deadline() -> None:
    record = answered(times=[1.0, 1.1, 1.2, 1.3])
    assert deadlines(record, ttft_s=1.0, tpot_s=0.1 + 1e-9, max_tokens=4) == (4, 4)


def test_tokens_ahead_of_their_deadline_make_up_for_a_later_pause() -> None:
    record = answered(times=[0.1, 0.1, 0.1, 1.25])
    assert deadlines(record, ttft_s=1.0, tpot_s=0.1, max_tokens=4) == (4, 4)


def test_a_stall_misses_the_deadlines_that_passed_and_later_ones_count_from_there() -> None:
    """Due at 1.0 and 1.5; the second came at 4.1, 2.6 late: its own and five more. Then on time."""
    record = answered(times=[1.0, 4.1, 4.5, 5.0])
    assert deadlines(record, ttft_s=1.0, tpot_s=0.5, max_tokens=4) == (9, 3)


def test_tokens_that_never_came_missed_their_deadlines() -> None:
    cut = answered(times=[0.5, 0.6], fault=failed(kind="cut").fault)
    assert deadlines(cut, ttft_s=1.0, tpot_s=0.5, max_tokens=10) == (10, 2)
    assert deadlines(failed(), ttft_s=1.0, tpot_s=0.5, max_tokens=10) == (10, 0)


EVENTS = st.lists(
    st.tuples(st.floats(min_value=0.0, max_value=2.0), st.integers(min_value=1, max_value=5)),
    min_size=1,
    max_size=20,
)


def _record(events: list[tuple[float, int]]) -> RequestRecord:
    times, now = [], 1.0
    for gap, _ in events:
        now += gap
        times.append(now)
    return answered(times=times, tokens=[float(count) for _, count in events])


@settings(max_examples=60, deadline=None)
@given(events=EVENTS)
def test_gaps_are_one_fewer_than_tokens_and_sum_to_the_time_between_first_and_last(
    events: list[tuple[float, int]],
) -> None:
    record = _record(events)
    tokens = sum(count for _, count in events)
    for spread in (False, True):
        gaps = token_gaps(record, spread=spread)
        assert len(gaps) == tokens - 1
        assert (gaps >= 0).all()
        assert gaps.sum() == pytest.approx(record.content_times[-1] - record.content_times[0], abs=1e-9)
    tpot = timings_of(record).tpot
    if tpot is not None:
        assert tpot == pytest.approx(token_gaps(record).mean())


@settings(max_examples=60, deadline=None)
@given(
    events=EVENTS,
    ttft_s=st.floats(min_value=0.1, max_value=3.0),
    tpot_s=st.floats(min_value=0.01, max_value=1.0),
)
def test_no_more_deadlines_are_met_than_tokens_came_and_none_is_lost(
    events: list[tuple[float, int]], ttft_s: float, tpot_s: float
) -> None:
    tokens = sum(count for _, count in events)
    num, met = deadlines(_record(events), ttft_s=ttft_s, tpot_s=tpot_s, max_tokens=tokens)
    assert 0 <= met <= tokens <= num
    easier, met_easier = deadlines(_record(events), ttft_s=1e9, tpot_s=tpot_s, max_tokens=tokens)
    assert easier == met_easier == tokens
