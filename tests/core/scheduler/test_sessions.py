"""The session gate: whole sessions wait where the cache cannot hold all, and nobody waits for ever."""

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.request import Request
from core.scheduler.policies import find_policy, policy_names
from core.scheduler.returns import Gaps, Returns, TokenCost
from core.scheduler.sessions import (
    FIRST_GAP_S,
    MAX_HELD_S,
    MAX_IDLE_S,
    MAX_PASSES,
    MAX_SESSIONS,
    NUM_LOOKS,
    SessionGate,
)
from tests.core.scheduler.session_workload import SessionWorkload
from tests.properties.profiles import budget
from tests.properties.simulation import greedy

POOL = 100
"""Tokens: two sessions of 40 have room, a third has not."""


def turn(
    session_id: str, *, num_tokens: int, num_found: int = 0, tenant: str = "", number: int = 0
) -> Request:
    request = Request(
        request_id=f"{tenant}/{session_id}/{num_tokens}/{number}",
        token_ids=array("i", [1] * num_tokens),
        num_prompt_tokens=num_tokens,
        sampling=greedy(1),
        session_id=session_id,
        tenant=tenant,
    )
    request.num_computed_tokens = num_found
    return request


def take(gate: SessionGate, request: Request) -> None:
    """A turn that is let in at once, and over at once."""
    assert not gate.hold(request)
    finish(gate, request)


def finish(gate: SessionGate, request: Request) -> None:
    gate.admitted(request)
    gate.check()
    gate.ended(request)
    gate.check()


def hold(gate: SessionGate, request: Request) -> Request:
    assert gate.hold(request)
    gate.check()
    return request


def full(*, gap_s: float = 1.0, token_s: float = 0.1) -> SessionGate:
    """A gate whose two seats belong to `a` and `b`, who come back after `gap_s`; both are away since now."""
    gate = SessionGate(POOL)
    gate.computed(1, token_s)
    for num_tokens in (30, 35, 40):
        for name in "ab":
            take(gate, turn(name, num_tokens=num_tokens, num_found=num_tokens - 6 if num_tokens > 30 else 0))
        gate.now += gap_s
    gate.now -= gap_s
    return gate


def test_a_turn_that_has_no_room_beside_the_others_waits():
    gate = full()
    hold(gate, turn("c", num_tokens=40))
    assert [request.session_id for request in gate] == ["c"]
    assert gate.release(idle=False) == []


def test_sessions_that_have_a_seat_or_fit_beside_the_others_never_wait():
    gate = full()
    take(gate, turn("a", num_tokens=42))
    take(gate, turn("small", num_tokens=2))


def test_requests_without_a_session_never_wait():
    gate = full()
    assert not gate.hold(turn("", num_tokens=90))
    gate.check()


def test_a_request_larger_than_the_room_is_let_into_an_empty_one():
    gate = SessionGate(POOL)
    take(gate, turn("huge", num_tokens=99))


def test_two_tenants_sessions_of_one_name_have_a_seat_each_or_none():
    gate = full()
    hold(gate, turn("a", num_tokens=42, tenant="other"))


def test_a_cached_beginning_needs_no_room():
    gate = SessionGate(POOL, lambda request: 38 if request.session_id == "like-a" else 0)
    for name in "ab":
        take(gate, turn(name, num_tokens=40))
    hold(gate, turn("c", num_tokens=40))
    hold(gate, turn("like-a", num_tokens=40))
    assert [request.session_id for request in gate.release(idle=False)] == ["like-a"]
    gate.check()


def test_an_idle_engine_waits_for_who_is_away_as_long_as_the_loss_would_cost_and_no_longer():
    gate = full(gap_s=1.0, token_s=0.05)
    hold(gate, turn("c", num_tokens=40))
    assert gate.release(idle=True) == []
    alarm = gate.wakes_at
    assert alarm is not None
    loss_s = 40 * 0.05  # a's; that it comes back is likely, not certain
    assert 0.5 * loss_s < alarm - gate.now < loss_s
    gate.check()
    gate.now = alarm
    assert [request.session_id for request in gate.release(idle=True)] == ["c"]
    assert gate.wakes_at is None
    hold(gate, turn("a", num_tokens=42))


def test_who_comes_back_in_time_keeps_its_seat():
    gate = full(gap_s=1.0, token_s=0.05)
    hold(gate, turn("c", num_tokens=40))
    assert gate.release(idle=True) == []
    gate.now += 0.9
    take(gate, turn("a", num_tokens=42, num_found=39))
    assert gate.release(idle=True) == []


