"""Every workload: plans that fit, that are the same for the same options, and have the published shape."""

from collections import Counter
from statistics import median

import pytest

from loadtest.errors import PlanInvalid
from loadtest.ideal import ideal_hit
from loadtest.plan import Plan, answer_segments
from loadtest.workloads import WorkloadOptions, find_workload, workload_names

GROWING = ("claude_code", "codex", "long_session")


def build(workload: str, **options: float) -> Plan:
    return find_workload(workload).build(WorkloadOptions(**options))  # type: ignore[arg-type]


def longest(plan: Plan) -> int:
    return max(request.num_prompt_tokens for request in plan.requests)


def test_the_list_is_the_folder() -> None:
    assert {"claude_code", "codex", "control", "long_session", "shared_prefix"} <= set(workload_names())


def test_a_name_may_be_written_with_hyphens_and_a_wrong_one_gets_the_list() -> None:
    assert find_workload("claude-code") is find_workload("claude_code")
    with pytest.raises(PlanInvalid, match=r"no workload 'codecs'; there are claude_code, codex, "):
        find_workload("codecs")


@pytest.mark.parametrize("name", workload_names())
def test_the_same_options_give_the_same_plan_and_another_seed_another(name: str) -> None:
    assert find_workload(name).name == name
    one, again = build(name, sessions=4), build(name, sessions=4)
    assert one == again
    assert build(name, sessions=4, seed=1).sha256 != one.sha256
    assert find_workload(name).summary in one.notes[0]


@pytest.mark.parametrize("name", workload_names())
@pytest.mark.parametrize("max_context", [64, 2_048, 40_000])
def test_no_prompt_with_its_answer_passes_the_context(name: str, max_context: int) -> None:
    plan = build(name, sessions=6, scale=max_context / 60_000, max_context=max_context)
    assert all(r.num_prompt_tokens + r.max_tokens <= max_context for r in plan.requests)
    assert len({r.session for r in plan.requests}) == 6


@pytest.mark.parametrize("name", workload_names())
def test_every_session_starts_at_a_time_and_goes_on_after_answers(name: str) -> None:
    plan = build(name, sessions=6, scale=0.01)
    starts = Counter(r.session for r in plan.requests if r.at_unit is not None)
    assert set(starts.values()) == {1}
    assert all(r.after for r in plan.requests if r.at_unit is None)
    by_id = {r.id: r for r in plan.requests}
    assert all(by_id[name].session == r.session for r in plan.requests for name in r.after)


@pytest.mark.parametrize("name", workload_names())
def test_pauses_are_scaled(name: str) -> None:
    at_once = build(name, sessions=3, scale=0.01, time_scale=0.0)
    assert {r.delay_s for r in at_once.requests} == {0.0}
    usual, slow = build(name, sessions=3, scale=0.01), build(name, sessions=3, scale=0.01, time_scale=2.0)
    for one, other in zip(usual.requests, slow.requests, strict=True):
        assert other.delay_s == pytest.approx(2 * one.delay_s, abs=0.002)


@pytest.mark.parametrize("name", GROWING)
def test_sessions_grow_past_32_000_tokens(name: str) -> None:
    assert longest(build(name, sessions=2)) > 32_000


@pytest.mark.parametrize("name", GROWING)
def test_each_call_begins_with_all_of_the_one_before_unless_it_was_compacted(name: str) -> None:
    plan = build(name, sessions=3, scale=0.05, turns=40)
    by_id = {r.id: r for r in plan.requests}
    follows = [(by_id[first], r) for r in plan.requests for first in r.after]
    grown = [r.segments[: len(first.segments)] == first.segments for first, r in follows]
    assert sum(grown) > 0.6 * len(grown)
    # Recorded answers can be told from questions, so histories may be live.
    assert len(answer_segments(plan)) > 0.6 * len(plan.requests)


