"""Top-k, typical and min-p against originals that treat one row in Python's float64."""

import math
import random

import pytest
import torch

from core.sampling.transforms import highest, likely_enough, scale, typical
from tests.gpu.devices import ON_EVERY_DEVICE


def highest_original(values: list[float], count: int) -> set[int]:
    ranked = sorted(range(len(values)), key=lambda token_id: (-values[token_id], token_id))
    return set(ranked[:count])


def typical_original(logits: list[float], typical_p: float) -> tuple[set[int], float]:
    """Section 4 of the paper; and how near the sum comes to `typical_p` without deciding it."""
    top = max(logits)
    total = sum(math.exp(logit - top) for logit in logits)
    logs = [logit - top - math.log(total) for logit in logits]
    shares = [math.exp(log) for log in logs]
    entropy = -sum(share * log for share, log in zip(shares, logs, strict=True) if share)
    ranked = sorted(range(len(logits)), key=lambda token_id: (abs(-logs[token_id] - entropy), token_id))
    kept: set[int] = set()
    reached, margin = 0.0, 1.0
    for token_id in ranked:
        margin = min(margin, abs(reached - typical_p))
        if kept and reached >= typical_p:
            break
        kept.add(token_id)
        reached += shares[token_id]
    return kept, margin


def marked(mask_V: torch.Tensor) -> set[int]:
    return set(mask_V.nonzero().flatten().tolist())


@ON_EVERY_DEVICE
@pytest.mark.parametrize("vocab_size", [1, 2, 50, 1000])
@pytest.mark.parametrize("levels", [2, 5, 10_000])
def test_the_highest_are_marked_and_of_equals_the_lowest_ids(vocab_size, levels, device):
    rng = random.Random(f"{vocab_size}/{levels}")
    rows = [[float(rng.randrange(levels)) for _ in range(vocab_size)] for _ in range(8)]
    counts = [rng.randint(1, vocab_size) for _ in rows]
    mask_RV = highest(torch.tensor(rows, device=device), torch.tensor(counts, device=device))
    for mask_V, row, count in zip(mask_RV, rows, counts, strict=True):
        assert marked(mask_V) == highest_original(row, count)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("vocab_size", [1, 2, 40, 700])
@pytest.mark.parametrize("spread", [0.3, 2.0, 8.0])
def test_typical_tokens_are_those_of_the_original(vocab_size, spread, device):
    rng = random.Random(f"{vocab_size}/{spread}")
    shares = [0.05, 0.2, 0.5, 0.9, 0.99]
    rows = [[rng.gauss(0, spread) for _ in range(vocab_size)] for _ in shares]
    logits_RV = torch.tensor(rows, device=device)
    mask_RV = typical(logits_RV, torch.tensor(shares, dtype=torch.float64, device=device))
    num_compared = 0
    for row, share in enumerate(shares):
        kept, margin = typical_original(logits_RV[row].tolist(), share)
        if margin > 1e-5:  # else float32 may decide otherwise
            assert marked(mask_RV[row]) == kept
            num_compared += 1
        alone_RV = typical(
            logits_RV[row : row + 1], torch.tensor([share], dtype=torch.float64, device=device)
        )
        assert torch.equal(alone_RV[0], mask_RV[row])
    assert num_compared >= 3


@ON_EVERY_DEVICE
def test_the_most_likely_token_may_be_too_unsurprising(device):
    """What makes typical sampling another thing than a nucleus."""
    logits_1V = torch.tensor([[0.45, *[0.055] * 10]], device=device).log()
    mask_1V = typical(logits_1V, torch.tensor([0.4], dtype=torch.float64, device=device))
    assert not mask_1V[0, 0]
    assert mask_1V.sum() == 8


@ON_EVERY_DEVICE
def test_shut_out_tokens_are_never_typical_unless_nothing_else_is_left(device):
    logits_1V = torch.tensor([[-torch.inf, 0.0, -torch.inf]], device=device)
    mask_1V = typical(logits_1V, torch.tensor([0.5], dtype=torch.float64, device=device))
    assert marked(mask_1V[0]) == {1}


@ON_EVERY_DEVICE
def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest(device):
    shares_RV = torch.tensor([[0.5, 0.25, 0.125, 0.125]] * 4, device=device)
    min_p_R = torch.tensor([0.0, 0.25, 0.2500001, 1.0], dtype=torch.float64, device=device)
    kept = (likely_enough(shares_RV, min_p_R) > 0).sum(-1)
    assert kept.tolist() == [4, 4, 2, 1]


@ON_EVERY_DEVICE
def test_scaling_leaves_the_order_and_sets_the_highest_to_zero(device):
    scaled = scale(
        torch.tensor([[3.0, 1.0], [3.0, 1.0]], device=device), torch.tensor([1.0, 0.5], device=device)
    )
    assert scaled.tolist() == [[0, -2], [0, -4]]
