"""The report of one run: a strict, versioned JSON file.

JSON has no infinity. A figure that is infinite, because it falls among failures, is the string
"failed"; one that nobody knows is null. Neither is ever 0. `table` prints them.
"""

import importlib.metadata
import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from loadtest.errors import PlanInvalid
from loadtest.figures import Figure, Pass, summarise
from loadtest.health import Health
from loadtest.memory import Memory
from loadtest.metrics import SLO, Measures
from loadtest.plan import Plan
from loadtest.record import RequestRecord
from loadtest.resources import Resources
from loadtest.timings import Timings, timings_of

SCHEMA = "tidegate-loadtest/1"
FAILED = "failed"
MAX_REPORT_BYTES = 512 << 20

_PACKAGES = ("aiohttp", "httptools", "msgspec", "numpy", "psutil", "uvloop")
_FAILABLE = frozenset(
    {
        *(field for field in Timings.__struct_fields__),
        *("mean", "p50", "p90", "p99", "max", "median", "low", "high"),
    }
)
"""Fields whose "failed" is a figure; any other string stays what it is."""

DEFINITIONS = {
    "TTFT": "first content that is not empty (text, reasoning, tool call), from the send of the request",
    "TTFT_s": "the same from the intended start: the schedule, or the last awaited answer's end plus its "
    "delay; SLOs use it",
    "TTFOT": "first content that is not reasoning, from the send",
    "ITL": "gaps between tokens, pooled over requests; an event of k tokens is one gap and k-1 zeros",
    "ITL spread": "the same with an event of k tokens as k gaps of dt/k",
    "TPOT": "(last content - first content) / (tokens - 1), one a request; unknown where all came at once",
    "max gap": "the longest silence between two events with content of one request",
    "E2E": "last content (not the end of the stream), from the send; E2E_s from the intended start",
    "job completion": "a session, from its first intended start to its last answer's end",
    "failed": "a request that failed is infinitely slow in every latency; each token that it still owed "
    "is an infinite gap",
    "goodput": "requests, tokens, sessions a second that met every part of the SLO; failures miss it",
    "fluidity": "share of token deadlines met: the first TTFT after the intended start, each next one "
    "TPOT later; after a late one, from when it came",
    "output tok/s": "tokens of answers that did not fail, over the whole pass; active: over the time "
    "with a request in flight",
    "hit": "cached / prompt tokens, as the server says, over the requests it says it of",
    "ideal": "the same of a cache without a bound, computed from the plan",
    "capture": "hit / ideal",
    "drift": "prompt tokens counted by the server against the plan's and the template's",
    "interval": "95 % percentile bootstrap of the median over the repeats",
}


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where the client ran."""

    system: str
    processor: str
    num_cpus: int
    memory_bytes: int
    python: str


class TargetFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured. None is unknown."""

    url: str
    dialect: str
    model: str
    server: str = "unknown"
    server_version: str | None = None

    @property
    def described(self) -> str:
        """The server and its version, in words."""
        name = "unknown server" if self.server == "unknown" else self.server
        return f"{name}, {self.server_version or 'version unknown'}"


class PlanFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The work. The same sha256 is the same work."""

    name: str
    sha256: str
    num_requests: int
    num_sessions: int
    num_prompt_tokens: int
    max_output_tokens: int
    ideal_hit: float | None = None
    notes: tuple[str, ...] = ()


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One request of one pass. Times in seconds from the pass's start; None is unknown, or never came."""

    id: str
    session: str
    turn: int
    scheduled_at: float
    sent_at: float | None
    ended_at: float
    ttft: float | None
    ttft_sched: float | None
    tpot: float | None
    max_gap: float | None
    e2e: float | None
    e2e_sched: float | None
    num_prompt_tokens: int | None
    num_output_tokens: int | None
    num_cached_tokens: int | None
    finish_reason: str | None
    cancelled: bool
    fault: str | None
    """Kind and message of a failure; its latencies are infinite."""


