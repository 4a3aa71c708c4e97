"""Records and plans written out by hand, for tests of figures."""

from collections.abc import Sequence
from typing import Any

from loadtest.health import Health
from loadtest.memory import Memory
from loadtest.metrics import SLO, measure
from loadtest.plan import Plan, PlannedRequest, Segment
from loadtest.record import Fault, RequestRecord
from loadtest.report import Repeat, Report, TargetFacts, make_report, plan_facts, rows_of
from loadtest.resources import Resources


def answered(
    request_id: str = "r0",
    *,
    times: Sequence[float],
    tokens: Sequence[float] | None = None,
    scheduled_at: float = 0.0,
    sent_at: float | None = None,
    **fields: Any,
) -> RequestRecord:
    """One that was answered with content at `times`, one token each if not said otherwise."""
    counts = tuple(tokens) if tokens is not None else (1.0,) * len(times)
    defaults: dict[str, Any] = {
        "session": request_id,
        "turn": 0,
        "first_token_at": times[0] if times else None,
        "first_visible_at": times[0] if times else None,
        "last_token_at": times[-1] if times else None,
        "ended_at": times[-1] if times else scheduled_at,
        "token_source": "continuous usage",
        "num_output_tokens": int(sum(counts)),
    }
    return RequestRecord(
        id=request_id,
        scheduled_at=scheduled_at,
        sent_at=scheduled_at if sent_at is None else sent_at,
        content_times=tuple(times),
        content_tokens=counts,
        **{**defaults, **fields},
    )


def failed(
    request_id: str = "r0", *, kind: Any = "http", status: int | None = None, **fields: Any
) -> RequestRecord:
    defaults: dict[str, Any] = {
        "session": request_id,
        "turn": 0,
        "scheduled_at": 0.0,
        "sent_at": 0.0,
        "ended_at": 1.0,
    }
    fault = Fault(kind=kind, message="it went wrong", status=status)
    return RequestRecord(id=request_id, fault=fault, **{**defaults, **fields})


def plan_for(records: Sequence[RequestRecord], *, prompt_tokens: int = 100, max_tokens: int = 5) -> Plan:
    """A plan that these are the records of."""
    requests = tuple(
        PlannedRequest(
            id=record.id,
            session=record.session,
            segments=(Segment(f"s{record.id}", prompt_tokens),),
            max_tokens=max_tokens,
            at_s=record.scheduled_at,
        )
        for record in records
    )
    return Plan(name="by hand", requests=requests, sha256="a" * 64, notes=("written by hand",))


def report_of(
    passes: Sequence[Sequence[RequestRecord]],
    *,
    slo: SLO | None = None,
    duration_s: float = 10.0,
    resources: Resources | None = None,
    **fields: Any,
) -> Report:
    """A report over passes of one plan."""
    slo = slo or SLO()
    plan = plan_for(passes[0])
    health = Health(
        duration_s=duration_s, cpu_s=1.0, lag_p50_s=0.0, lag_p99_s=0.001, lag_max_s=0.002, num_ticks=9
    )
    repeats = tuple(
        Repeat(
            nonce=f"n{number}",
            measures=measure(records, plan=plan, duration_s=duration_s, slo=slo),
            health=health,
            resources=resources or Resources(),
            memory=Memory(),
            rows=rows_of(records, started_at=0.0),
        )
        for number, records in enumerate(passes)
    )
    defaults: dict[str, Any] = {
        "target": TargetFacts(url="http://127.0.0.1:1", dialect="chat", model="tiny"),
        "plan": plan_facts(plan),
        "options": {"concurrency": 4},
        "started_at": "2026-01-02T03:04:05Z",
    }
    return make_report(slo=slo, repeats=repeats, **{**defaults, **fields})
