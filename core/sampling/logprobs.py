"""Log-probabilities of known tokens, from the logits as the model gave them.

A logarithm of 0 is told as `LOWEST`: JSON has no infinity. Only rows that ask come here.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from core.request import TokenLogprob
from core.sampling.transforms import highest

LOWEST = -9999.0
ROWS_AT_A_TIME = 16
"""Rows of logits that exist at a time, whatever the prompt's length: 3 MiB for a vocabulary of 50,000."""


def score_rows(
    logits_of: Callable[[int, int], Tensor], token_ids: Sequence[int], num_top: int
) -> tuple[TokenLogprob, ...]:
    """Score one token per row, slice by slice.

    Args:
        logits_of: rows `first` to `end` of the logits, float32 `[R, V]`, made when they are needed.
        num_top: how many of the most likely tokens to tell beside each; of equals the lowest ids first.

    Raises:
        FloatingPointError: a row holds no finite logit.
    """
    scored: list[TokenLogprob] = []
    for first in range(0, len(token_ids), ROWS_AT_A_TIME):
        end = min(first + ROWS_AT_A_TIME, len(token_ids))
        scored += _score(logits_of(first, end), token_ids[first:end], num_top)
    return tuple(scored)


def _score(logits_RV: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    if not torch.isfinite(logits_RV.amax(-1)).all():
        raise FloatingPointError("the model gave no finite logit")
    log_RV = torch.log_softmax(logits_RV, -1).clamp(min=LOWEST)
    ids_R1 = torch.tensor(token_ids, dtype=torch.int64, device=log_RV.device).unsqueeze(-1)
    chosen = log_RV.gather(-1, ids_R1).squeeze(-1).tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(chosen)
    num_top = min(num_top, log_RV.shape[-1])
    if num_top:
        marked_RV = highest(log_RV, torch.full((len(chosen),), num_top, device=log_RV.device))
        ids_RN = marked_RV.nonzero()[:, 1].view(len(chosen), num_top)
        ranked = log_RV.gather(-1, ids_RN).sort(dim=-1, descending=True, stable=True)
        ranked_ids = ids_RN.gather(-1, ranked.indices).tolist()
        tops = [
            tuple(zip(ids, values, strict=True))
            for ids, values in zip(ranked_ids, ranked.values.tolist(), strict=True)
        ]
    return [TokenLogprob(*each) for each in zip(token_ids, chosen, tops, strict=True)]
