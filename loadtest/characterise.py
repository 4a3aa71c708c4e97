"""What a trace is like, and what it will be short of on a given machine.

    lengths, arrivals, pauses      as the trace says
    sharing                        hit of an infinite cache, over whole blocks, prompts only
    working set                    KV used before and used again later, over time; hit against cache size
    bottleneck                     each kind of work over what the machine can do of it

Sessions that each have a clock of their own are played `live_sessions` at a time, the next one as one ends.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from loadtest.arrivals import quantum_of, spread_bursts
from loadtest.bottleneck import Bottleneck, Demand, Speeds, find_bottleneck
from loadtest.errors import PlanInvalid
from loadtest.linking import linked
from loadtest.reuse import Reuse, reuse_of
from loadtest.traces import Trace, TraceRequest

SHARES_OF_IDEAL = (0.5, 0.8, 0.9, 0.99)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What the trace would run on. The defaults are a small model (SmolLM2-135M, f16 KV) on two cores."""

    bytes_per_token: int = 23_040
    """Of KV: 2 x layers x KV heads x head dimension x bytes of the type."""
    block_tokens: int = 16
    kv_bytes: int = 1 << 30
    prefill_tokens_per_s: float = 200.0
    decode_tokens_per_s: float = 40.0
    """Of all requests together."""
    live_sessions: int = 8

    @property
    def speeds(self) -> Speeds:
        return Speeds(
            prefill_tokens_per_s=self.prefill_tokens_per_s, decode_tokens_per_s=self.decode_tokens_per_s
        )

    def validated(self) -> "Machine":
        """Raises PlanInvalid for the first number out of its bounds."""
        bounds: tuple[tuple[str, float, float, float], ...] = (
            ("--bytes-per-token", self.bytes_per_token, 1, 1 << 30),
            ("--block-tokens", self.block_tokens, 1, 65_536),
            ("--kv-bytes", self.kv_bytes, 1, 1 << 50),
            ("--prefill-tokens-per-s", self.prefill_tokens_per_s, 1e-3, 1e9),
            ("--decode-tokens-per-s", self.decode_tokens_per_s, 1e-3, 1e9),
            ("--live-sessions", self.live_sessions, 1, 1_000_000),
        )
        for name, value, low, high in bounds:
            if not low <= value <= high:  # NaN fails too
                raise PlanInvalid(f"{name} is {value}; it must be between {low:g} and {high:g}")
        return self


class Spread(msgspec.Struct, frozen=True):
    """A quantity's distribution."""

    mean: float
    p50: float
    p90: float
    p99: float

    def __str__(self) -> str:
        names = ("p50", "p90", "p99", "mean")
        return ", ".join(f"{name} {_figure(getattr(self, name))}" for name in names)


class CachePoint(msgspec.Struct, frozen=True):
    """An LRU cache of so many bytes hits so much."""

    num_bytes: int
    hit: float


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """What prompts have in common. Hits are shares of prompt tokens."""

    ideal_hit: float
    hit_here: float
    """Of an LRU cache of the machine's size."""
    distinct_bytes: int
    working_set_bytes: Spread
    """Over time."""
    working_set_peak_bytes: int
    curve: tuple[CachePoint, ...]
    """Smallest caches that reach 50, 80, 90 and 99 % of the ideal hit."""


class Character(msgspec.Struct, frozen=True, kw_only=True):
    """A trace in numbers; None where the trace does not tell."""

    name: str
    format: str
    num_requests: int
    duration_s: float
    input_tokens: Spread
    output_tokens: Spread
    gap_s: Spread | None
    gap_cv: float | None
    quantum_s: float | None
    """The clock's, where bursts on whole quanta were found and spread."""
    num_sessions: int | None
    turns: Spread | None
    turn_gap_s: Spread | None
    """Between the starts of one session's calls."""
    pause_s: Spread | None
    """Between an answer's end and the next call."""
    sharing: Sharing | None
    bottleneck: Bottleneck
    notes: tuple[str, ...]


