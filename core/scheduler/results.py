"""From an item's result to what its request knows and gives."""

import msgspec

from core.request import FinishReason, Request, TokenOutput
from core.scheduler.plan import PlannedTokens, SampledTokens


def append_tokens(
    request: Request, token_ids: tuple[int, ...]
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Add sampled tokens up to the one that ends the request, if one does."""
    assert token_ids, "a sample without tokens and without an error"
    sampling, known = request.sampling, request.token_ids
    num_left = request.num_prompt_tokens + sampling.max_tokens - len(known)
    for count, token_id in enumerate(token_ids, 1):
        known.append(token_id)
        if token_id in sampling.stop_token_ids:
            return token_ids[:count], FinishReason.STOP
        if count == num_left:
            return token_ids[:count], FinishReason.LENGTH
    return token_ids, None


def keep_asides(request: Request, item: PlannedTokens, sample: SampledTokens) -> None:
    """Keep what an item gave besides tokens: scores of the prompt, and the sum of its hidden states.

    Scores that a preempted request has from its first attempt are not taken twice.
    """
    request.pooled = sample.pooled
    if item.scoring is not None:
        assert len(sample.scored) == len(item.scoring.token_ids)
        num_known = request.num_scored_tokens - item.first_position
        assert num_known >= 0, "scores are missing"
        request.prompt_logprobs += sample.scored[num_known:]
        request.num_scored_tokens += len(sample.scored[num_known:])


def with_scores(output: TokenOutput, request: Request, sample: SampledTokens) -> TokenOutput:
    """The output with what was asked for about its tokens and, the first time, about the prompt's."""
    prompt_logprobs, request.prompt_logprobs = tuple(request.prompt_logprobs), []
    return msgspec.structs.replace(
        output, logprobs=sample.logprobs[: len(output.token_ids)], prompt_logprobs=prompt_logprobs
    )
