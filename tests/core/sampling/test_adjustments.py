"""Bias, penalties and forbidden stop tokens, against an original in Python's float64."""

import random
from array import array
from collections.abc import Sequence

import pytest
import torch

from core.request import SamplingParams
from core.sampling.adjustments import adjust, is_adjusted
from core.scheduler.plan import PlannedTokens, TokenHistory
from tests.fakes.plans import planned
from tests.gpu.devices import ON_EVERY_DEVICE

VOCAB_SIZE = 300


def item(
    params: SamplingParams, prompt_ids: Sequence[int] = (1,), output_ids: Sequence[int] = ()
) -> PlannedTokens:
    """The last known token of a request, as the scheduler plans it."""
    known = [*prompt_ids, *output_ids]
    early = len(output_ids) < params.min_tokens
    history = TokenHistory(
        num_prompt_tokens=len(prompt_ids), token_ids=array("i", known).tobytes() if params.looks_back else b""
    )
    return planned(
        "a",
        known[-1:],
        first_position=len(known) - 1,
        blocks=[0],
        sampling=params,
        history=history if params.looks_back or early else None,
    )


def adjusted_original(
    logits: Sequence[float], params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> list[float]:
    """Written from the options' documentation, one token at a time."""
    result = list(logits)
    for token_id, bias in params.logit_bias:
        result[token_id] += bias
    for token_id in {*prompt_ids, *output_ids}:
        penalty = params.repetition_penalty
        result[token_id] = result[token_id] / penalty if result[token_id] > 0 else result[token_id] * penalty
    for token_id in set(output_ids):
        result[token_id] -= params.frequency_penalty * list(output_ids).count(token_id)
        result[token_id] -= params.presence_penalty
    if len(output_ids) < params.min_tokens:
        for token_id in params.stop_token_ids:
            result[token_id] = -float("inf")
    return result


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=50,
        seed=0,
        temperature=0.0,
        logit_bias=tuple(
            (token_id, rng.uniform(-100, 100)) for token_id in rng.sample(range(VOCAB_SIZE), rng.randrange(6))
        ),
        repetition_penalty=rng.choice((1.0, 1.0, 0.7, 1.3, 2.0)),
        presence_penalty=rng.choice((0.0, 0.0, -2.0, 1.5)),
        frequency_penalty=rng.choice((0.0, 0.0, -0.3, 0.7)),
        min_tokens=rng.choice((0, 0, 3, 30)),
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.randrange(3))),
    )


@ON_EVERY_DEVICE
@pytest.mark.parametrize("seed", range(12))
def test_adjustments_equal_the_original_and_do_not_see_their_company(seed: int, device: str) -> None:
    rng = random.Random(seed)
    cases = [
        (
            random_params(rng),
            [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 40))],
            [rng.randrange(20) for _ in range(rng.randrange(20))],
        )
        for _ in range(rng.randint(1, 9))
    ]
    logits_RV = (torch.randn(len(cases), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 5).to(
        device
    )
    together_RV = logits_RV.clone()
    adjust(together_RV, [item(*case) for case in cases])
    for row, case in enumerate(cases):
        exact = torch.tensor(adjusted_original(logits_RV[row].tolist(), *case), dtype=torch.float64)
        torch.testing.assert_close(together_RV[row].double().cpu(), exact, rtol=1e-6, atol=1e-5)
        alone_1V = logits_RV[row : row + 1].clone()
        adjust(alone_1V, [item(*case)])
        assert torch.equal(alone_1V[0], together_RV[row])


def test_repetition_counts_prompt_and_output_the_other_penalties_the_output_alone() -> None:
    """Also in the very first step, where there is no output yet."""
    logits_1V = torch.full((1, 6), 2.0)
    repetition = SamplingParams(max_tokens=9, repetition_penalty=2.0)
    adjust(logits_1V, [item(repetition, [1, 1, 1, 2])])
    assert logits_1V.tolist() == [[2, 1, 1, 2, 2, 2]]
    logits_1V = torch.full((1, 6), 2.0)
    others = SamplingParams(max_tokens=9, presence_penalty=0.5, frequency_penalty=0.25)
    adjust(logits_1V, [item(others, [1] * 20, [3, 4, 3])])
    assert logits_1V.tolist() == [[2, 2, 2, 1.0, 1.25, 2]]


def test_repetition_pushes_a_negative_logit_down_too() -> None:
    logits_1V = torch.tensor([[-1.0, -1.0]])
    adjust(logits_1V, [item(SamplingParams(max_tokens=9, repetition_penalty=2.0), [1])])
    assert logits_1V.tolist() == [[-1.0, -2.0]]


def test_stop_tokens_may_come_once_there_are_min_tokens() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=(1, 5_000))
    for output_ids, forbidden in (([], True), ([3], True), ([3, 3], False)):
        logits_1V = torch.zeros(1, 4)
        one = item(params, [0, 0], output_ids)
        assert is_adjusted(one) == forbidden
        adjust(logits_1V, [one])
        assert (logits_1V[0, 1] == -torch.inf) == forbidden
        assert not logits_1V[0, [0, 2, 3]].any()