def characterise(trace: Trace, machine: Machine | None = None) -> Character:
    """All of it. Seconds for traces of some thousand requests."""
    machine = (machine or Machine()).validated()
    requests, times, quantum = _on_one_clock(trace, machine)
    inferred = _can_link(requests)
    requests = linked(requests) if inferred else requests
    gaps = np.diff(np.array(times)) if len(times) > 1 else np.zeros(0)
    reuse = _reuse(requests, times, machine)
    sharing = _sharing(reuse, machine) if reuse else None
    sessions = Counter(request.session for request in requests if request.session is not None)
    pauses = [request.pause_s for request in requests if request.pause_s is not None]
    return Character(
        name=trace.name,
        format=trace.format,
        num_requests=len(requests),
        duration_s=times[-1] - times[0],
        input_tokens=spread_of(request.num_input_tokens for request in requests),
        output_tokens=spread_of(request.num_output_tokens for request in requests),
        gap_s=spread_of(gaps) if len(gaps) else None,
        gap_cv=float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() > 0 else None,
        quantum_s=quantum,
        num_sessions=len(sessions) or None,
        turns=spread_of(sessions.values()) if sessions else None,
        turn_gap_s=_turn_gaps(requests, times),
        pause_s=spread_of(pauses) if pauses else None,
        sharing=sharing,
        bottleneck=find_bottleneck(_demand(requests, times, sharing), machine=machine.speeds),
        notes=(*trace.notes, *_notes(trace, machine, quantum=quantum, inferred=inferred)),
    )


def spread_of(values: Iterable[float]) -> Spread:
    numbers = np.fromiter((float(value) for value in values), dtype=np.float64)
    p50, p90, p99 = np.percentile(numbers, (50, 90, 99)).tolist()
    return Spread(float(numbers.mean()), p50, p90, p99)


def _on_one_clock(trace: Trace, machine: Machine) -> tuple[list[TraceRequest], list[float], float | None]:
    """Requests and their times in order of time, from 0 on; and the quantum of bursts that were spread."""
    if trace.clock == "session":
        pairs, quantum = _played(trace.requests, machine.live_sessions), None
    else:
        times = [request.at_s for request in trace.requests]
        quantum = quantum_of(times)
        times = spread_bursts(times, quantum) if quantum else times
        pairs = sorted(zip(times, trace.requests, strict=True), key=lambda pair: pair[0])
    start = pairs[0][0]
    return [request for _, request in pairs], [at - start for at, _ in pairs], quantum


def _played(requests: Sequence[TraceRequest], live_sessions: int) -> list[tuple[float, TraceRequest]]:
    """Sessions one after another in so many lanes."""
    sessions: dict[str | None, list[TraceRequest]] = defaultdict(list)
    for request in requests:
        sessions[request.session].append(request)
    lanes = [0.0] * min(live_sessions, len(sessions))
    pairs: list[tuple[float, TraceRequest]] = []
    for calls in sessions.values():
        start = heapq.heappop(lanes)
        first = min(call.at_s for call in calls)
        pairs += ((start + call.at_s - first, call) for call in calls)
        heapq.heappush(lanes, start + max(call.at_s + (call.server_s or 0.0) for call in calls) - first)
    return sorted(pairs, key=lambda pair: pair[0])


def _reuse(requests: Sequence[TraceRequest], times: Sequence[float], machine: Machine) -> Reuse | None:
    prompts = [request.parts for request in requests if request.parts is not None]
    if len(prompts) < len(requests):
        return None
    return reuse_of(prompts, times, block_tokens=machine.block_tokens)


