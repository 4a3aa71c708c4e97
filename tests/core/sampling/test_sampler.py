"""Sampling a step's rows: each depends on its own logits, options and position; a bad row fails alone."""

import math
import random

import pytest
import torch

from core.request import SamplingParams
from core.sampling.sampler import sample_rows, uniform
from core.scheduler.plan import PlannedTokens
from tests.fakes.plans import planned
from tests.gpu.devices import ON_EVERY_DEVICE


def item(
    name: str = "a", *, position: int = 0, temperature: float = 0.0, top_p: float = 1.0, seed: int | None = 0
):
    sampling = SamplingParams(max_tokens=1, temperature=temperature, top_p=top_p, seed=seed)
    return planned(name, [1], first_position=position, blocks=[0], sampling=sampling)


def tokens(logits_RV: torch.Tensor, items: list[PlannedTokens]) -> list[int]:
    samples = sample_rows(logits_RV, items)
    assert [sample.request_id for sample in samples] == [item.request_id for item in items]
    assert not [sample.error for sample in samples if sample.error]
    return [token_id for sample in samples for token_id in sample.token_ids]


@ON_EVERY_DEVICE
@pytest.mark.parametrize("vocab_size", [4, 33, 1025, 50000])
def test_greedy_takes_the_highest_logit_and_the_lowest_id_of_equals(vocab_size, device):
    rng = random.Random(vocab_size)
    for num_rows in (1, 2, 9):
        logits_RV = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)).to(device)
        expected = []
        for row in range(num_rows):
            equals = sorted(rng.sample(range(vocab_size), 3))
            logits_RV[row, equals] = 20.0
            expected.append(equals[0])
        assert tokens(logits_RV, [item(str(row)) for row in range(num_rows)]) == expected
    assert tokens(torch.zeros(3, vocab_size, device=device), [item("0"), item("1"), item("2")]) == [0, 0, 0]


@ON_EVERY_DEVICE
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_tokens_are_drawn_as_often_as_they_are_likely(top_p, device):
    """A chi-square test over seeds; with fixed seeds it always gives the same number."""
    logits = [2.0, 0.0, 1.0, -1.0, 0.5, -6.0]
    temperature, num_draws = 0.8, 20_000
    items = [item(str(seed), temperature=temperature, top_p=top_p, seed=seed) for seed in range(num_draws)]
    drawn = tokens(torch.tensor([logits], device=device).repeat(num_draws, 1), items)

    weights = [math.exp(logit / temperature) for logit in logits]
    shares = {token_id: weight / sum(weights) for token_id, weight in enumerate(weights)}
    if top_p < 1:  # 0.71, 0.20, 0.11: what reaches 0.9
        ranked = sorted(shares, key=lambda token_id: -shares[token_id])
        sizes = [sum(shares[token_id] for token_id in ranked[:count]) for count in range(len(ranked))]
        shares = {
            token_id: shares[token_id]
            for token_id, before in zip(ranked, sizes, strict=True)
            if before < top_p
        }
        assert 1 < len(shares) < len(logits)
    assert set(drawn) <= set(shares)
    expected = {token_id: num_draws * share / sum(shares.values()) for token_id, share in shares.items()}
    chi_square = sum((drawn.count(token_id) - count) ** 2 / count for token_id, count in expected.items())
    freedom = len(expected) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def test_the_numbers_behind_the_draws_are_uniform_and_depend_on_seed_and_position():
    numbers = [uniform(seed, position) for seed in range(200) for position in range(50)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    counts = [sum(place <= number * 20 < place + 1 for number in numbers) for place in range(20)]
    assert sum((count - 500) ** 2 / 500 for count in counts) < 19 + 5 * math.sqrt(2 * 19)
    assert uniform(7, 3) == uniform(7, 3)


@ON_EVERY_DEVICE
def test_a_seed_gives_the_same_token_whatever_else_is_in_the_batch(device):
    rng = random.Random(6)
    for vocab_size in (5, 300, 3000):
        for _ in range(8):
            items = [
                item(
                    str(row),
                    position=rng.randrange(500),
                    temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
                    top_p=rng.choice([1.0, 1.0, 0.95, 0.4, 1e-6]),
                    seed=rng.randrange(2**63),
                )
                for row in range(rng.randint(1, 12))
            ]
            seed = rng.randrange(1 << 30)
            logits_RV = torch.randn(len(items), vocab_size, generator=torch.Generator().manual_seed(seed)).to(
                device
            )
            logits_RV *= rng.choice([0.1, 2.0, 20.0])
            alone = [tokens(logits_RV[row : row + 1], [one])[0] for row, one in enumerate(items)]
            assert tokens(logits_RV, items) == alone
            order = rng.sample(range(len(items)), len(items))
            assert tokens(logits_RV[order], [items[row] for row in order]) == [alone[row] for row in order]


@ON_EVERY_DEVICE
def test_another_seed_and_another_position_draw_anew(device):
    logits_RV = torch.zeros(50, 1000, device=device)
    by_position = tokens(logits_RV, [item(str(i), position=i, temperature=1.0) for i in range(50)])
    by_seed = tokens(logits_RV, [item(str(i), seed=i, temperature=1.0) for i in range(50)])
    assert len(set(by_position)) > 40
    assert len(set(by_seed)) > 40


def test_the_position_that_counts_is_the_one_the_token_will_stand_at():
    """So that a prompt computed in other chunks, or again after preemption, goes on with the same draw."""
    logits_1V = torch.zeros(1, 1000)
    sampling = SamplingParams(max_tokens=1, temperature=1.0, seed=11)
    whole = planned("a", range(10), blocks=[0], sampling=sampling)
    last = planned("a", [9], first_position=9, blocks=[0], sampling=sampling)
    assert tokens(logits_1V, [whole]) == tokens(logits_1V, [last])


@ON_EVERY_DEVICE
@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-60, 0.7])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_forbidden_token_is_never_chosen(temperature, top_p, device):
    logits_RV = torch.full((40, 2000), float("-inf"), device=device)
    logits_RV[:, [5, 1900]] = torch.tensor([1.0, 0.5], device=device)
    drawn = tokens(logits_RV, [item(str(i), temperature=temperature, top_p=top_p, seed=i) for i in range(40)])
    assert set(drawn) == ({5, 1900} if temperature == 0.7 else {5})


