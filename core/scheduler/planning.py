"""From a request's progress to the tokens of it that a step computes."""

import msgspec

from core.request import Request
from core.scheduler.plan import PlannedTokens, PromptScoring, TokenHistory


class Draft:
    """A step while it is being planned."""

    __slots__ = ("_has_prompt", "_max_prefill_tokens", "_whole_prompts", "budget", "items", "requests")

    def __init__(self, budget: int, max_prefill_tokens: int, *, whole_prompts: bool) -> None:
        self.budget = budget
        self.items: list[PlannedTokens] = []
        self.requests: list[Request] = []
        self._max_prefill_tokens = max_prefill_tokens
        self._whole_prompts = whole_prompts
        self._has_prompt = False

    def add_prompt(self, request: Request) -> None:
        """Reserve as many of a request's known tokens as one request may have, and the budget lasts for.

        Where prompts are computed whole, the first one is taken whatever its length; one that no longer
        fits ends the step's budget, so that none behind it goes before.
        """
        num_tokens = request.num_uncomputed_tokens
        if not self._whole_prompts:
            num_tokens = min(num_tokens, self._max_prefill_tokens, self.budget)
        elif num_tokens > self.budget and self._has_prompt:
            self.budget = 0
            return
        self._has_prompt = True
        self.add(request, num_tokens)
        self.budget = max(0, self.budget)

    def add(self, request: Request, num_tokens: int) -> None:
        """Reserve the next `num_tokens` tokens of a request, for which it has blocks."""
        first = request.num_computed_tokens + request.num_scheduled_tokens
        end = first + num_tokens
        known = request.token_ids
        samples = end == len(known) and not request.pools
        item = PlannedTokens(
            request_id=request.request_id,
            token_ids=(known[first],) if num_tokens == 1 else tuple(known[first:end]),
            first_position=first,
            block_table=request.block_table.tobytes(),
            num_samples=1 if samples else 0,
            sampling=request.sampling if samples else None,
        )
        self.items.append(item if request.is_plain else _with_asides(item, request))
        self.requests.append(request)
        self.budget -= num_tokens
        request.num_scheduled_tokens += num_tokens


def _with_asides(item: PlannedTokens, request: Request) -> PlannedTokens:
    """The item with what options need beyond the tokens themselves."""
    first = item.first_position
    return msgspec.structs.replace(
        item,
        history=_history(request) if item.num_samples else None,
        scoring=_scoring(request, first, first + len(item.token_ids)),
        pooling=(request.pooled if first else b"") if request.pools else None,
    )


def _history(request: Request) -> TokenHistory | None:
    sampling = request.sampling
    if not sampling.looks_back and request.num_output_tokens >= sampling.min_tokens:
        return None
    return TokenHistory(
        num_prompt_tokens=request.num_prompt_tokens,
        token_ids=request.token_ids.tobytes() if sampling.looks_back else b"",
    )


def _scoring(request: Request, first: int, end: int) -> PromptScoring | None:
    """Rows of the prompt whose next token is in it. A whole chunk, even where a part of it is scored
    already: that happens after a preemption only, and `keep_scores` takes none twice.
    """
    num_top = request.sampling.prompt_logprobs
    last = min(end + 1, request.num_prompt_tokens)
    if num_top is None or last - 1 <= max(first, request.num_scored_tokens):
        return None
    return PromptScoring(token_ids=tuple(request.token_ids[first + 1 : last]), num_top=num_top)