@pytest.mark.parametrize("name", GROWING)
def test_the_number_of_calls_may_be_chosen(name: str) -> None:
    plan = build(name, sessions=3, turns=5, scale=0.01)
    main = Counter(r.session for r in plan.requests if "agent" not in r.id)
    assert set(main.values()) == {5}


@pytest.mark.parametrize("name", [*GROWING, "shared_prefix"])
def test_a_first_call_that_does_not_fit_is_refused_with_the_numbers(name: str) -> None:
    with pytest.raises(PlanInvalid, match=r"--max-context is 128: lower --scale"):
        build(name, max_context=128)


@pytest.mark.parametrize("name", ["control", "shared_prefix"])
def test_turns_are_refused_where_there_is_one_call_a_session(name: str) -> None:
    with pytest.raises(PlanInvalid, match="--turns is 3"):
        build(name, turns=3)


@pytest.mark.parametrize(
    ("option", "value"),
    [("sessions", 0), ("turns", 0), ("scale", 0.0), ("time_scale", -1.0), ("max_context", 1), ("share", 1.5)],
)
def test_options_out_of_bounds_are_named(option: str, value: float) -> None:
    for name in workload_names():
        with pytest.raises(PlanInvalid, match=f"--{option.replace('_', '-')} is {value}; it must be between"):
            build(name, **{option: value})


def test_the_control_shares_nothing_not_even_a_templates_default_system_message() -> None:
    plan = build("control")
    assert ideal_hit(plan).share() == 0.0
    assert all(r.segments[0].role == "system" for r in plan.requests)
    names = [s.segment_id for r in plan.requests for s in r.segments]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_the_shared_part_of_a_prompt_is_as_large_as_asked(share: float) -> None:
    plan = build("shared_prefix", sessions=64, share=share)
    # Of each group of 16, the first one pays.
    assert ideal_hit(plan).share() == pytest.approx(share * 15 / 16, abs=0.001)


def test_codex_has_the_published_shape() -> None:
    """Inferact: 94.2 % hit, context to 80K and above, pauses of 5.2 s (median) and 81.4 s (p99)."""
    plan = build("codex", sessions=100)
    assert ideal_hit(plan).share() == pytest.approx(0.95, abs=0.02)
    assert longest(plan) == 20_000 + 10_000 + 29 * (2_048 + 900)
    pauses = sorted(r.delay_s for r in plan.requests if r.after)
    assert median(pauses) == pytest.approx(5.2, rel=0.15)
    assert pauses[int(0.99 * len(pauses))] == pytest.approx(81.4, rel=0.4)


def test_claude_code_has_the_published_shape() -> None:
    """AgentX and Weka: 94 to 96 % hit, 98,720 in and 460 out on average, sub-agents in 44 % of sessions."""
    plan = build("claude_code", sessions=60)
    assert ideal_hit(plan).share() == pytest.approx(0.95, abs=0.02)
    answers = [r.max_tokens for r in plan.requests]
    assert median(answers) == pytest.approx(216, rel=0.1)
    calls = Counter(r.session for r in plan.requests if "agent" not in r.id)
    assert median(calls.values()) == pytest.approx(43, rel=0.35)
    with_agents = {r.session for r in plan.requests if "agent" in r.id}
    assert len(with_agents) / 60 == pytest.approx(0.44, abs=0.15)


def test_a_claude_code_session_waits_for_the_agents_it_sent_out() -> None:
    plan = build("claude_code", sessions=60, scale=0.02)
    last_calls = {name for r in plan.requests for name in r.after}
    agents = {r.id.rsplit(".", 1)[0] for r in plan.requests if "agent" in r.id}
    ends = {max((r.id for r in plan.requests if r.id.startswith(f"{a}.")), key=len_then_name) for a in agents}
    assert ends <= last_calls
    assert any(len(r.after) > 1 for r in plan.requests)


def len_then_name(name: str) -> tuple[int, str]:
    return len(name), name