@ON_EVERY_DEVICE
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_that_holds_no_number_fails_alone(bad, temperature, device):
    logits_RV = torch.randn(5, 100, generator=torch.Generator().manual_seed(1)).to(device)
    items = [item(str(row), temperature=temperature, top_p=0.9, seed=row) for row in range(5)]
    expected = tokens(logits_RV, items)
    logits_RV[2] = bad
    samples = sample_rows(logits_RV, items)
    assert (samples[2].token_ids, samples[2].error) == ((), "the model gave no finite logit")
    assert [s.token_ids for s in samples if not s.error] == [
        (t,) for row, t in enumerate(expected) if row != 2
    ]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_single_bad_logit_spoils_its_row(bad):
    logits_RV = torch.zeros(2, 100)
    logits_RV[1, 99] = bad
    samples = sample_rows(logits_RV, [item("a"), item("b")])
    assert [sample.error for sample in samples] == [None, "the model gave no finite logit"]


BROKEN: dict[str, dict[str, object]] = {
    "text": {"temperature": "hot"},
    "no seed": {"seed": None},
    "top_p": {"top_p": "most"},
}


def broken(name: str, how: str) -> PlannedTokens:
    """An item that the batched pass cannot compute: nothing checks types or the missing seed before it."""
    options: dict[str, object] = {"max_tokens": 1, "temperature": 0.8, "seed": 1, **BROKEN[how]}
    return planned(name, [1], blocks=[0], sampling=SamplingParams(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_row_that_breaks_the_batch_fails_alone_and_the_others_are_as_ever(how, place):
    logits_RV = torch.randn(5, 3000, generator=torch.Generator().manual_seed(1))
    items = [item(str(row), temperature=0.5 * (row % 3), top_p=0.9, seed=row) for row in range(5)]
    expected = tokens(logits_RV, items)
    items[place] = broken(str(place), how)
    samples = sample_rows(logits_RV, items)
    assert samples[place].token_ids == ()
    assert str(samples[place].error).startswith("sampling failed: ")
    assert [sample.token_ids for row, sample in enumerate(samples) if row != place] == [
        (token_id,) for row, token_id in enumerate(expected) if row != place
    ]


def test_rows_that_are_not_one_per_item_are_our_own_mistake():
    """Else the row-by-row retry would give requests each other's tokens."""
    with pytest.raises(AssertionError, match="3 rows for 2 items"):
        sample_rows(torch.zeros(3, 10), [item("a"), item("b")])


def test_a_step_without_sampled_rows_has_no_samples():
    assert sample_rows(torch.zeros(0, 10), []) == ()
