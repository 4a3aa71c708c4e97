"""What changes logits before anything is chosen: bias, then penalties, then forbidden stop tokens.

They touch single entries, so that their cost does not grow with the vocabulary, and treat each row on
its own. Source of the penalties: arXiv:1909.05858 section 4.1 (repetition); OpenAI's API reference
(presence and frequency).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from core.request import SamplingParams
from core.scheduler.plan import PlannedTokens


def is_adjusted(item: PlannedTokens) -> bool:
    """Whether the item's logits are changed at all."""
    return item.history is not None or bool(_params(item).logit_bias)


def adjust(logits_RV: Tensor, items: Sequence[PlannedTokens]) -> None:
    """Apply every item's adjustments to its row, in place, in the order above.

    Shapes: logits float32 `[R, V]`, one row per item.
    """
    bias = [
        (row, token_id, value)
        for row, item in enumerate(items)
        for token_id, value in _params(item).logit_bias
    ]
    if bias:
        rows, token_ids, values = zip(*bias, strict=True)
        place = _place(rows, token_ids, device=logits_RV.device)
        logits_RV[place] += torch.tensor(values, dtype=torch.float32, device=logits_RV.device)
    for row, item in enumerate(items):
        if item.history is not None and item.history.token_ids:
            _penalise(logits_RV[row], item)
    forbidden = [(row, token_id) for row, item in enumerate(items) for token_id in _forbidden(item)]
    if forbidden:
        rows, token_ids = zip(*forbidden, strict=True)
        known = [place for place, token_id in enumerate(token_ids) if token_id < logits_RV.shape[-1]]
        place = _place([rows[i] for i in known], [token_ids[i] for i in known], device=logits_RV.device)
        logits_RV[place] = -torch.inf


def penalise(
    logits_N: Tensor, *, count_N: Tensor, repetition: float, presence: float, frequency: float
) -> Tensor:
    """The logits of tokens that were seen, `count` times of it in the output, after their penalties.

    Repetition divides what is above 0 and multiplies what is below; the others are subtracted.
    """
    logits_N = torch.where(logits_N > 0, logits_N / repetition, logits_N * repetition)
    logits_N = logits_N - frequency * count_N
    return logits_N - presence * (count_N > 0)


def _penalise(logits_V: Tensor, item: PlannedTokens) -> None:
    history, params = item.history, _params(item)
    assert history is not None
    seen = torch.frombuffer(bytearray(history.token_ids), dtype=torch.int32).to(logits_V.device).long()
    seen_ids_N, in_history_N = torch.unique(seen, return_inverse=True)
    count_N = in_history_N[history.num_prompt_tokens :].bincount(minlength=len(seen_ids_N))
    logits_V[seen_ids_N] = penalise(
        logits_V[seen_ids_N],
        count_N=count_N,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
    )


def _forbidden(item: PlannedTokens) -> tuple[int, ...]:
    """Stop tokens that would come before `min_tokens`."""
    params = _params(item)
    if item.history is None or not params.min_tokens:
        return ()
    num_output_tokens = item.first_position + len(item.token_ids) - item.history.num_prompt_tokens
    return params.stop_token_ids if num_output_tokens < params.min_tokens else ()


def _place(rows: Sequence[int], token_ids: Sequence[int], *, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(numbers, dtype=torch.int64, device=device) for numbers in (rows, token_ids))


def _params(item: PlannedTokens) -> SamplingParams:
    assert item.sampling is not None
    return item.sampling
