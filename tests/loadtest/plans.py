"""Requests in one line each, and where the plans and traces of these tests are."""

from pathlib import Path
from typing import Any

from loadtest.plan import Plan, PlannedRequest, Segment, plan_of

DATA = Path(__file__).parent / "data"
PLANS = sorted((DATA / "plans").glob("*.plan.jsonl.gz"))
TRACES = DATA / "traces"


def request(request_id: str = "r0", *segments: tuple[Any, ...], **changes: Any) -> PlannedRequest:
    """A request of one session at once, with the segments given as (id, tokens[, role])."""
    when = {} if {"at_s", "at_unit", "after"} & set(changes) else {"at_s": 0.0}
    made: dict[str, Any] = {"session": "s0", "max_tokens": 8, **when, **changes}
    parts = tuple(Segment(*segment) for segment in segments or (("a", 10),))
    return PlannedRequest(id=request_id, segments=parts, **made)


def plan(*requests: PlannedRequest) -> Plan:
    return plan_of("test", requests)
