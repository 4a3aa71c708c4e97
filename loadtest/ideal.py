"""What a cache without end would have found: the bound that a server's prefix hits are held against.

Only prompts count. With recorded history (the default) an answer that the server wrote is thrown away,
and the recorded one comes as new prompt text: nobody can have it cached. With live history the answer
itself comes back, so it counts as cached for the turn that follows.

The last token of a prompt is never cached: its logits must be computed. Tokens that a chat template
adds are not in the plan, so a server may lie a little above the bound.
"""

from collections.abc import Iterable, Mapping

import msgspec

from loadtest.plan import Plan, PlannedRequest, Segment, answer_segments
from loadtest.prefix_tree import PrefixTree


class IdealHit(msgspec.Struct, frozen=True, kw_only=True):
    """Per request id: tokens that an infinite cache holds when it starts, and tokens of its prompt."""

    num_cached_tokens: Mapping[str, int]
    num_prompt_tokens: Mapping[str, int]

    def share(self, ids: Iterable[str] | None = None) -> float:
        """Cached tokens over prompt tokens of these requests (all, if none are named); 0 for no tokens."""
        chosen = list(self.num_prompt_tokens if ids is None else ids)
        total = sum(self.num_prompt_tokens[name] for name in chosen)
        return sum(self.num_cached_tokens[name] for name in chosen) / total if total else 0.0


def ideal_hit(plan: Plan, block_tokens: int = 1, *, live: bool = False) -> IdealHit:
    """What an infinite cache of blocks of so many tokens would hit.

    Args:
        live: the history holds the server's own answers.
    """
    tree = PrefixTree()
    answers = _answers(plan) if live else {}
    cached: dict[str, int] = {}
    for request in in_order(plan):
        path = [(f"{segment.role} {segment.segment_id}", segment.num_tokens) for segment in request.segments]
        found = min(tree.insert(path), request.num_prompt_tokens - 1)
        cached[request.id] = found // block_tokens * block_tokens
        if answer := answers.get(request.id):
            tree.insert(
                [*path, (f"assistant {answer.segment_id}", min(answer.num_tokens, request.max_tokens))]
            )
    return IdealHit(
        num_cached_tokens={request.id: cached[request.id] for request in plan.requests},
        num_prompt_tokens={request.id: request.num_prompt_tokens for request in plan.requests},
    )


def in_order(plan: Plan) -> list[PlannedRequest]:
    """The requests as they would start if answers took no time.

    The sum of all hits does not depend on the order, only whose they are.
    """
    starts = _starts(plan)
    return sorted(plan.requests, key=lambda request: starts[request.id])


def start_times(plan: Plan) -> dict[str, float]:
    """When each request would start if answers took no time; a unit of `at_unit` is a second."""
    return {request_id: at for request_id, (at, _) in _starts(plan).items()}


def _starts(plan: Plan) -> dict[str, tuple[float, int]]:
    """Per request id: its start, and how many others in a row must be over before."""
    by_id = {request.id: request for request in plan.requests}
    starts: dict[str, tuple[float, int]] = {}
    pending = list(reversed(plan.requests))
    while pending:
        request = pending[-1]
        missing = [by_id[name] for name in request.after if name not in starts]
        if missing:
            pending.extend(missing)
            continue
        pending.pop()
        before = [starts[name] for name in request.after]
        at = request.at_s if request.at_s is not None else request.at_unit or 0.0
        start = max((at for at, _ in before), default=at) + request.delay_s
        starts[request.id] = (start, 1 + max((depth for _, depth in before), default=-1))
    return starts


def _answers(plan: Plan) -> dict[str, Segment]:
    segments = {segment.segment_id: segment for request in plan.requests for segment in request.segments}
    return {request_id: segments[name] for name, request_id in answer_segments(plan).items()}
