"""Thousands of random workloads: no block is lost, nobody is forgotten, nobody gets a wrong token.

`RandomWorkload` lets hypothesis choose every operation and shrink what fails; the seeded workloads
are longer and many more.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.request import SamplingParams
from tests.properties.profiles import budget
from tests.properties.simulation import VOCAB_SIZE, Simulation, greedy

SHARED_PREFIXES: tuple[list[int], ...] = (
    [],
    [0] * 5,
    [1, 2, 3, 4, 5, 6] * 3,
    [1, 2, 3, 4, 5, 6] * 6,
    [0, 1] * 20,
)
BLOCK_SIZES = (1, 2, 3, 16)
NAMESPACES = (b"a", b"b")

token_lists = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 12),
    temperature=st.sampled_from((0.0, 1.0)),
    seed=st.integers(0, 2),
    stop_token_ids=st.sampled_from(((), (0,), (1, 2))),
    min_tokens=st.sampled_from((0, 0, 3)),
    frequency_penalty=st.sampled_from((0.0, 0.0, 0.5)),
    num_logprobs=st.sampled_from((None, None, 2)),
    prompt_logprobs=st.sampled_from((None, None, 0, 2)),
)


class RandomWorkload(RuleBasedStateMachine):
    """Any order of adding, planning, confirming, failing, aborting and finishing."""

    simulation: Simulation

    @initialize(
        block_size=st.sampled_from(BLOCK_SIZES),
        num_pool_tokens=st.integers(24, 120),
        max_running=st.integers(1, 5),
        max_prefill_tokens=st.sampled_from((1, 3, 16)),
        prefix_cache=st.booleans(),
    )
    def start(
        self,
        *,
        block_size: int,
        num_pool_tokens: int,
        max_running: int,
        max_prefill_tokens: int,
        prefix_cache: bool,
    ) -> None:
        self.simulation = Simulation(
            num_blocks=max(2, num_pool_tokens // block_size),
            block_size=block_size,
            max_running=max_running,
            max_step_tokens=max(8, max_running),
            max_prefill_tokens=max_prefill_tokens,
            prefix_cache=prefix_cache,
        )

    @rule(
        prefix=st.sampled_from(SHARED_PREFIXES),
        tail=token_lists,
        sampling=samplings,
        namespace=st.sampled_from(NAMESPACES),
    )
    def add(self, *, prefix: list[int], tail: list[int], sampling: SamplingParams, namespace: bytes) -> None:
        prompt_ids = [*prefix, *tail] or [0]
        if len(prompt_ids) + sampling.max_tokens <= self.simulation.scheduler.max_request_tokens:
            self.simulation.add(prompt_ids, sampling, namespace=namespace)

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data(), sampling=samplings)
    def add_a_sibling(self, data: st.DataObject, *, sampling: SamplingParams) -> None:
        leader_id = data.draw(st.sampled_from(sorted(self.simulation.requests)))
        add_sibling(self.simulation, leader_id, sampling)

    @rule(prefix=st.sampled_from(SHARED_PREFIXES), tail=token_lists)
    def add_a_pooled_one(self, *, prefix: list[int], tail: list[int]) -> None:
        prompt_ids = [*prefix, *tail] or [0]
        if len(prompt_ids) <= self.simulation.scheduler.max_request_tokens:
            self.simulation.add(prompt_ids, pools=True)

    @precondition(lambda self: len(self.simulation.in_flight) < 2)
    @rule()
    def schedule(self) -> None:
        self.simulation.schedule()

    @precondition(lambda self: self.simulation.in_flight)
    @rule()
    def update(self) -> None:
        self.simulation.update()

    @precondition(lambda self: not self.simulation.in_flight)
    @rule(count=st.integers(1, 8))
    def step(self, *, count: int) -> None:
        for _ in range(count):
            self.simulation.step()

    @precondition(lambda self: self.simulation.in_flight)
    @rule()
    def fail(self) -> None:
        self.simulation.fail()

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.simulation.abort(data.draw(st.sampled_from(sorted(self.simulation.requests))))

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.simulation.requests)))
        num_output_tokens = len(self.simulation.output_ids(request_id))
        self.simulation.finish(request_id, data.draw(st.integers(0, num_output_tokens)))

    @precondition(lambda self: self.simulation.requests)
    @rule()
    def lose_the_worker(self) -> None:
        self.simulation.fail_all()

    @invariant()
    def nobody_has_ended_twice(self) -> None:
        if hasattr(self, "simulation"):
            for request_id in self.simulation.requests:
                self.simulation.reason(request_id)

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.finish_up()


RandomWorkload.TestCase.settings = budget(examples=60, steps=40)
TestRandomWorkload = RandomWorkload.TestCase


@budget(examples=1000)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_workload_ends_with_every_block_back_and_the_tokens_of_each_request_alone(seed: int) -> None:
    choose = random.Random(seed)
    simulation = _random_simulation(choose)
    for _ in range(choose.randrange(10, 60)):
        _do_something(simulation, choose)
    simulation.finish_up()


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@budget(examples=60)
@given(seed=st.integers(0, 2**32 - 1))
def test_requests_of_a_crowded_pool_get_the_same_tokens_and_are_preempted_on_the_way(
    block_size: int, seed: int
) -> None:
    choose = random.Random(seed)
    simulation = Simulation(num_blocks=96 // block_size, block_size=block_size, max_running=8)
    for _ in range(12):
        prompt_ids = _random_prompt(choose)
        simulation.add(prompt_ids, greedy(min(40, 96 - len(prompt_ids))))
    simulation.finish_up()
    assert simulation.scheduler.stats().num_preemptions > 0
    assert set(simulation.scheduler.stats().num_finished) == {"stop", "length", "abort", "error"}
    assert simulation.scheduler.stats().num_finished["length"] == 12


def _random_simulation(choose: random.Random) -> Simulation:
    block_size = choose.choice(BLOCK_SIZES)
    max_running = choose.randrange(1, 7)
    return Simulation(
        num_blocks=max(2, choose.randrange(24, 160) // block_size),
        block_size=block_size,
        max_running=max_running,
        max_step_tokens=choose.choice((max_running, 8, 32)) if max_running <= 8 else 32,
        max_prefill_tokens=choose.choice((1, 5, 32)),
        prefix_cache=choose.random() < 0.8,
    )


def _do_something(simulation: Simulation, choose: random.Random) -> None:
    dice = choose.random()
    if dice < 0.1 and simulation.requests:
        add_sibling(simulation, choose.choice(sorted(simulation.requests)), _random_sampling(choose))
    elif dice < 0.3:
        _add_something(simulation, choose)
    elif dice < 0.6 and len(simulation.in_flight) < 2:
        simulation.schedule()
    elif dice < 0.88 and simulation.in_flight:
        simulation.update()
    elif dice < 0.9 and simulation.in_flight:
        simulation.fail()
    elif dice < 0.905:
        simulation.fail_all()
    elif simulation.requests:
        request_id = choose.choice(sorted(simulation.requests))
        if choose.random() < 0.5:
            simulation.abort(request_id)
        else:
            simulation.finish(request_id, choose.randint(0, len(simulation.output_ids(request_id))))


def _add_something(simulation: Simulation, choose: random.Random) -> None:
    prompt_ids = _random_prompt(choose)
    sampling = _random_sampling(choose)
    if choose.random() < 0.1:
        if len(prompt_ids) <= simulation.scheduler.max_request_tokens:
            simulation.add(prompt_ids, namespace=choose.choice(NAMESPACES), pools=True)
    elif len(prompt_ids) + sampling.max_tokens <= simulation.scheduler.max_request_tokens:
        simulation.add(prompt_ids, sampling, namespace=choose.choice(NAMESPACES))


def add_sibling(simulation: Simulation, leader_id: str, sampling: SamplingParams) -> None:
    """Another request for the prompt of one that waits, runs or has ended, as far as that fits."""
    leader = simulation.requests[leader_id]
    prompt_ids = simulation.prompts[leader_id]
    if len(prompt_ids) + sampling.max_tokens <= simulation.scheduler.max_request_tokens:
        simulation.add(prompt_ids, sampling, namespace=leader.namespace)


def _random_sampling(choose: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=choose.randrange(1, 30),
        temperature=choose.choice((0.0, 1.0)),
        seed=choose.randrange(3),
        stop_token_ids=choose.choice(((), (), (0,))),
        min_tokens=choose.choice((0, 0, 5)),
        repetition_penalty=choose.choice((1.0, 1.0, 1.3)),
        num_logprobs=choose.choice((None, None, 1)),
        prompt_logprobs=choose.choice((None, None, None, 1)),
    )


def _random_prompt(choose: random.Random) -> list[int]:
    tail = [choose.randrange(VOCAB_SIZE) for _ in range(choose.randrange(8))]
    return [*choose.choice(SHARED_PREFIXES), *tail] or [0]
