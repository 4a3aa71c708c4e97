"""What a load test does: requests, who they come after, and which text they share.

A plan is JSON lines, one request each, plain or gzipped:

    {"id": "r1", "session": "a0", "segments": [["sys", 64], ["q1", 24]], "max_tokens": 55,
     "after": "r0", "delay_s": 3.0}

A segment is a run of filler text: the same id is the same text wherever it stands, so every server
sees the same sharing, whatever its tokenizer. Exactly one of `at_s`, `at_unit` and `after` says when:
seconds from the start, units of 1/rate from the start, or `delay_s` after the END of other requests'
answers (all of them, where a list is given).
"""

from typing import Literal

import msgspec

Role = Literal["system", "user", "assistant"]


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """`num_tokens` tokens of filler text named `segment_id`. `assistant` marks a recorded answer."""

    segment_id: str
    num_tokens: int
    role: Role = "user"


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a plan."""

    id: str
    session: str
    segments: tuple[Segment, ...]
    max_tokens: int
    at_s: float | None = None
    at_unit: float | None = None
    after: tuple[str, ...] = ()
    delay_s: float = 0.0
    """Think time between the end of the last answer waited for and this request."""
    cancel_after_s: float | None = None
    """The client leaves so long after sending."""
    cancel_after_tokens: int | None = None
    """The client leaves when it has seen so many tokens."""

    @property
    def num_prompt_tokens(self) -> int:
        """Planned tokens, without what the server's chat template adds."""
        return sum(segment.num_tokens for segment in self.segments)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A checked plan: ids are unique, `after` names requests of the plan and makes no circle."""

    name: str
    requests: tuple[PlannedRequest, ...]
    sha256: str
    """Of the requests as canonical JSON: two reports with the same one did the same work."""
    notes: tuple[str, ...] = ()
    """What was done to the original: bursts spread, lengths scaled. Printed in every report."""