@pytest.mark.parametrize(
    ("gap_s", "token_s", "why"),
    [
        (30.0, 0.4, "they come back too late to be waited for"),
        (1.0, 0.001, "what they would lose is computed sooner than they come back"),
    ],
)
def test_an_idle_engine_does_not_wait_in_vain(gap_s: float, token_s: float, why: str):
    gate = full(gap_s=gap_s, token_s=token_s)
    hold(gate, turn("c", num_tokens=40))
    assert gate.release(idle=True), why
    gate.check()


def test_an_idle_engine_never_waits_longer_than_its_bound_whatever_the_loss():
    gate = full(gap_s=4.0, token_s=100.0)
    hold(gate, turn("c", num_tokens=40))
    assert gate.release(idle=True) == []
    assert gate.wakes_at is not None
    assert gate.wakes_at <= gate.now + MAX_IDLE_S


def test_a_gate_without_a_clock_waits_for_nobody():
    gate = SessionGate(POOL)
    for name in "ab":
        take(gate, turn(name, num_tokens=40))
    hold(gate, turn("c", num_tokens=40))
    assert gate.release(idle=True)


def test_who_stays_away_for_much_longer_than_usual_has_no_seat_that_others_need():
    gate = full(gap_s=1.0)
    gate.now += 10.0
    take_or_release(gate, turn("c", num_tokens=40))
    hold(gate, turn("d", num_tokens=70))


def take_or_release(gate: SessionGate, request: Request) -> None:
    """Let in, at the latest when it is asked for while others run."""
    if gate.hold(request):
        assert request in gate.release(idle=False)
    finish(gate, request)


def test_sessions_that_never_came_back_are_expected_for_a_few_seconds():
    gate = SessionGate(POOL)
    for name in "ab":
        take(gate, turn(name, num_tokens=40))
    late = hold(gate, turn("c", num_tokens=40))
    gate.now = FIRST_GAP_S - 0.1
    assert gate.release(idle=False) == []
    gate.now = FIRST_GAP_S
    assert gate.release(idle=False) == [late]


def test_a_seat_is_not_kept_longer_than_the_whole_pool_takes_to_compute():
    gate = full(gap_s=50.0, token_s=0.1)
    late = hold(gate, turn("c", num_tokens=40))
    gate.now += POOL * 0.1
    assert gate.release(idle=False) == [late]


def test_who_waits_or_runs_keeps_its_seat():
    gate = full()
    running = turn("a", num_tokens=42)
    assert not gate.hold(running)
    gate.now += MAX_HELD_S / 2
    late = hold(gate, turn("c", num_tokens=40))
    assert gate.release(idle=False) == [late], "b is gone"
    gate.check()
    assert not gate.hold(turn("a", num_tokens=43))


def test_a_held_request_that_ends_is_forgotten():
    gate = full()
    late = hold(gate, turn("c", num_tokens=40))
    assert gate.release(idle=True) == []
    gate.ended(late)
    assert gate.discard(late)
    assert not gate.discard(late)
    assert gate.wakes_at is None
    gate.check()


def test_after_a_restart_nobody_has_a_seat():
    gate = full()
    gate.clear()
    for name in "cd":
        take(gate, turn(name, num_tokens=40))


def test_more_sessions_than_are_remembered_forget_the_oldest():
    gate = SessionGate(POOL)
    running = turn("first", num_tokens=2)
    assert not gate.hold(running)
    gate.admitted(running)
    for n in range(MAX_SESSIONS + 10):
        gate.now += FIRST_GAP_S
        request = turn(f"s{n}", num_tokens=2)
        if gate.hold(request):
            assert gate.release(idle=True) == [request]
        gate.admitted(request)
        gate.ended(request)
    gate.check()
    gate.ended(running)
    gate.check()


@budget(examples=40)
@given(st.data())
def test_a_held_turn_goes_after_so_many_turns_or_seconds_for_each_held_before_it(
    data: st.DataObject,
):
    gate = full(gap_s=1.0)
    held = [
        hold(gate, turn(f"more{n}", num_tokens=data.draw(st.integers(40, 90))))
        for n in range(data.draw(st.integers(1, NUM_LOOKS)))
    ]
    began_at, num_turns = gate.now, 0
    went: dict[str, tuple[int, float]] = {}
    choose = random.Random(data.draw(st.integers(0, 1 << 16)))
    step_s = data.draw(st.sampled_from([0.01, 0.2, 1.0]))
    while len(went) < len(held):
        gate.now += step_s
        request = turn(choose.choice("ab"), num_tokens=42, num_found=41)
        if gate.hold(request):
            gate.ended(request)
            gate.discard(request)
        else:
            finish(gate, request)
            num_turns += 1
        for released in gate.release(idle=False):
            went[released.session_id] = num_turns, gate.now - began_at
            finish(gate, released)
            num_turns += 1
        gate.check()
    for place, request in enumerate(held):
        turns, seconds = went[request.session_id]
        assert turns <= (MAX_PASSES + 1) * (place + 1)
        assert seconds <= (MAX_HELD_S + step_s) * (place + 1)


