"""What sampling options do to one step's rows, as pure functions over `[R, V]`.

Every function treats each row on its own. Source: temperature and nucleus sampling, arXiv:1904.09751.
"""

import torch
from torch import Tensor

PARTIAL_K = 1024
"""Nucleus sampling first looks at this many candidates; most nuclei are far smaller."""
SUM_ERROR = 1e-9
"""More than two float64 sums of the same probabilities, added in different orders, can differ."""


def probabilities(logits_RV: Tensor, temperature_R: Tensor) -> Tensor:
    """Softmax of `logits / temperature`, float32 `[R, V]`. Temperatures are above 0.

    The highest logit is subtracted first, so that a tiny temperature cannot overflow; one that
    float32 would round to 0 counts as the smallest that it holds.
    """
    shifted = logits_RV - logits_RV.amax(-1, keepdim=True)
    divisor_R = temperature_R.float().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.softmax(shifted / divisor_R.unsqueeze(-1), -1)


def draw(probabilities_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Inverse-CDF choice in the order of ids. Shapes: uniform in [0, 1) float64 `[R]` -> int64 `[R]`.

    Sums run in float64. A token of probability 0 is never drawn.
    """
    cumulative_RV = probabilities_RV.double().cumsum(-1)
    target_R1 = (uniform_R * cumulative_RV[:, -1]).unsqueeze(-1)
    picked_R = torch.searchsorted(cumulative_RV, target_R1, right=True).squeeze(-1)
    last_possible_R = probabilities_RV.shape[-1] - 1 - (probabilities_RV > 0).flip(-1).int().argmax(-1)
    return torch.minimum(picked_R, last_possible_R)


def draw_nucleus(probabilities_RV: Tensor, top_p_R: Tensor, uniform_R: Tensor) -> Tensor:
    """Choose among the fewest most likely tokens whose probabilities reach `top_p` (at least one).

    Equal probabilities are ordered by id.
    """
    candidates = min(PARTIAL_K, probabilities_RV.shape[-1])
    highest_RC = probabilities_RV.topk(candidates, -1).values
    # What is as unlikely as the last candidate may have equals outside: it must not be needed.
    above_RC = torch.where(highest_RC > highest_RC[:, -1:], highest_RC, 0)
    reached = above_RC.double().sum(-1) >= top_p_R + SUM_ERROR
    picked_R = torch.empty_like(top_p_R, dtype=torch.int64)
    for rows, count in ((reached.nonzero(), candidates), ((~reached).nonzero(), probabilities_RV.shape[-1])):
        if len(rows):
            index = rows.squeeze(-1)
            picked_R[index] = _draw_sorted(probabilities_RV[index], count, top_p_R[index], uniform_R[index])
    return picked_R


def _draw_sorted(probabilities_RV: Tensor, count: int, top_p_R: Tensor, uniform_R: Tensor) -> Tensor:
    ids_RC = probabilities_RV.topk(count, -1).indices.sort(-1).values
    ranked = probabilities_RV.gather(-1, ids_RC).sort(dim=-1, descending=True, stable=True)
    before_RV = ranked.values.double().cumsum(-1) - ranked.values
    nucleus_RV = torch.where(before_RV < top_p_R.unsqueeze(-1), ranked.values, 0)
    nucleus_RV[:, 0] = ranked.values[:, 0]
    place_R1 = draw(nucleus_RV, uniform_R).unsqueeze(-1)
    return ids_RC.gather(-1, ranked.indices.gather(-1, place_R1)).squeeze(-1)