def _sharing(reuse: Reuse, machine: Machine) -> Sharing:
    block_bytes = machine.block_tokens * machine.bytes_per_token
    held = reuse.held_blocks * float(block_bytes)
    order = np.argsort(held)
    shares = np.cumsum(reuse.held_s[order]) / reuse.held_s.sum()
    places = np.searchsorted(shares, (0.5, 0.9, 0.99)).clip(max=len(held) - 1)
    p50, p90, p99 = held[order][places].tolist()
    curve = []
    for share in SHARES_OF_IDEAL if reuse.num_cached_tokens else ():
        capacity = reuse.capacity_for(share)
        curve.append(CachePoint(capacity * block_bytes, reuse.hit(capacity)))
    return Sharing(
        ideal_hit=reuse.ideal,
        hit_here=reuse.hit(machine.kv_bytes // block_bytes),
        distinct_bytes=reuse.num_blocks * block_bytes,
        working_set_bytes=Spread(float(np.average(held, weights=reuse.held_s)), p50, p90, p99),
        working_set_peak_bytes=int(held.max()),
        curve=tuple(curve),
    )


def _demand(requests: Sequence[TraceRequest], times: Sequence[float], sharing: Sharing | None) -> Demand:
    return Demand(
        times=tuple(times),
        input_tokens=tuple(request.num_input_tokens for request in requests),
        output_tokens=tuple(request.num_output_tokens for request in requests),
        ideal_hit=sharing.ideal_hit if sharing else 0.0,
        hit_here=sharing.hit_here if sharing else 0.0,
    )


def _can_link(requests: Sequence[TraceRequest]) -> bool:
    return all(request.session is None and request.parts is not None for request in requests)


def _turn_gaps(requests: Sequence[TraceRequest], times: Sequence[float]) -> Spread | None:
    last: dict[str, float] = {}
    gaps: list[float] = []
    for request, at in zip(requests, times, strict=True):
        if request.session is not None:
            if request.session in last:
                gaps.append(at - last[request.session])
            last[request.session] = at
    return spread_of(gaps) if gaps else None


def _notes(trace: Trace, machine: Machine, *, quantum: float | None, inferred: bool) -> Iterable[str]:
    if quantum:
        yield f"timestamps stand on multiples of {quantum:g} s: spread over them before anything was counted"
    if trace.clock == "session":
        yield f"each session has a clock of its own: played {machine.live_sessions} at a time"
    if inferred:
        yield "sessions are inferred: a request belongs to the one whose prompt its own goes on from"
    if any(request.parts is None for request in trace.requests):
        yield "the trace says nothing of shared prefixes: sharing is unknown, every prompt counts as new"


def describe(character: Character) -> list[tuple[str, str]]:
    """The table: what, and its figures. What is not known says `unknown`."""
    rows = [
        ("trace", f"{character.name} ({character.format})"),
        ("requests", f"{character.num_requests:,} in {character.duration_s:,.0f} s"),
        ("prompt tokens", str(character.input_tokens)),
        ("answer tokens", str(character.output_tokens)),
        ("gaps between arrivals, s", _or_unknown(character.gap_s)),
        ("CV of the gaps", _or_unknown(character.gap_cv and f"{character.gap_cv:.2f}")),
        ("clock's quantum", f"{character.quantum_s:g} s, spread" if character.quantum_s else "none found"),
        ("sessions", _or_unknown(character.num_sessions)),
        ("calls a session", _or_unknown(character.turns)),
        ("between calls of a session, s", _or_unknown(character.turn_gap_s)),
        ("pauses, s", _or_unknown(character.pause_s)),
        *_sharing_rows(character.sharing),
        ("bottleneck", f"{character.bottleneck.kind}: {character.bottleneck.reason}"),
    ]
    return rows + [("note", note) for note in character.notes]


def _sharing_rows(sharing: Sharing | None) -> list[tuple[str, str]]:
    if sharing is None:
        return [("ideal hit", "unknown"), ("working set of KV", "unknown")]
    held = sharing.working_set_bytes
    sizes = (
        ("p50", held.p50),
        ("p90", held.p90),
        ("peak", sharing.working_set_peak_bytes),
        ("all different", sharing.distinct_bytes),
    )
    curve = ", ".join(f"{point.hit:.1%} in {_size(point.num_bytes)}" for point in sharing.curve)
    return [
        (
            "ideal hit",
            f"{sharing.ideal_hit:.1%} of prompt tokens; {sharing.hit_here:.1%} with this cache (LRU)",
        ),
        ("working set of KV", ", ".join(f"{name} {_size(num_bytes)}" for name, num_bytes in sizes)),
        ("hit by cache size", curve or "nothing is shared"),
    ]


def _or_unknown(value: object) -> str:
    return "unknown" if value is None else str(value)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"
