"""One pass over the rows of a step: greedy rows never pay for a softmax, a bad row fails alone.

The order of the options, the same for every row: logit_bias; repetition, frequency and presence
penalty; min_tokens (`adjustments`); then, unless greedy, temperature, top_k, typical_p, top_p and
min_p (`transforms`). Log-probabilities are those of the model, before all of them.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from core.request import SamplingParams
from core.sampling.adjustments import adjust, is_adjusted
from core.sampling.logprobs import score_rows
from core.sampling.transforms import draw, draw_nucleus, highest, likely_enough, scale, typical
from core.scheduler.plan import PlannedTokens, SampledTokens

NO_LOGIT = "the model gave no finite logit"
NOTHING_LEFT = "the options of this request leave no token to choose"


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is a function of the request's seed and the token's position alone.

    So the same seed gives the same output whatever else runs, and a resumed request goes on where
    it was. Source: BLAKE2b (RFC 7693) over both numbers; the top 53 bits.
    """
    digest = hashlib.blake2b(b"%d:%d" % (seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def sample_rows(logits_RV: Tensor, items: Sequence[PlannedTokens]) -> tuple[SampledTokens, ...]:
    """Choose one token per row. Rows that hold no number end with an error.

    Shapes: logits float32 `[R, V]`, one row per item, in order.
    """
    assert len(logits_RV) == len(items), f"{len(logits_RV)} rows for {len(items)} items"
    try:
        return _sample_batch(logits_RV, items)
    except Exception:  # a row broke the batched pass: find it, so that the others go on
        return tuple(_sample_alone(logits_RV[i : i + 1], item) for i, item in enumerate(items))


def _sample_alone(logits_1V: Tensor, item: PlannedTokens) -> SampledTokens:
    try:
        return _sample_batch(logits_1V, [item])[0]
    except Exception as error:
        return SampledTokens(request_id=item.request_id, error=f"sampling failed: {error}")


def _sample_batch(logits_RV: Tensor, items: Sequence[PlannedTokens]) -> tuple[SampledTokens, ...]:
    logits_RV = logits_RV.float()
    adjusted = [row for row, item in enumerate(items) if is_adjusted(item)]
    best_R, token_ids_R = logits_RV.max(-1)
    usable = torch.isfinite(best_R).tolist()
    options_RV = logits_RV
    if adjusted:
        options_RV = logits_RV.clone()
        changed_RV = options_RV[adjusted]
        adjust(changed_RV, [items[row] for row in adjusted])
        options_RV[adjusted] = changed_RV
        best_R[adjusted], token_ids_R[adjusted] = changed_RV.max(-1)
    possible = torch.isfinite(best_R).tolist()
    drawn = [row for row, item in enumerate(items) if possible[row] and _params(item).temperature > 0]
    if drawn:
        token_ids_R[drawn] = _draw(options_RV[drawn], [items[row] for row in drawn])
    return tuple(
        _sampled(item, token_id, logits_RV[row : row + 1])
        if possible[row]
        else SampledTokens(request_id=item.request_id, error=NOTHING_LEFT if usable[row] else NO_LOGIT)
        for row, (item, token_id) in enumerate(zip(items, token_ids_R.tolist(), strict=True))
    )


def _sampled(item: PlannedTokens, token_id: int, logits_1V: Tensor) -> SampledTokens:
    """A chosen token, and what the model itself thought of it where that is asked for."""
    num_top = _params(item).num_logprobs
    if num_top is None:
        return SampledTokens(request_id=item.request_id, token_ids=(token_id,))
    scored = score_rows(lambda *_: logits_1V, (token_id,), num_top)
    return SampledTokens(request_id=item.request_id, token_ids=(token_id,), logprobs=scored)


def _draw(logits_RV: Tensor, items: Sequence[PlannedTokens]) -> Tensor:
    params = [_params(item) for item in items]
    device = logits_RV.device
    temperature_R = torch.tensor([p.temperature for p in params], device=device)
    uniform_R = torch.tensor([_uniform(item) for item in items], dtype=torch.float64, device=device)
    top_p_R = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
    min_p_R = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device)
    probabilities_RV = torch.softmax(_narrow(scale(logits_RV, temperature_R), params), -1)
    token_ids_R = torch.empty(len(items), dtype=torch.int64, device=device)
    for rows, nucleus in ((top_p_R >= 1, False), (top_p_R < 1, True)):
        if rows.any():
            some_RV = probabilities_RV if rows.all() else probabilities_RV[rows]
            if nucleus:
                drawn_R = draw_nucleus(some_RV, top_p_R[rows], uniform_R[rows], min_p_R=min_p_R[rows])
            else:
                drawn_R = draw(_without_unlikely(some_RV, min_p_R[rows]), uniform_R[rows])
            token_ids_R[rows] = drawn_R
    return token_ids_R


def _narrow(scaled_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Shut out what top-k, and then typical sampling, leave out, in the rows that use them."""
    vocab_size, device = scaled_RV.shape[-1], scaled_RV.device
    cut = [row for row, p in enumerate(params) if 0 < p.top_k < vocab_size]
    if cut:
        top_k_R = torch.tensor([params[row].top_k for row in cut], dtype=torch.int64, device=device)
        some_RV = scaled_RV[cut]
        scaled_RV[cut] = some_RV.masked_fill(~highest(some_RV, top_k_R), -torch.inf)
    cut = [row for row, p in enumerate(params) if p.typical_p < 1]
    if cut:
        typical_p_R = torch.tensor([params[row].typical_p for row in cut], dtype=torch.float64, device=device)
        some_RV = scaled_RV[cut]
        scaled_RV[cut] = some_RV.masked_fill(~typical(some_RV, typical_p_R), -torch.inf)
    return scaled_RV


def _without_unlikely(probabilities_RV: Tensor, min_p_R: Tensor) -> Tensor:
    return likely_enough(probabilities_RV, min_p_R) if (min_p_R > 0).any() else probabilities_RV


def _uniform(item: PlannedTokens) -> float:
    seed = _params(item).seed
    assert seed is not None, "the engine draws a seed where the request has none"
    return uniform(seed, item.first_position + len(item.token_ids))


def _params(item: PlannedTokens) -> SamplingParams:
    assert item.sampling is not None
    return item.sampling
