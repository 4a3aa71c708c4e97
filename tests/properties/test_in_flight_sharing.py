"""Requests whose prompts begin alike: what they share is computed once, whoever is lost on the way."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.profiles import budget
from tests.properties.simulation import VOCAB_SIZE, Simulation, greedy

SYSTEM_PROMPT = [1, 2, 3, 4, 5, 6] * 10


def roomy(**options: Any) -> Simulation:
    return Simulation(**{"num_blocks": 400, "block_size": 4, "max_step_tokens": 64, **options})


@budget(examples=100)
@given(
    num_shared_tokens=st.integers(0, 40),
    block_size=st.sampled_from((1, 3, 16)),
    max_prefill_tokens=st.sampled_from((1, 7, 64)),
    num_requests=st.integers(2, 6),
)
def test_a_shared_prefix_is_computed_once_and_each_tail_by_its_own(
    *, num_shared_tokens: int, block_size: int, max_prefill_tokens: int, num_requests: int
) -> None:
    simulation = roomy(num_blocks=900, block_size=block_size, max_prefill_tokens=max_prefill_tokens)
    shared = [n % 3 for n in range(num_shared_tokens)]
    for n in range(num_requests):
        simulation.add([*shared, 3 + n % 4, n % 3, 5], greedy(2))
    simulation.finish_up()
    least = num_shared_tokens // block_size * block_size
    requests = list(simulation.requests.values())
    assert all((request.num_cached_tokens or 0) >= least for request in requests[1:])
    num_computed = sum(num_shared_tokens + 3 + 1 - (request.num_cached_tokens or 0) for request in requests)
    assert simulation.scheduler.stats().num_computed_tokens == num_computed


def test_a_follower_waits_only_for_what_it_shares() -> None:
    """Not for the rest of its leader's prompt."""
    simulation = roomy(max_prefill_tokens=8)
    leader = simulation.add(SYSTEM_PROMPT[:8] + [0] * 80)
    follower = simulation.add(SYSTEM_PROMPT[:8] + [6] * 5)
    plan = simulation.schedule()
    assert plan is not None
    assert [item.request_id for item in plan.items] == [leader]
    simulation.update()
    plan = simulation.schedule()
    assert plan is not None
    assert [(item.request_id, item.first_position) for item in plan.items] == [(leader, 8), (follower, 8)]
    simulation.update()
    simulation.finish_up()


def test_less_than_a_block_in_common_is_not_waited_for() -> None:
    simulation = roomy(max_prefill_tokens=8)
    first, second = simulation.add([1, 2, 3, *[0] * 30]), simulation.add([1, 2, 3, *[6] * 30])
    plan = simulation.schedule()
    assert plan is not None
    assert [item.request_id for item in plan.items] == [first, second]
    simulation.update()
    simulation.finish_up()


def test_who_is_held_back_is_in_nobodys_way() -> None:
    simulation = roomy(max_prefill_tokens=8)
    leader, follower = simulation.add(SYSTEM_PROMPT), simulation.add([*SYSTEM_PROMPT, 0])
    stranger = simulation.add([6, 5, 4])
    plan = simulation.schedule()
    assert plan is not None
    assert [item.request_id for item in plan.items] == [leader, stranger]
    assert simulation.scheduler.stats().num_waiting == 1
    assert not simulation.outputs[follower]
    simulation.update()
    simulation.finish_up()


def test_nobody_waits_for_another_tenants_prompt() -> None:
    """The time to the first token would tell what another is asking."""
    simulation = roomy(max_prefill_tokens=8)
    first = simulation.add(SYSTEM_PROMPT, namespace=b"a")
    second = simulation.add(SYSTEM_PROMPT, namespace=b"b")
    plan = simulation.schedule()
    assert plan is not None
    assert [item.request_id for item in plan.items] == [first, second]
    simulation.update()
    simulation.finish_up()
    assert simulation.requests[second].num_cached_tokens == 0


def test_nobody_waits_without_a_prefix_cache() -> None:
    simulation = Simulation(num_blocks=400, block_size=4, max_step_tokens=64, prefix_cache=False)
    simulation.add(SYSTEM_PROMPT)
    simulation.add(SYSTEM_PROMPT)
    plan = simulation.schedule()
    assert plan is not None
    assert len(plan.items) == 2
    simulation.update()
    simulation.finish_up()


@pytest.mark.parametrize("end", ["abort", "finish", "fail"])
def test_when_the_leader_is_lost_one_follower_computes_the_rest_and_the_others_wait_for_it(end: str) -> None:
    simulation = roomy(max_prefill_tokens=8)
    leader = simulation.add([*SYSTEM_PROMPT, 0])
    followers = [simulation.add([*SYSTEM_PROMPT, n]) for n in (1, 2, 3)]
    simulation.step()
    simulation.schedule()
    if end == "fail":
        simulation.fail()
    else:
        if end == "abort":
            simulation.abort(leader)
        else:
            simulation.finish(leader, 0)
        simulation.update()
    plan = simulation.schedule()
    assert plan is not None
    assert [item.request_id for item in plan.items] == followers[:1]
    simulation.update()
    simulation.finish_up()
    cached = [simulation.requests[follower].num_cached_tokens or 0 for follower in followers]
    assert cached[0] >= 8
    assert min(cached[1:]) >= 60


@budget(examples=300)
@given(seed=st.integers(0, 2**32 - 1))
def test_crowds_that_begin_alike_end_right_whatever_happens(seed: int) -> None:
    """A pool so small that leaders are preempted; aborts, failing steps, a lost worker."""
    choose = random.Random(seed)
    block_size = choose.choice((1, 2, 4))
    simulation = Simulation(
        num_blocks=choose.randrange(48, 90) // block_size,
        block_size=block_size,
        max_prefill_tokens=choose.choice((2, 5, 16)),
        max_running=choose.randrange(1, 7),
    )
    stems = [[choose.randrange(VOCAB_SIZE) for _ in range(choose.randrange(24))] for _ in range(2)]
    for _ in range(60):
        dice = choose.random()
        if dice < 0.25:
            stem = choose.choice(stems)
            tail = [choose.randrange(VOCAB_SIZE) for _ in range(choose.randrange(1, 6))]
            simulation.add(stem[: choose.randrange(len(stem) + 1)] + tail, greedy(choose.randrange(1, 14)))
        elif dice < 0.6 and len(simulation.in_flight) < 2:
            simulation.schedule()
        elif dice < 0.9 and simulation.in_flight:
            simulation.update()
        elif dice < 0.92 and simulation.in_flight:
            simulation.fail()
        elif dice < 0.925:
            simulation.fail_all()
        elif simulation.requests:
            simulation.abort(choose.choice(sorted(simulation.requests)))
    simulation.finish_up()
