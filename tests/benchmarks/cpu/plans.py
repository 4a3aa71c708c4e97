"""The work as plans of the load tester. Text is drawn anew for every pass: no cache helps across passes."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from loadtest.plan import Plan, PlannedRequest, Segment, load_plan, plan_of
from loadtest.workloads import WorkloadOptions, find_workload

FOLDER = Path(__file__).parents[2] / "loadtest" / "data" / "plans"


def one_after_another(num_requests: int, *, prompt_tokens: int, answer_tokens: int) -> Plan:
    return plan_of(
        "one-after-another",
        [
            PlannedRequest(
                id=f"r{number}",
                session="s",
                segments=(Segment(f"p{number}", prompt_tokens),),
                max_tokens=answer_tokens,
                at_s=None if number else 0.0,
                after=(f"r{number - 1}",) if number else (),
            )
            for number in range(num_requests)
        ],
    )


def side_by_side(num_requests: int, *, prompt_tokens: int, answer_tokens: int) -> Plan:
    """Sessions of one request each; `--concurrency` says how many are open at once."""
    return plan_of(
        "side-by-side",
        [
            PlannedRequest(
                id=f"r{number}",
                session=f"s{number}",
                segments=(Segment(f"p{number}", prompt_tokens),),
                max_tokens=answer_tokens,
                at_s=0.0,
            )
            for number in range(num_requests)
        ],
    )


def copies(name: str, num_copies: int) -> Plan:
    """A published plan so many times at once, each with text and sessions of its own."""
    plan = load_plan(FOLDER / f"{name}.plan.jsonl.gz")
    return plan_of(
        f"{name}-x{num_copies}" if num_copies > 1 else name,
        [request for number in range(num_copies) for request in _copied(plan, f"c{number}-")],
        notes=plan.notes,
    )


def _copied(plan: Plan, prefix: str) -> Iterator[PlannedRequest]:
    for request in plan.requests:
        yield msgspec.structs.replace(
            request,
            id=prefix + request.id,
            session=prefix + request.session,
            after=tuple(prefix + name for name in request.after),
            segments=tuple(
                Segment(prefix + each.segment_id, each.num_tokens, each.role) for each in request.segments
            ),
        )


def growing_sessions(*, sessions: int, turns: int, answer_tokens: int, longest: int) -> Plan:
    """The Codex twin without its pauses, answers cut short; the history holds them at their full length."""
    plan = find_workload("codex").build(
        WorkloadOptions(sessions=sessions, turns=turns, time_scale=0.0, max_context=longest)
    )
    cut = [msgspec.structs.replace(request, max_tokens=answer_tokens) for request in plan.requests]
    note = f"answers cut to {answer_tokens} tokens; the history holds what they were in the original"
    return plan_of("growing-sessions", cut, notes=(*plan.notes, note))


def prompts_into_streams(
    *, streams: int, answer_tokens: int, prompts: int, prompt_tokens: int, every_s: float
) -> Plan:
    """Long answers, and meanwhile long prompts with an answer of one token: all gaps are the streams'."""
    talking = [
        PlannedRequest(
            id=f"stream{number}",
            session=f"stream{number}",
            segments=(Segment(f"short{number}", 32),),
            max_tokens=answer_tokens,
            at_s=0.0,
        )
        for number in range(streams)
    ]
    coming = [
        PlannedRequest(
            id=f"prompt{number}",
            session=f"prompt{number}",
            segments=(Segment(f"long{number}", prompt_tokens),),
            max_tokens=1,
            at_s=1.0 + every_s * number,
        )
        for number in range(prompts)
    ]
    return plan_of("prompts-into-streams", [*talking, *coming])
