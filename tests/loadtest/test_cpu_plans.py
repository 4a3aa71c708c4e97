"""The benchmark's work: copies share nothing with each other, pauses are taken out of what a session took."""

import pytest

from loadtest.plan import PlannedRequest, Segment, plan_of
from tests.benchmarks.cpu.plans import copies, growing_sessions, one_after_another, prompts_into_streams
from tests.benchmarks.cpu.rows.agents import work_times
from tests.benchmarks.cpu.rows.footprint import lag_p99_s
from tests.loadtest.record_factory import answered, report_of


def test_two_copies_of_a_plan_are_two_of_its_work_and_share_no_text():
    once, twice = copies("tool-agent", 1), copies("tool-agent", 2)
    assert len(twice.requests) == 2 * len(once.requests)
    first, second = (
        {
            segment.segment_id
            for request in twice.requests
            if request.id.startswith(prefix)
            for segment in request.segments
        }
        for prefix in ("c0-", "c1-")
    )
    assert len(first) == len(second) > 0
    assert not first & second
    known = {request.id for request in twice.requests}
    assert all(name in known for request in twice.requests for name in request.after)


def test_sessions_that_grow_pass_32_000_tokens_and_stay_within_the_context():
    longest = [
        request.num_prompt_tokens + request.max_tokens
        for request in growing_sessions(sessions=2, turns=3, answer_tokens=32, longest=40_960).requests
    ]
    assert 32_000 < max(longest) <= 40_960


def test_prompts_come_one_after_another_and_have_nothing_in_common():
    plan = one_after_another(3, prompt_tokens=512, answer_tokens=1)
    assert [request.after for request in plan.requests] == [(), ("r0",), ("r1",)]
    assert len({segment for request in plan.requests for segment in request.segments}) == 3


def test_only_the_streams_have_gaps_between_tokens():
    plan = prompts_into_streams(streams=2, answer_tokens=9, prompts=3, prompt_tokens=50, every_s=1.0)
    assert [request.max_tokens for request in plan.requests] == [9, 9, 1, 1, 1]


def test_loop_lag_is_read_off_what_was_added_to_the_histogram():
    before = {
        'tidegate_loop_lag_seconds_bucket{le="0.001"}': 5.0,
        'tidegate_loop_lag_seconds_bucket{le="+Inf"}': 50.0,
    }
    after = {
        'tidegate_loop_lag_seconds_bucket{le="0.001"}': 95.0,
        'tidegate_loop_lag_seconds_bucket{le="0.005"}': 99.0,
        'tidegate_loop_lag_seconds_bucket{le="+Inf"}': 150.0,
    }
    assert lag_p99_s(before, after) == pytest.approx(0.005)


def test_what_a_session_took_is_counted_without_the_pauses_of_its_plan():
    records = [
        answered("r0", session="s", times=[1.0], ended_at=1.0),
        answered("r1", session="s", times=[9.0], scheduled_at=4.0, ended_at=9.0),
    ]
    requests = [
        PlannedRequest(id="r0", session="s", segments=(Segment("a", 4),), max_tokens=1, at_s=0.0),
        PlannedRequest(
            id="r1", session="s", segments=(Segment("b", 4),), max_tokens=1, after=("r0",), delay_s=3.0
        ),
    ]
    plan = plan_of("paused", requests)
    assert work_times(report_of([records]), plan) == {"s": 6.0}
