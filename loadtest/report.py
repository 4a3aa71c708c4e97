"""The report of one run: a strict, versioned JSON file.

JSON has no infinity. A figure that is infinite, because it falls among failures, is the string
"failed"; one that nobody knows is null. Neither is ever 0.
"""

from pathlib import Path
from typing import Any

import msgspec

from loadtest.health import Health
from loadtest.metrics import SLO, Measures
from loadtest.resources import Resources

SCHEMA = "tidegate-loadtest/1"


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


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The server's memory at the end of a pass, and its KV cache at the fullest look. None is unknown."""

    weights_bytes: int | None = None
    kv_pool_bytes: int | None = None
    kv_live_bytes: int | None = None
    kv_cached_bytes: int | None = None
    other_bytes: int | None = None
    """The process less weights and pool."""
    kv_waste_share: float | None = None
    """Of the bytes allocated to live requests, those without a token in them."""
    kv_idle_share: float | None = None
    """Of the pool, what neither requests nor reuse ever held."""


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


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure over the repeats: their median, and a bootstrap interval of it."""

    median: float | None
    low: float | None = None
    high: float | None = None
    unit: str = ""


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
    """The report with its machine, versions, definitions and summary filled in."""
    raise NotImplementedError


def write_json(report: Report, path: Path) -> None:
    """Written beside and moved over, so that an interrupted run leaves no half file."""
    raise NotImplementedError


def read_report(path: Path) -> Report:
    """
    Raises:
        PlanInvalid: naming the file and the field.
    """
    raise NotImplementedError