@budget(examples=60)
@given(seed=st.integers(0, 1 << 32))
def test_an_idle_engine_always_goes_on_within_its_bound(seed: int):
    """Whoever came and went before: with nobody running, somebody held is let go within seconds."""
    choose = random.Random(seed)
    gate = SessionGate(POOL)
    gate.computed(1, choose.choice([0.001, 0.05, 1.0]))
    running: list[Request] = []
    for number in range(60):
        gate.now += choose.choice([0.0, 0.3, 4.0])
        request = turn(choose.choice("abcdef"), num_tokens=choose.randint(5, 95), number=number)
        if not gate.hold(request):
            running.append(request)
            gate.admitted(request)
        for released in gate.release(idle=not running):
            running.append(released)
            gate.admitted(released)
        gate.check()
        while running and choose.random() < 0.6:
            gate.ended(running.pop(choose.randrange(len(running))))
            gate.check()
    for request in running:
        gate.ended(request)
    while len(gate):
        since, free = gate.now, gate.release(idle=True)
        while not free:
            assert gate.wakes_at is not None
            assert gate.wakes_at > gate.now, "an alarm in the past"
            gate.now = gate.wakes_at
            free = gate.release(idle=True)
            gate.check()
        assert gate.now - since <= MAX_IDLE_S
        for request in free:
            finish(gate, request)


def test_a_usual_gap_is_learned_and_so_is_how_much_it_varies():
    gaps = Gaps()
    gaps.add(2.0)
    assert gaps.latest_s == pytest.approx(6.0), "one gap tells little of the next"
    for _ in range(20):
        gaps.add(2.0)
    assert gaps.latest_s == pytest.approx(4.0, abs=0.1)
    gaps.add(10.0)
    assert gaps.latest_s > 10.0


def test_what_a_token_costs_is_measured_over_the_last_steps_and_by_their_size():
    cost = TokenCost()
    assert cost.token_s == 0.0
    cost.add(500, 5.0)
    cost.add(2, 0.5)
    assert cost.token_s == pytest.approx(0.01, rel=0.15)
    for _ in range(50):
        cost.add(500, 1.0)
    assert cost.token_s == pytest.approx(0.002, rel=0.1)


def test_whether_sessions_come_back_is_learned():
    returns = Returns()
    for _ in range(50):
        returns.add(came=False)
    assert returns.share < 0.05
    for _ in range(50):
        returns.add(came=True)
    assert returns.share > 0.95


@pytest.mark.parametrize(
    ("num_pool_tokens", "least_gain"),
    [(1200, 4.0), (2000, 2.5), (2800, 1.6)],  # ten agents need about 5,400 in the end
)
def test_agents_find_far_more_of_what_they_computed_where_some_of_them_wait(num_pool_tokens, least_gain):
    def run(*, gated: bool) -> SessionWorkload:
        return SessionWorkload(
            num_agents=10, num_turns=20, num_pool_tokens=num_pool_tokens, gated=gated
        ).run()

    without, gated = run(gated=False), run(gated=True)
    assert gated.was_shut
    assert gated.hit_rate > least_gain * without.hit_rate
    assert gated.hit_rate > 0.6
    assert gated.scheduler.stats().num_computed_tokens < 0.7 * without.scheduler.stats().num_computed_tokens
    assert gated.now < without.now, "waiting has lost time"
    for agent in gated.agents:
        assert agent.longest_wait <= (MAX_PASSES + 1) * len(gated.agents), "somebody starved"
        assert agent.longest_wait_s <= MAX_HELD_S * len(gated.agents), "somebody starved"


def test_agents_that_fit_are_served_as_if_there_were_no_gate():
    runs = [
        SessionWorkload(num_agents=10, num_turns=12, num_pool_tokens=8000, gated=gated).run()
        for gated in (True, False)
    ]
    assert not runs[0].was_shut
    assert runs[0].num_steps == runs[1].num_steps
    assert runs[0].hit_rate == runs[1].hit_rate > 0.95


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_serves_all_agents_behind_a_gate(name):
    policy = find_policy(name)(lambda _: 0)
    workload = SessionWorkload(
        num_agents=6, num_turns=6, num_pool_tokens=700, gated=True, policy=policy
    ).run()
    assert all(agent.num_turns_done == 6 for agent in workload.agents)
