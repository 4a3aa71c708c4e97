"""The modes for comparison serve as surely as the usual one: right tokens, nobody lost, all blocks back."""

import random
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import BatchingKind, KVReservation
from tests.properties.profiles import budget
from tests.properties.simulation import VOCAB_SIZE, Simulation, greedy


def random_options(choose: random.Random, kv_reservation: KVReservation) -> dict[str, Any]:
    block_size = choose.choice((1, 2, 4))
    max_running = choose.randrange(1, 7)
    return {
        "num_blocks": choose.randrange(40, 120) // block_size,
        "block_size": block_size,
        "max_running": max_running,
        "max_step_tokens": choose.choice((8, 32)),
        "max_prefill_tokens": choose.choice((1, 5, 32)),
        "max_model_len": choose.choice((40, 64)),
        "kv_reservation": kv_reservation,
        "prefix_cache": kv_reservation == "paged" and choose.random() < 0.5,
        "batching": choose.choice(get_args(BatchingKind)),
        "whole_prompts": choose.random() < 0.5,
    }


@pytest.mark.parametrize("kv_reservation", get_args(KVReservation))
@budget(examples=60)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_combination_of_modes_gives_each_request_its_own_tokens(
    kv_reservation: KVReservation, seed: int
) -> None:
    choose = random.Random(seed)
    simulation = Simulation(**random_options(choose, kv_reservation))
    for _ in range(50):
        dice = choose.random()
        if dice < 0.25:
            prompt_ids = [choose.randrange(VOCAB_SIZE) for _ in range(choose.randrange(1, 24))]
            simulation.add(prompt_ids, greedy(choose.randrange(1, 14)))
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


@budget(examples=40)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_crowded_pool_of_doubling_runs_moves_and_preempts_and_ends(seed: int) -> None:
    choose = random.Random(seed)
    simulation = Simulation(
        num_blocks=48, block_size=2, max_running=8, prefix_cache=False, kv_reservation="power_of_two"
    )
    num_copies = 0
    for _ in range(10):
        simulation.add([choose.randrange(VOCAB_SIZE) for _ in range(choose.randrange(1, 12))], greedy(40))
    while (plan := simulation.schedule()) is not None:
        num_copies += len(plan.block_copies)
        simulation.update()
    simulation.finish_up()
    stats = simulation.scheduler.stats()
    assert stats.num_finished["length"] == 10
    assert num_copies + stats.num_preemptions > 0, "the pool was too large to test anything"


def test_waste_falls_from_the_longest_context_over_powers_of_two_and_the_oracle_to_pages() -> None:
    """The same requests in each mode; the mean over all steps. The paper's order."""
    waste: dict[str, float] = {}
    for kv_reservation in get_args(KVReservation):
        simulation = Simulation(
            num_blocks=512,
            block_size=4,
            max_running=8,
            max_step_tokens=64,
            max_prefill_tokens=64,
            max_model_len=256,
            prefix_cache=False,
            kv_reservation=kv_reservation,
        )
        choose = random.Random(1)
        for _ in range(24):
            prompt_ids = [choose.randrange(VOCAB_SIZE) for _ in range(choose.randrange(8, 60))]
            simulation.add(prompt_ids, greedy(choose.randrange(8, 60)))
        shares = []
        while simulation.schedule() is not None:
            simulation.update()
            usage = simulation.manager.usage()
            shares += [usage.waste] if usage.num_allocated_tokens else []
        waste[kv_reservation] = sum(shares) / len(shares)
    assert waste["max"] > waste["power_of_two"] > waste["paged"]
    assert waste["max"] > waste["oracle"] > waste["paged"]
    assert waste["paged"] < 0.1
