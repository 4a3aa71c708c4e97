"""One pass over the rows of a step: greedy rows never pay for a softmax, a bad row fails alone."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from core.request import SamplingParams
from core.sampling.transforms import draw, draw_nucleus, probabilities
from core.scheduler.plan import PlannedTokens, SampledTokens


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
    highest_R, token_ids_R = logits_RV.max(-1)
    usable = torch.isfinite(highest_R).tolist()
    drawn = [row for row, item in enumerate(items) if usable[row] and _params(item).temperature > 0]
    if drawn:
        token_ids_R[drawn] = _draw(logits_RV[drawn], [items[row] for row in drawn])
    return tuple(
        SampledTokens(request_id=item.request_id, token_ids=(token_id,))
        if finite
        else SampledTokens(request_id=item.request_id, error="the model gave no finite logit")
        for item, token_id, finite in zip(items, token_ids_R.tolist(), usable, strict=True)
    )


def _draw(logits_RV: Tensor, items: Sequence[PlannedTokens]) -> Tensor:
    params = [_params(item) for item in items]
    device = logits_RV.device
    temperature_R = torch.tensor([p.temperature for p in params], device=device)
    uniform_R = torch.tensor([_uniform(item) for item in items], dtype=torch.float64, device=device)
    top_p_R = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
    probabilities_RV = probabilities(logits_RV, temperature_R)
    if all(p.top_p >= 1 for p in params):
        return draw(probabilities_RV, uniform_R)
    if all(p.top_p < 1 for p in params):
        return draw_nucleus(probabilities_RV, top_p_R, uniform_R)
    token_ids_R = torch.empty(len(items), dtype=torch.int64, device=device)
    whole = top_p_R >= 1
    token_ids_R[whole] = draw(probabilities_RV[whole], uniform_R[whole])
    token_ids_R[~whole] = draw_nucleus(probabilities_RV[~whole], top_p_R[~whole], uniform_R[~whole])
    return token_ids_R


def _uniform(item: PlannedTokens) -> float:
    seed = _params(item).seed
    assert seed is not None, "the engine draws a seed where the request has none"
    return uniform(seed, item.first_position + len(item.token_ids))


def _params(item: PlannedTokens) -> SamplingParams:
    assert item.sampling is not None
    return item.sampling
