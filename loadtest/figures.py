"""The figures that a report sums up and `compare` can judge, each with its unit and its better side."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from loadtest.bootstrap import median_interval
from loadtest.memory import Memory
from loadtest.metrics import Goodput, Hits, Measures
from loadtest.percentiles import Distribution
from loadtest.resources import Resources

Better = Literal["lower", "higher", "neither"]
Unit = Literal["s", "1/s", "share", "bytes", "tokens", "count"]


class Pass(NamedTuple):
    """What one repeat knows."""

    measures: Measures
    resources: Resources
    memory: Memory


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure over the repeats: their median, and a bootstrap interval of it.

    None is unknown; a median of some repeats alone says so in `num_unknown`.
    """

    median: float | None
    low: float | None = None
    high: float | None = None
    unit: Unit = "count"
    better: Better = "neither"
    num_unknown: int = 0


class Kind(NamedTuple):
    """How a figure is read from a pass."""

    unit: Unit
    better: Better
    read: Callable[[Pass], float | None]


LATENCIES = {
    "TTFT": "ttft",
    "TTFT_s": "ttft_sched",
    "TTFOT": "ttfot",
    "client queue": "queue_client",
    "ITL": "itl",
    "ITL spread": "itl_spread",
    "TPOT": "tpot",
    "max gap": "max_gap",
    "E2E": "e2e",
    "E2E_s": "e2e_sched",
    "job completion": "job_completion",
}
"""Names in tables, to fields of `Measures`."""

PARTS = ("mean", "p50", "p90", "p99", "max")


def summarise(passes: Sequence[Pass]) -> dict[str, Figure]:
    """Every figure, unknown ones too: what is missing shows as missing."""
    return {name: _over(kind, [kind.read(one) for one in passes]) for name, kind in KINDS.items()}


def _over(kind: Kind, values: Sequence[float | None]) -> Figure:
    known = [value for value in values if value is not None]
    if not known:
        return Figure(median=None, unit=kind.unit, better=kind.better, num_unknown=len(values))
    interval = median_interval(known)
    return Figure(
        median=interval.median,
        low=interval.low,
        high=interval.high,
        unit=kind.unit,
        better=kind.better,
        num_unknown=len(values) - len(known),
    )


def _latency(field: str, part: str) -> Kind:
    def read(one: Pass) -> float | None:
        found: Distribution = getattr(one.measures, field)
        value: float | None = getattr(found, part)
        return value

    return Kind("s", "lower", read)


def _rate(field: str) -> Kind:
    def read(one: Pass) -> float | None:
        value: float | None = getattr(one.measures, field)
        return value

    return Kind("1/s", "higher", read)


def _good(field: str) -> tuple[Kind, Kind]:
    def of(one: Pass) -> Goodput | None:
        found: Goodput | None = getattr(one.measures, field)
        return found

    def per_s(one: Pass) -> float | None:
        goodput = of(one)
        return None if goodput is None else goodput.per_s

    def share(one: Pass) -> float | None:
        goodput = of(one)
        return None if goodput is None else goodput.share

    return Kind("1/s", "higher", per_s), Kind("share", "higher", share)


def _hit(field: str, part: str, better: Better) -> Kind:
    def read(one: Pass) -> float | None:
        hits: Hits = getattr(one.measures, field)
        value: float | None = getattr(hits, part)
        return value

    return Kind("share", better, read)


def _memory(field: str, unit: Unit) -> Kind:
    def read(one: Pass) -> float | None:
        value: float | None = getattr(one.memory, field)
        return value

    return Kind(unit, "lower", read)


def _per_1000_tokens(amount: float | None, measures: Measures) -> float | None:
    """Of output tokens; prompt tokens cost too, so two servers compare on one plan alone."""
    if amount is None or not measures.num_output_tokens:
        return None
    return amount * 1000 / measures.num_output_tokens


def _kinds() -> dict[str, Kind]:
    kinds = {f"{name} {part}": _latency(field, part) for name, field in LATENCIES.items() for part in PARTS}
    kinds["requests/s"] = _rate("requests_per_s")
    kinds["output tok/s"] = _rate("output_tokens_per_s")
    kinds["active output tok/s"] = _rate("active_output_tokens_per_s")
    kinds["prompt tok/s"] = _rate("prompt_tokens_per_s")
    for name in ("request", "token", "session"):
        kinds[f"{name} goodput/s"], kinds[f"{name} goodput"] = _good(f"{name}_goodput")
    kinds["fluidity"] = Kind("share", "higher", lambda one: one.measures.fluidity)
    kinds["errors"] = Kind("share", "lower", lambda one: one.measures.error_share)
    for name, field in (("", "hits"), ("first-turn ", "first_turn_hits"), ("later-turn ", "later_turn_hits")):
        kinds[f"{name}hit"] = _hit(field, "hit", "higher")
        kinds[f"{name}ideal hit"] = _hit(field, "ideal", "neither")
        kinds[f"{name}capture"] = _hit(field, "capture", "higher")
    kinds["prompt drift"] = Kind("share", "neither", lambda one: one.measures.drift.share)
    kinds["tokens per event"] = Kind("tokens", "neither", lambda one: one.measures.tokens_per_event)
    for name in ("weights", "kv_pool", "kv_live", "kv_cached", "other"):
        kinds[f"{name.replace('_', ' ')} memory"] = _memory(f"{name}_bytes", "bytes")
    kinds["kv waste"] = _memory("kv_waste_share", "share")
    kinds["kv idle"] = Kind("share", "neither", lambda one: one.memory.kv_idle_share)
    kinds["server RSS"] = Kind("bytes", "lower", lambda one: one.resources.rss_bytes)
    kinds["server PSS"] = Kind("bytes", "lower", lambda one: one.resources.pss_bytes)
    kinds["server peak RSS"] = Kind("bytes", "lower", lambda one: one.resources.peak_rss_bytes)
    kinds["CPU-s per 1,000 tokens"] = Kind(
        "count", "lower", lambda one: _per_1000_tokens(one.resources.cpu_s, one.measures)
    )
    kinds["joules per 1,000 tokens"] = Kind(
        "count", "lower", lambda one: _per_1000_tokens(one.resources.joules, one.measures)
    )
    return kinds


KINDS = _kinds()
