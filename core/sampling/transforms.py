"""From adjusted logits to a token: temperature, then top-k, typical, top-p and min-p, in this order.

Each works on what the one before it left, made to sum to 1 again. Pure functions over `[R, V]` that
treat every row on its own, bit for bit; whatever they add up they add in one order (`cumsum`: torch
may cut a `sum` of a lone row into pieces). Source: nucleus sampling arXiv:1904.09751, typical
sampling arXiv:2202.00666, min-p arXiv:2407.01082.
"""

import torch
from torch import Tensor

PARTIAL_K = 1024
"""Nucleus sampling first looks at this many candidates; most nuclei are far smaller."""
SUM_ERROR = 1e-9
"""More than two float64 sums of the same probabilities, added in different orders, can differ."""


def scale(logits_RV: Tensor, temperature_R: Tensor) -> Tensor:
    """`logits / temperature`, shifted so that the highest is 0, float32 `[R, V]`. Temperatures are above 0.

    The highest logit is subtracted first, so that a tiny temperature cannot overflow; one that
    float32 would round to 0 counts as the smallest that it holds.
    """
    shifted = logits_RV - logits_RV.amax(-1, keepdim=True)
    divisor_R = temperature_R.float().clamp(min=torch.finfo(torch.float32).tiny)
    return shifted / divisor_R.unsqueeze(-1)


def probabilities(logits_RV: Tensor, temperature_R: Tensor) -> Tensor:
    """Softmax of `logits / temperature`, float32 `[R, V]`."""
    return torch.softmax(scale(logits_RV, temperature_R), -1)


def highest(values_RV: Tensor, count_R: Tensor) -> Tensor:
    """Mark the `count` highest values of each row; of equals those with the lowest ids.

    Partial selection: nothing is sorted beyond the largest count. Shapes: count int64 `[R]`, at
    least 1 and at most V -> bool `[R, V]`.
    """
    best_RC = values_RV.topk(int(count_R.max()), -1).values
    lowest_R1 = best_RC.gather(-1, (count_R - 1).unsqueeze(-1))
    above_RV = values_RV > lowest_R1
    equal_RV = values_RV == lowest_R1
    num_equal_R1 = count_R.unsqueeze(-1) - above_RV.sum(-1, keepdim=True)
    return above_RV | (equal_RV & (equal_RV.cumsum(-1) <= num_equal_R1))


def typical(logits_RV: Tensor, typical_p_R: Tensor) -> Tensor:
    """Mark the fewest tokens (at least one) that reach `typical_p` together, least surprising first.

    A token's surprise is the distance of its information from the row's entropy; equals are ordered by id.
    """
    log_RV = torch.log_softmax(logits_RV, -1).double()
    probabilities_RV = torch.softmax(logits_RV, -1).double()
    terms_RV = torch.where(probabilities_RV > 0, -probabilities_RV * log_RV, 0)
    entropy_R1 = terms_RV.cumsum(-1)[:, -1:]
    surprise_RV = (-log_RV - entropy_R1).abs()
    order_RV = surprise_RV.sort(dim=-1, stable=True).indices
    ranked_RV = probabilities_RV.gather(-1, order_RV)
    kept_RV = ranked_RV.cumsum(-1) - ranked_RV < typical_p_R.unsqueeze(-1)
    kept_RV[:, 0] = True
    return torch.zeros_like(kept_RV).scatter(-1, order_RV, kept_RV)


def likely_enough(probabilities_RV: Tensor, min_p_R: Tensor) -> Tensor:
    """Probabilities at least `min_p` times as high as the row's highest; 0 for the others."""
    lowest_R1 = probabilities_RV.amax(-1, keepdim=True).double() * min_p_R.unsqueeze(-1)
    return torch.where(probabilities_RV.double() >= lowest_R1, probabilities_RV, 0)


def draw(probabilities_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Inverse-CDF choice in the order of ids. Shapes: uniform in [0, 1) float64 `[R]` -> int64 `[R]`.

    Sums run in float64. A token of probability 0 is never drawn.
    """
    cumulative_RV = probabilities_RV.double().cumsum(-1)
    target_R1 = (uniform_R * cumulative_RV[:, -1]).unsqueeze(-1)
    picked_R = torch.searchsorted(cumulative_RV, target_R1, right=True).squeeze(-1)
    last_possible_R = probabilities_RV.shape[-1] - 1 - (probabilities_RV > 0).flip(-1).int().argmax(-1)
    return torch.minimum(picked_R, last_possible_R)


def draw_nucleus(
    probabilities_RV: Tensor, top_p_R: Tensor, uniform_R: Tensor, *, min_p_R: Tensor | None = None
) -> Tensor:
    """Choose among the fewest most likely tokens whose probabilities reach `top_p` (at least one).

    Equal probabilities are ordered by id. `min_p` then applies within them.
    """
    if min_p_R is None:
        min_p_R = torch.zeros_like(top_p_R)
    candidates = min(PARTIAL_K, probabilities_RV.shape[-1])
    highest_RC = probabilities_RV.topk(candidates, -1).values
    # What is as unlikely as the last candidate may have equals outside: it must not be needed.
    above_RC = torch.where(highest_RC > highest_RC[:, -1:], highest_RC, 0)
    reached = above_RC.double().sum(-1) >= top_p_R + SUM_ERROR
    picked_R = torch.empty_like(top_p_R, dtype=torch.int64)
    for rows, count in ((reached.nonzero(), candidates), ((~reached).nonzero(), probabilities_RV.shape[-1])):
        if len(rows):
            index = rows.squeeze(-1)
            picked_R[index] = _draw_sorted(
                probabilities_RV[index], count, top_p_R[index], uniform_R[index], min_p_R[index]
            )
    return picked_R


def _draw_sorted(
    probabilities_RV: Tensor, count: int, top_p_R: Tensor, uniform_R: Tensor, min_p_R: Tensor
) -> Tensor:
    ids_RC = probabilities_RV.topk(count, -1).indices.sort(-1).values
    ranked = probabilities_RV.gather(-1, ids_RC).sort(dim=-1, descending=True, stable=True)
    before_RV = ranked.values.double().cumsum(-1) - ranked.values
    nucleus_RV = torch.where(before_RV < top_p_R.unsqueeze(-1), ranked.values, 0)
    nucleus_RV[:, 0] = ranked.values[:, 0]
    place_R1 = draw(likely_enough(nucleus_RV, min_p_R), uniform_R).unsqueeze(-1)
    return ids_RC.gather(-1, ranked.indices.gather(-1, place_R1)).squeeze(-1)