class Repeat(msgspec.Struct, frozen=True, kw_only=True):
    """One pass of the plan."""

    nonce: str
    measures: Measures
    health: Health
    resources: Resources
    memory: Memory
    rows: tuple[Row, ...]
    void_reasons: tuple[str, ...] = ()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. Build it with `make_report`."""

    schema: str
    tool_version: str
    started_at: str
    """ISO 8601, UTC."""
    machine: Machine
    versions: dict[str, str]
    """Of the packages that the client stands on."""
    target: TargetFacts
    plan: PlanFacts
    slo: SLO
    options: dict[str, Any]
    definitions: dict[str, str]
    repeats: tuple[Repeat, ...]
    void_reasons: tuple[str, ...]
    """Of the run as a whole and of any of its passes; not empty means that no figure may be quoted."""
    summary: dict[str, Figure]
    notes: tuple[str, ...] = ()


def make_report(
    *,
    target: TargetFacts,
    plan: PlanFacts,
    slo: SLO,
    options: dict[str, Any],
    repeats: tuple[Repeat, ...],
    started_at: str,
    void_reasons: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> Report:
    """The report with its machine, versions, definitions and summary filled in.

    Args:
        void_reasons: of the run as a whole; those of its repeats are added.
    """
    of_repeats = [
        f"repeat {number}: {reason}"
        for number, repeat in enumerate(repeats, start=1)
        for reason in repeat.void_reasons
    ]
    return Report(
        schema=SCHEMA,
        tool_version=_version("tidegate") or "unknown",
        started_at=started_at,
        machine=this_machine(),
        versions={name: version for name in _PACKAGES if (version := _version(name))},
        target=target,
        plan=plan,
        slo=slo,
        options=options,
        definitions=DEFINITIONS,
        repeats=repeats,
        void_reasons=(*void_reasons, *of_repeats),
        summary=summarise([Pass(r.measures, r.resources, r.memory) for r in repeats]),
        notes=notes,
    )


def plan_facts(plan: Plan, *, ideal: dict[str, int] | None = None) -> PlanFacts:
    """
    Args:
        ideal: prompt tokens an infinite cache would have had, by request id.
    """
    num_prompt_tokens = sum(request.num_prompt_tokens for request in plan.requests)
    ideal_hit = None
    if ideal is not None and num_prompt_tokens:
        ideal_hit = sum(ideal[request.id] for request in plan.requests) / num_prompt_tokens
    return PlanFacts(
        name=plan.name,
        sha256=plan.sha256,
        num_requests=len(plan.requests),
        num_sessions=len({request.session for request in plan.requests}),
        num_prompt_tokens=num_prompt_tokens,
        max_output_tokens=sum(request.max_tokens for request in plan.requests),
        ideal_hit=ideal_hit,
        notes=plan.notes,
    )


def rows_of(records: Sequence[RequestRecord], *, started_at: float) -> tuple[Row, ...]:
    """
    Args:
        started_at: of the pass, on the records' clock.
    """
    return tuple(_row(record, started_at) for record in records)


def write_json(report: Report, path: Path) -> None:
    """Written beside and moved over, so that an interrupted run leaves no half file.

    Raises:
        PlanInvalid: the file cannot be written there.
    """
    data = msgspec.json.format(msgspec.json.encode(_without_infinity(msgspec.to_builtins(report))), indent=1)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(data + b"\n")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise PlanInvalid(f"{path}: the report cannot be written: {error.strerror}") from None


def read_report(path: Path) -> Report:
    """
    Raises:
        PlanInvalid: naming the file and the field.
    """
    try:
        size = path.stat().st_size
        if size > MAX_REPORT_BYTES:
            raise PlanInvalid(f"{path}: {size:,} bytes; a report has at most {MAX_REPORT_BYTES:,}")
        found = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise PlanInvalid(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanInvalid(f"{path}: not JSON: {error}") from None
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise PlanInvalid(f"{path}: schema is {schema!r}; this version reads {SCHEMA!r}")
    try:
        return msgspec.convert(_with_infinity(found), Report)
    except msgspec.ValidationError as error:
        raise PlanInvalid(f"{path}: {error}") from None


def this_machine() -> Machine:
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        processor=_processor(),
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        python=platform.python_version(),
    )


def _row(record: RequestRecord, started_at: float) -> Row:
    timing = timings_of(record)
    fault = record.fault
    status = "" if fault is None or fault.status is None else f" {fault.status}"
    return Row(
        id=record.id,
        session=record.session,
        turn=record.turn,
        scheduled_at=record.scheduled_at - started_at,
        sent_at=None if record.sent_at is None else record.sent_at - started_at,
        ended_at=record.ended_at - started_at,
        ttft=timing.ttft,
        ttft_sched=timing.ttft_sched,
        tpot=timing.tpot,
        max_gap=timing.max_gap,
        e2e=timing.e2e,
        e2e_sched=timing.e2e_sched,
        num_prompt_tokens=record.num_prompt_tokens,
        num_output_tokens=record.num_output_tokens,
        num_cached_tokens=record.num_cached_tokens,
        finish_reason=record.finish_reason,
        cancelled=record.cancelled,
        fault=None if fault is None else f"{fault.kind}{status}: {fault.message}",
    )


def _without_infinity(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _without_infinity(item, key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinity(item, name) for item in value]
    if isinstance(value, float) and math.isinf(value):
        assert name in _FAILABLE, f"{name} is infinite"
        return FAILED
    return value


def _with_infinity(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _with_infinity(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_infinity(item, name) for item in value]
    return math.inf if value == FAILED and name in _FAILABLE else value


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The kernel's name for it: `platform.processor()` is empty on many Linux systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
