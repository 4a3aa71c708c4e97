"""Builds plans for a worker by hand: one request's tokens into given blocks."""

from array import array
from collections.abc import Sequence

from core.request import SamplingParams
from core.scheduler.plan import PlannedTokens, PromptScoring, StepPlan, TokenHistory

GREEDY = SamplingParams(max_tokens=1, temperature=0, seed=0)


def planned(
    request_id: str,
    token_ids: Sequence[int],
    *,
    first_position: int = 0,
    blocks: Sequence[int],
    num_samples: int = 1,
    sampling: SamplingParams = GREEDY,
    history: TokenHistory | None = None,
    scoring: PromptScoring | None = None,
    pooling: bytes | None = None,
) -> PlannedTokens:
    return PlannedTokens(
        request_id=request_id,
        token_ids=tuple(token_ids),
        first_position=first_position,
        block_table=array("i", blocks).tobytes(),
        num_samples=num_samples,
        sampling=sampling if num_samples else None,
        history=history,
        scoring=scoring,
        pooling=pooling,
    )


def step(*items: PlannedTokens) -> StepPlan:
    return StepPlan(step_id=1, items=items)
