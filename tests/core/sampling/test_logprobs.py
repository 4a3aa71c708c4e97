"""Log-probabilities: the model's own, in slices, without infinities."""

import math

import pytest
import torch

from core.request import TokenLogprob
from core.sampling.logprobs import LOWEST, ROWS_AT_A_TIME, score_rows
from tests.gpu.devices import ON_EVERY_DEVICE


def log_softmax_original(logits: list[float]) -> list[float]:
    top = max(logits)
    total = math.log(sum(math.exp(logit - top) for logit in logits))
    return [logit - top - total for logit in logits]


@ON_EVERY_DEVICE
@pytest.mark.parametrize("num_rows", [1, ROWS_AT_A_TIME, ROWS_AT_A_TIME + 1, 70])
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_scores_equal_the_original_and_do_not_depend_on_the_slice(num_rows, num_top, device):
    logits_RV = (torch.randn(num_rows, 500, generator=torch.Generator().manual_seed(3)) * 4).to(device)
    token_ids = [row * 7 % 500 for row in range(num_rows)]
    sizes: list[int] = []

    def logits_of(first: int, end: int) -> torch.Tensor:
        sizes.append(end - first)
        return logits_RV[first:end]

    scored = score_rows(logits_of, token_ids, num_top)
    assert sum(sizes) == num_rows
    assert max(sizes) <= ROWS_AT_A_TIME, "a whole prompt's logits at once"
    for row, (token_id, each) in enumerate(zip(token_ids, scored, strict=True)):
        exact = log_softmax_original(logits_RV[row].tolist())
        assert each.token_id == token_id
        assert each.logprob == pytest.approx(exact[token_id], abs=2e-6)
        ranked = sorted(range(500), key=lambda token_id: -exact[token_id])[:num_top]
        assert [token_id for token_id, _ in each.top] == ranked
        assert [value for _, value in each.top] == pytest.approx([exact[t] for t in ranked], abs=2e-6)
        alone = score_rows(lambda *_, row=row: logits_RV[row : row + 1], [token_id], num_top)
        assert alone == (each,)


@ON_EVERY_DEVICE
def test_of_equals_the_lowest_ids_are_told_first(device):
    logits_1V = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0]], device=device)
    (each,) = score_rows(lambda *_: logits_1V, [0], 4)
    assert [token_id for token_id, _ in each.top] == [1, 3, 2, 4]


@ON_EVERY_DEVICE
def test_an_impossible_token_has_the_lowest_number_and_no_infinity(device):
    logits_1V = torch.tensor([[0.0, -torch.inf, -3e38]], device=device)
    assert score_rows(lambda *_: logits_1V, [1], 3) == (
        TokenLogprob(1, LOWEST, ((0, 0.0), (1, LOWEST), (2, LOWEST))),
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_holds_no_number_is_an_error_and_never_a_score(bad):
    logits_1V = torch.full((1, 5), bad)
    with pytest.raises(FloatingPointError, match="no finite logit"):
        score_rows(lambda *_: logits_1V, [1], 3)


def test_more_likely_tokens_than_there_are_tokens_are_all_of_them():
    (each,) = score_rows(lambda *_: torch.zeros(1, 3), [1], 20)
    assert [token_id for token_id, _ in each.top] == [0, 1, 2]
