"""The session gate: whole sessions wait where the cache cannot hold all, and nobody waits for ever."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.request import Request
from core.scheduler.policies import find_policy, policy_names
from core.scheduler.sessions import MAX_PASSES, SessionGate
from tests.core.scheduler.session_workload import SessionWorkload
from tests.properties.profiles import budget
from tests.properties.simulation import greedy

POOL = 100


def turn(
    session_id: str, *, num_tokens: int, num_found: int = 0, tenant: str = "", token: int = 1
) -> Request:
    request = Request(
        request_id=f"{tenant}/{session_id}/{num_tokens}",
        token_ids=array("i", [token] * num_tokens),
        num_prompt_tokens=num_tokens,
        sampling=greedy(1),
        session_id=session_id,
        tenant=tenant,
    )
    request.num_computed_tokens = num_found
    return request


def take(gate: SessionGate, request: Request) -> None:
    gate.admitted(request)
    gate.ended(request)
    gate.check()


def thrashing() -> SessionGate:
    """A gate that has seen four sessions of 40 tokens lose all they had in a pool of 100."""
    gate = SessionGate(POOL)
    for name in "abcd":
        take(gate, turn(name, num_tokens=40))
    for name in "abcd":
        take(gate, turn(name, num_tokens=41))
    assert gate.is_shut
    return gate


def test_sessions_that_lose_what_they_come_back_to_shut_the_gate_and_the_newest_wait():
    gate = thrashing()
    waits = [gate.hold(turn(name, num_tokens=42)) for name in "abcd"]
    assert waits == [False, False, True, True]
    assert [request.session_id for request in gate] == ["c", "d"]
    gate.check()


def test_sessions_that_find_what_they_computed_never_wait():
    gate = SessionGate(POOL)
    for num_tokens in range(40, 60):
        for name in "abcd":
            assert not gate.hold(turn(name, num_tokens=num_tokens))
            take(gate, turn(name, num_tokens=num_tokens, num_found=num_tokens - 1))
    assert not gate.is_shut


def test_a_history_that_was_rewritten_is_no_loss():
    gate = SessionGate(POOL)
    for token in range(8):
        for name in "abcd":
            take(gate, turn(name, num_tokens=40, token=token))
    assert gate.lost_share == 0
    assert not gate.is_shut


def test_what_was_evicted_by_other_work_than_sessions_does_not_make_them_wait():
    gate = SessionGate(POOL)
    for num_tokens in range(20, 40):
        take(gate, turn("alone", num_tokens=num_tokens))
    assert gate.lost_share > 0.9
    assert not gate.is_shut


def test_a_shared_beginning_is_no_sessions_own():
    gate = SessionGate(POOL)
    take(gate, turn("first", num_tokens=60))
    for n in range(6):
        take(gate, turn(f"s{n}", num_tokens=61, num_found=60))
    for n in range(6):
        take(gate, turn(f"s{n}", num_tokens=62, num_found=0))
    assert gate.lost_share > 0.5, "they lose what they share"
    assert not gate.is_shut, "but together they fit: seven beginnings are one"


def test_requests_without_a_session_never_wait():
    gate = thrashing()
    assert not gate.hold(turn("", num_tokens=90))


def test_two_tenants_sessions_of_one_name_have_a_seat_each_or_none():
    gate = thrashing()
    assert not gate.hold(turn("a", num_tokens=42))
    assert gate.hold(turn("a", num_tokens=42, tenant="other"))


def test_a_preemption_that_cost_what_was_computed_counts_as_loss():
    gate = SessionGate(POOL)
    for name in "abc":
        take(gate, turn(name, num_tokens=40))
    for _ in range(3):
        gate.resumed(turn("a", num_tokens=40))
    assert gate.lost_share > 0.9
    assert gate.is_shut


def test_one_goes_in_any_case_when_there_is_nothing_else_to_do_and_an_idle_one_gives_up_its_seat():
    gate = thrashing()
    for name in "cd":
        gate.hold(turn(name, num_tokens=42))
    assert gate.release(idle=False) == []
    assert [request.session_id for request in gate.release(idle=True)] == ["c"]
    gate.check()
    assert [gate.hold(turn(name, num_tokens=43)) for name in "abc"] == [True, False, False]


def test_the_gate_opens_when_all_that_are_left_fit():
    gate = thrashing()
    gate.hold(waiting := turn("c", num_tokens=42))
    assert gate.discard(waiting)
    for _ in range(100):
        take(gate, turn("a", num_tokens=42, num_found=41))
        gate.release(idle=False)
    assert not gate.is_shut, "b, c and d never came back"


def test_after_a_restart_nobodys_loss_counts():
    gate = thrashing()
    gate.clear()
    assert not gate.is_shut
    assert gate.lost_share == 0
    take(gate, turn("a", num_tokens=43))
    assert gate.lost_share == 0


@budget(examples=40)
@given(st.data())
def test_a_held_turn_goes_after_so_many_turns_of_others_for_each_that_was_held_before_it(data: st.DataObject):
    gate = thrashing()
    inside = [name for name in "abcd" if not gate.hold(turn(name, num_tokens=42))]
    for n in range(data.draw(st.integers(0, 3))):
        gate.hold(turn(f"more{n}", num_tokens=data.draw(st.integers(40, 90))))
    held = [request.session_id for request in gate]
    num_turns = 0
    went_at: dict[str, int] = {}
    while len(went_at) < len(held):
        name = data.draw(st.sampled_from(inside))
        request = turn(name, num_tokens=42, num_found=41)
        request.request_id = f"turn{num_turns}"
        if not gate.hold(request):
            take(gate, request)
            num_turns += 1
        for released in gate.release(idle=gate.is_shut and request in tuple(gate)):
            went_at.setdefault(released.session_id, num_turns)
            take(gate, released)
        gate.check()
        assert num_turns <= (MAX_PASSES + 1) * (len(held) + 1)
    for place, name in enumerate(held):
        assert went_at[name] <= (MAX_PASSES + 1) * (place + 1)


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
    longest_wait = max(agent.longest_wait for agent in gated.agents)
    assert longest_wait <= (MAX_PASSES + 1) * len(gated.agents), "somebody starved"


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
