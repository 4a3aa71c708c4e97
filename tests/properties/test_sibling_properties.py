"""Siblings share their prompt: computed once, whatever becomes of the one that computes it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.profiles import budget
from tests.properties.simulation import VOCAB_SIZE, Simulation, greedy


def shared_tokens(num_prompt_tokens: int, block_size: int) -> int:
    """What a sibling waits for: whole blocks, and at least one token is left to compute."""
    return (num_prompt_tokens - 1) // block_size * block_size


@budget(examples=200)
@given(
    num_prompt_tokens=st.integers(1, 60),
    block_size=st.sampled_from((1, 3, 16)),
    max_prefill_tokens=st.sampled_from((1, 7, 64)),
    num_siblings=st.integers(1, 6),
    max_running=st.integers(1, 8),
)
def test_a_prompt_of_n_siblings_is_computed_once_and_its_tail_by_each(
    *, num_prompt_tokens: int, block_size: int, max_prefill_tokens: int, num_siblings: int, max_running: int
) -> None:
    simulation = Simulation(
        num_blocks=1000,
        block_size=block_size,
        max_prefill_tokens=max_prefill_tokens,
        max_step_tokens=64,
        max_running=max_running,
    )
    prompt_ids = [n % VOCAB_SIZE for n in range(num_prompt_tokens)]
    simulation.add(prompt_ids, greedy(3))
    for _ in range(num_siblings):
        simulation.add(prompt_ids, greedy(3))
    simulation.finish_up()
    shared = shared_tokens(num_prompt_tokens, block_size)
    cached = [request.num_cached_tokens or 0 for request in simulation.requests.values()]
    assert cached[0] == 0
    assert all(shared <= each < num_prompt_tokens for each in cached[1:]), (
        "rows of a last block may be copied"
    )
    num_computed = sum(num_prompt_tokens - each + 2 for each in cached)
    assert simulation.scheduler.stats().num_computed_tokens == num_computed, "nothing was computed twice"


@budget(examples=400)
@given(seed=st.integers(0, 2**32 - 1))
def test_whatever_becomes_of_the_leader_each_sibling_gets_what_it_gets_alone(seed: int) -> None:
    """Ended at any step, in a step or between two, in a pool so small that leaders are preempted."""
    choose = random.Random(seed)
    block_size = choose.choice((1, 2, 4))
    simulation = Simulation(
        num_blocks=choose.randrange(44, 80) // block_size,
        block_size=block_size,
        max_prefill_tokens=choose.choice((2, 5, 16)),
        max_running=choose.randrange(1, 7),
    )
    prompt_ids = [choose.randrange(VOCAB_SIZE) for _ in range(choose.randrange(1, 30))]
    leader_id = simulation.add(prompt_ids, greedy(10))
    siblings = [simulation.add(prompt_ids, greedy(choose.randrange(1, 12))) for _ in range(4)]
    chained = simulation.add(prompt_ids, greedy(4))
    for _ in range(2):
        simulation.add([choose.randrange(VOCAB_SIZE) for _ in range(20)], greedy(12))
    for _ in range(choose.randrange(12)):
        if len(simulation.in_flight) < 2 and choose.random() < 0.6:
            simulation.schedule()
        elif simulation.in_flight:
            simulation.update()
    end = choose.choice(("abort", "finish", "fail", "lose the worker", "nothing"))
    if end == "abort":
        simulation.abort(leader_id)
    elif end == "finish":
        simulation.finish(leader_id, 0)
    elif end == "fail" and simulation.in_flight:
        simulation.fail()
    elif end == "lose the worker":
        simulation.fail_all()
    if choose.random() < 0.3:
        simulation.abort(choose.choice([*siblings, chained]))
    simulation.finish_up()


@pytest.mark.parametrize("num_steps", range(8))
def test_when_a_leader_is_aborted_one_sibling_takes_its_part(num_steps: int) -> None:
    """Not all at once: they would all compute the same prompt."""
    simulation = Simulation(num_blocks=100, block_size=4, max_prefill_tokens=8, max_step_tokens=64)
    prompt_ids = [1, 2, 3, 4, 5, 6] * 10
    leader_id = simulation.add(prompt_ids)
    for _ in range(3):
        simulation.add(prompt_ids)
    for _ in range(num_steps):
        simulation.step()
    simulation.abort(leader_id)
    simulation.finish_up()
    cached = [request.num_cached_tokens for request in simulation.requests.values()]
    shared = shared_tokens(60, 4)
    assert cached[1] == min(8 * num_steps, 59)
    assert cached[2:] in ([shared, shared], [59, 59])


def test_siblings_that_wait_are_in_nobodys_way() -> None:
    simulation = Simulation(num_blocks=100, block_size=4, max_prefill_tokens=4, max_step_tokens=16)
    prompt_ids = [1, 2, 3, 4, 5, 6] * 10
    leader_id = simulation.add(prompt_ids)
    siblings = [simulation.add(prompt_ids) for _ in range(2)]
    stranger = simulation.add([6, 5, 4])
    plan = simulation.schedule()
    assert plan is not None
    assert [item.request_id for item in plan.items] == [leader_id, stranger]
    assert simulation.scheduler.stats().num_waiting == 2
    assert not any(simulation.outputs[sibling] for sibling in siblings)
    simulation.update()
    simulation.finish_up()


def test_siblings_are_admitted_before_those_who_came_after_them() -> None:
    simulation = Simulation(num_blocks=100, block_size=4, max_prefill_tokens=8, max_running=1)
    prompt_ids = [1, 2, 3, 4, 5, 6]
    leader_id = simulation.add(prompt_ids, greedy(2))
    first, second = (simulation.add(prompt_ids, greedy(2)) for _ in range(2))
    stranger = simulation.add([6, 5, 4], greedy(2))
    order: list[str] = []
    while simulation.scheduler.num_unfinished:
        order += [output.request_id for output in simulation.step() if output.finish_reason]
    assert order == [leader_id, first, second, stranger]
