"""What a step gives besides sampled tokens: scores of known tokens, and sums of hidden states."""

from array import array
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from core.sampling.logprobs import score_rows
from core.scheduler.plan import PlannedTokens, SampledTokens

LogitsOf = Callable[[Tensor], Tensor]
"""Hidden states float32 `[R, E]` -> logits float32 `[R, V]`."""


def complete_answers(
    items: Sequence[PlannedTokens],
    hidden_TE: Tensor,
    samples: Sequence[SampledTokens],
    logits_of: LogitsOf,
) -> tuple[SampledTokens, ...]:
    """One answer per item that `answers`, in plan order, given those of the items that sample."""
    if all(item.scoring is None and item.pooling is None for item in items):
        return tuple(samples)
    sampled = iter(samples)
    answers: list[SampledTokens] = []
    first_row = 0
    for item in items:
        rows_TE = hidden_TE[first_row : first_row + len(item.token_ids)]
        first_row += len(item.token_ids)
        if item.answers:
            sample = next(sampled) if item.num_samples else SampledTokens(request_id=item.request_id)
            answers.append(_complete(sample, item, rows_TE, logits_of))
    return tuple(answers)


def pool(rows_TE: Tensor, total: bytes) -> bytes:
    """Add rows to a sum, one after the other in float64: the same bits however they come in pieces.

    Args:
        total: native float64 `[E]`; empty for 0.
    """
    rows_TE = rows_TE.cpu().double()
    total_E = torch.tensor(array("d", total), dtype=torch.float64) if total else torch.zeros_like(rows_TE[0])
    for row_E in rows_TE:
        total_E = total_E + row_E
    return array("d", total_E.tolist()).tobytes()


def _complete(
    sample: SampledTokens, item: PlannedTokens, rows_TE: Tensor, logits_of: LogitsOf
) -> SampledTokens:
    """A sample with the item's scores and sum; its error, if it has one, goes first."""
    if sample.error is not None:
        return sample
    if item.pooling is not None:
        sample = msgspec.structs.replace(sample, pooled=pool(rows_TE, item.pooling))
    if item.scoring is None:
        return sample
    scoring = item.scoring
    try:
        scored = score_rows(
            lambda first, end: logits_of(rows_TE[first:end]), scoring.token_ids, scoring.num_top
        )
    except FloatingPointError as error:
        return SampledTokens(request_id=item.request_id, error=str(error))
    return msgspec.structs.replace(sample, scored=scored)
