"""A trace as a plan: what was shared is shared, what waited waits, and what was done is said."""

from collections import Counter

import pytest

from loadtest.errors import PlanInvalid
from loadtest.ideal import ideal_hit
from loadtest.replay import ReplayOptions, replay
from loadtest.reuse import reuse_of
from loadtest.traces import read_trace
from tests.loadtest.plans import PLANS, TRACES


@pytest.mark.parametrize("name", ["mooncake", "weka"])
def test_sharing_survives_whole_and_scaled(name: str) -> None:
    path = TRACES / f"{name}.jsonl.gz"
    trace = read_trace(path)
    prompts = [request.parts or () for request in trace.requests]
    expected = reuse_of(prompts, range(len(prompts)), block_tokens=1).ideal
    for scale in (1.0, 1 / 32):
        plan = replay(trace, ReplayOptions(scale=scale, max_context=1_000_000))
        assert len(plan.requests) == len(trace.requests)
        assert ideal_hit(plan).share() == pytest.approx(expected, abs=0.02)


def test_times_and_lengths_are_scaled() -> None:
    trace = read_trace(TRACES / "azure.csv.gz")
    plan = replay(trace, ReplayOptions(scale=0.1, time_scale=3.0))
    for told, planned in zip(trace.requests, plan.requests, strict=True):
        assert planned.at_s == pytest.approx(told.at_s * 3.0, abs=1e-5)
        assert planned.num_prompt_tokens == max(1, round(told.num_input_tokens * 0.1))
        assert planned.max_tokens == max(1, round(told.num_output_tokens * 0.1))
    assert "tokens x 0.1, times x 3" in plan.notes[0]
    assert ideal_hit(plan).share() == 0.0


def test_calls_of_a_session_wait_for_answers_and_for_sub_agents() -> None:
    plan = replay(read_trace(TRACES / "weka.jsonl.gz"), ReplayOptions(time_scale=0.5))
    assert set(Counter(r.session for r in plan.requests if r.at_unit is not None).values()) == {1}
    first = [r for r in plan.requests if r.session == "s0"]
    assert [r.after for r in first[1:]] == [(r.id,) for r in first[:-1]]
    assert [r.delay_s for r in first[1:]] == [1.5, 1.5, 1.5, 1.5, 2.0]
    assert any(len(r.after) == 2 for r in plan.requests if r.session == "s1")


def test_what_is_too_long_is_left_out_and_counted() -> None:
    trace = read_trace(TRACES / "mooncake.jsonl.gz")
    plan = replay(trace, ReplayOptions(max_context=8_000))
    assert all(r.num_prompt_tokens + r.max_tokens <= 8_000 for r in plan.requests)
    assert f"{len(plan.requests)} of 60 requests are played" in plan.notes
    with pytest.raises(PlanInvalid, match=r"nothing of mooncake fits into --max-context 16: lower --scale"):
        replay(trace, ReplayOptions(max_context=16))


def test_a_session_ends_where_it_grows_too_long() -> None:
    plan = replay(read_trace(TRACES / "weka.jsonl.gz"), ReplayOptions(max_context=9_800))
    assert [r.id for r in plan.requests] == ["s0.0", "s0.1", "s0.2"]


def test_the_first_so_many_are_taken() -> None:
    assert len(replay(read_trace(TRACES / "mooncake.jsonl.gz"), ReplayOptions(max_requests=7)).requests) == 7
    by_session = replay(read_trace(TRACES / "weka.jsonl.gz"), ReplayOptions(max_requests=3))
    assert {r.session for r in by_session.requests} == {"s0"}
    assert len(by_session.requests) == 6


def test_a_plan_is_no_trace_to_replay() -> None:
    with pytest.raises(PlanInvalid, match="is a plan already"):
        replay(read_trace(PLANS[0]))


@pytest.mark.parametrize(
    ("option", "value"), [("scale", 0.0), ("time_scale", -1.0), ("max_requests", 0), ("max_context", 1)]
)
def test_options_out_of_bounds_are_named(option: str, value: float) -> None:
    with pytest.raises(PlanInvalid, match=f"--{option.replace('_', '-')} is {value}; it must be between"):
        replay(read_trace(TRACES / "azure.csv.gz"), ReplayOptions(**{option: value}))  # type: ignore[arg-type]
