"""The choice of threads follows what steps take, and never what they give."""

import random
from pathlib import Path

import pytest
import torch

from core.config import EngineConfig
from core.execution.threads import TRIAL_EVERY, ThreadGovernor, thread_counts
from core.execution.worker import load_worker
from tests.fakes.plans import planned, step
from tests.fakes.tiny_llama import TinyShape, write_tiny_llama


def run(governor: ThreadGovernor, seconds: dict[int, float], *, steps: int, num_tokens: int = 8) -> list[int]:
    """Let the governor choose for steps that take `seconds` by number of threads, with a little noise."""
    rng = random.Random(1)
    chosen = []
    for _ in range(steps):
        chosen.append(governor.choose(num_tokens))
        governor.saw(num_tokens, seconds[chosen[-1]] * rng.uniform(0.97, 1.03))
    return chosen


def test_the_numbers_tried_are_powers_of_two_and_the_most() -> None:
    assert [thread_counts(most) for most in (1, 2, 3, 4, 6, 8)] == [
        (1,), (1, 2), (1, 2, 3), (1, 2, 4), (1, 2, 4, 6), (1, 2, 4, 8),
    ]  # fmt: skip


def test_all_threads_are_used_while_they_are_the_fastest_but_for_a_trial_now_and_then() -> None:
    chosen = run(ThreadGovernor((1, 2)), {1: 0.040, 2: 0.030}, steps=10 * TRIAL_EVERY)
    assert chosen[0] == 2
    assert chosen.count(1) / len(chosen) < 0.08


def test_a_busy_machine_brings_one_thread_within_a_few_steps_and_an_idle_one_brings_them_back() -> None:
    governor = ThreadGovernor((1, 2))
    run(governor, {1: 0.040, 2: 0.030}, steps=20)
    busy = run(governor, {1: 0.045, 2: 0.300}, steps=60)
    assert busy[12:].count(2) <= 6
    idle = run(governor, {1: 0.040, 2: 0.030}, steps=3 * TRIAL_EVERY)
    assert idle[-1] == 2


def test_steps_of_another_size_are_judged_on_their_own() -> None:
    governor = ThreadGovernor((1, 2, 4))
    for _ in range(5 * TRIAL_EVERY):
        run(governor, {1: 0.010, 2: 0.012, 4: 0.020}, steps=1, num_tokens=1)
        run(governor, {1: 0.800, 2: 0.420, 4: 0.230}, steps=1, num_tokens=256)
    assert run(governor, {1: 0.010, 2: 0.012, 4: 0.020}, steps=20, num_tokens=1).count(1) >= 15
    assert run(governor, {1: 0.800, 2: 0.420, 4: 0.230}, steps=20, num_tokens=256).count(4) >= 15


def test_a_single_number_is_never_left() -> None:
    assert set(run(ThreadGovernor((3,)), {3: 0.01}, steps=200)) == {3}


@pytest.mark.parametrize("linear_type", ["Q4_1", "F16"])
def test_the_number_of_threads_does_not_change_a_bit(linear_type: str, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", TinyShape(linear_type=linear_type, embedding_type="Q8_0"))
    worker = load_worker(EngineConfig(checkpoint=str(path), num_blocks=60))
    token_ids = [(17 * i) % 320 for i in range(600)]
    plans = [
        step(planned("long", token_ids, blocks=range(38), num_samples=9)),
        step(*(planned(str(i), [i], first_position=i * 30, blocks=range(38)) for i in range(16))),
    ]
    usual = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 3, 4):
            torch.set_num_threads(num_threads)
            results.append([worker.runner.logits(plan) for plan in plans])
    finally:
        torch.set_num_threads(usual)
    for other in results[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(results[0], other, strict=True))


def test_threads_named_by_the_user_are_kept(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    usual = torch.get_num_threads()
    try:
        worker = load_worker(EngineConfig(checkpoint=str(path), num_blocks=4, num_threads=2))
        for _ in range(3 * TRIAL_EVERY):
            worker.execute(step(planned("a", [1], blocks=[0])))
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(usual)
