"""What a trace is like, and what a machine would be short of."""

import math
import random

import pytest

from loadtest.bottleneck import Demand, Speeds, find_bottleneck
from loadtest.characterise import Character, Machine, characterise, describe
from loadtest.errors import PlanInvalid
from loadtest.linking import linked
from loadtest.traces import Trace, TraceRequest, read_trace
from tests.loadtest.plans import PLANS, TRACES

BY_NAME = {path.name.split(".")[0]: path for path in PLANS}


def figures(character: Character) -> dict[str, str]:
    return dict(describe(character))


def arrival(at_s: float, **changes: object) -> TraceRequest:
    told: dict[str, object] = {"session": None, "num_input_tokens": 100, "num_output_tokens": 10, **changes}
    return TraceRequest(at_s=at_s, **told)  # type: ignore[arg-type]


def trace(*requests: TraceRequest, clock: str = "wall") -> Trace:
    return Trace(name="made", format="made", clock=clock, requests=requests)  # type: ignore[arg-type]


def test_a_plans_lengths_turns_and_sharing_are_the_published_ones() -> None:
    character = characterise(read_trace(BY_NAME["tool-agent"]), Machine(block_tokens=16))
    assert character.num_requests == 56
    assert character.num_sessions == 4
    assert character.turns is not None
    assert character.turns.mean == 14
    assert character.sharing is not None
    assert character.sharing.ideal_hit == pytest.approx(0.903, abs=0.001)
    assert character.pause_s is not None
    assert character.pause_s.p99 <= 2.0


def test_the_curve_rises_to_the_ideal_and_the_working_set_fits_in_what_there_is() -> None:
    for path in (*PLANS, TRACES / "weka.jsonl.gz", TRACES / "mooncake.jsonl.gz"):
        sharing = characterise(read_trace(path)).sharing
        assert sharing is not None
        sizes = [point.num_bytes for point in sharing.curve]
        hits = [point.hit for point in sharing.curve]
        assert sizes == sorted(sizes)
        assert hits == sorted(hits)
        assert all(hit <= sharing.ideal_hit + 1e-9 for hit in hits)
        held = sharing.working_set_bytes
        assert held.p50 <= held.p90 <= held.p99 <= sharing.working_set_peak_bytes <= sharing.distinct_bytes


def test_more_bytes_a_token_make_more_bytes_and_the_same_hits() -> None:
    read = read_trace(BY_NAME["chat-multiturn"])
    small, large = (characterise(read, Machine(bytes_per_token=size)).sharing for size in (1_000, 2_000))
    assert small is not None
    assert large is not None
    assert large.ideal_hit == small.ideal_hit
    assert large.distinct_bytes == 2 * small.distinct_bytes
    assert large.working_set_peak_bytes == 2 * small.working_set_peak_bytes


def test_what_a_trace_does_not_tell_is_unknown_and_never_zero() -> None:
    character = characterise(read_trace(TRACES / "azure.csv.gz"))
    assert (character.num_sessions, character.turns, character.pause_s, character.sharing) == (None,) * 4
    said = figures(character)
    for row in ("sessions", "calls a session", "pauses, s", "ideal hit", "working set of KV"):
        assert said[row] == "unknown"
    assert "sharing is unknown" in character.notes[-1]


def test_one_request_alone_has_no_gaps() -> None:
    character = characterise(trace(arrival(3.0)))
    assert (character.gap_s, character.gap_cv, character.duration_s) == (None, None, 0.0)
    assert figures(character)["CV of the gaps"] == "unknown"


def test_quantised_timestamps_are_spread_before_gaps_are_counted() -> None:
    generator = random.Random(1)
    exact = sorted(generator.random() * 600 for _ in range(2_000))
    character = characterise(trace(*(arrival(at // 3 * 3) for at in exact)))
    assert character.quantum_s == 3.0
    assert character.gap_cv == pytest.approx(1.0, abs=0.1)
    assert "multiples of 3 s" in character.notes[0]


def test_sessions_with_their_own_clocks_are_played_so_many_at_a_time() -> None:
    calls = [
        arrival(float(at), session=f"s{n}", server_s=1.0) for n in range(4) for at in (0, 4, 9)
    ]  # each takes ten seconds
    by_lanes = {
        lanes: characterise(trace(*calls, clock="session"), Machine(live_sessions=lanes)).duration_s
        for lanes in (1, 2, 4, 9)
    }
    assert by_lanes == {1: 39.0, 2: 19.0, 4: 9.0, 9: 9.0}


def test_a_prompt_that_goes_on_from_an_earlier_one_is_of_its_session() -> None:
    common = ("system", 512)
    prompts = [
        (common, ("a1", 512), ("a-tail", 9)),
        (common, ("b1", 512), ("b-tail", 9)),
        (common, ("a1", 512), ("a2", 512), ("x", 1)),
        (common, ("a1", 512), ("a2", 512), ("a3", 512), ("y", 1)),
        (common, ("c1", 512)),
        *((common, (f"d{n}", 512), ("z", 1)) for n in range(30)),
    ]
    sessions = [r.session for r in linked([arrival(float(n), parts=p) for n, p in enumerate(prompts)])]
    assert sessions[0] == sessions[2] == sessions[3]
    assert len(set(sessions)) == len(prompts) - 2
    character = characterise(trace(*(arrival(float(n), parts=p) for n, p in enumerate(prompts))))
    assert character.turns is not None
    assert character.turn_gap_s is not None
    assert character.turn_gap_s.mean == 1.5
    assert "sessions are inferred" in character.notes[-1]


def demand(**changes: object) -> Demand:
    """A request a second for a thousand seconds, of a hundred tokens in and ten out."""
    told: dict[str, object] = {
        "times": tuple(float(n) for n in range(1_000)),
        "input_tokens": (100,) * 1_000,
        "output_tokens": (10,) * 1_000,
        "ideal_hit": 0.8,
        "hit_here": 0.8,
        **changes,
    }
    return Demand(**told)  # type: ignore[arg-type]


FAST = Speeds(prefill_tokens_per_s=1_000, decode_tokens_per_s=1_000)


@pytest.mark.parametrize(
    ("given", "machine", "kind"),
    [
        (demand(), FAST, "none"),
        (
            demand(ideal_hit=0.0, hit_here=0.0),
            Speeds(prefill_tokens_per_s=80, decode_tokens_per_s=1_000),
            "prefill",
        ),
        (demand(), Speeds(prefill_tokens_per_s=1_000, decode_tokens_per_s=9), "decode"),
        (demand(hit_here=0.1), Speeds(prefill_tokens_per_s=50, decode_tokens_per_s=1_000), "KV capacity"),
        (
            demand(times=tuple(float(n // 50 * 100) for n in range(1_000))),
            Speeds(prefill_tokens_per_s=120, decode_tokens_per_s=120),
            "arrival bursts",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_bottleneck_is_what_the_work_is_made_of(given: Demand, machine: Speeds, kind: str) -> None:
    found = find_bottleneck(given, machine=machine)
    assert found.kind == kind
    assert f"{found.prefill_load:.2f}" in found.reason


def test_loads_are_seconds_of_work_a_second() -> None:
    found = find_bottleneck(demand(hit_here=0.5), machine=FAST)
    assert found.prefill_load == pytest.approx(0.1 * 0.2, rel=0.01)
    assert found.missed_load == pytest.approx(0.1 * 0.3, rel=0.01)
    assert found.decode_load == pytest.approx(0.01, rel=0.01)
    assert found.peak_load == pytest.approx(0.1 * 0.5 + 0.01, rel=0.01)


def test_a_clock_that_jumps_for_ages_costs_no_memory() -> None:
    jump = (*(float(n) for n in range(999)), 1e12)
    found = find_bottleneck(demand(times=jump), machine=FAST)
    assert found.kind == "none"
    assert found.peak_load == 0.0


def test_a_larger_cache_takes_the_blame_from_kv_capacity() -> None:
    read = read_trace(BY_NAME["tool-agent"])
    speeds = {"prefill_tokens_per_s": 500.0, "decode_tokens_per_s": 1_000.0}
    small = characterise(read, Machine(kv_bytes=1 << 20, **speeds))  # type: ignore[arg-type]
    large = characterise(read, Machine(kv_bytes=1 << 30, **speeds))  # type: ignore[arg-type]
    assert small.bottleneck.kind == "KV capacity"
    assert large.bottleneck.kind != "KV capacity"
    assert large.bottleneck.missed_load == 0.0


@pytest.mark.parametrize(
    "option", ["bytes_per_token", "block_tokens", "kv_bytes", "prefill_tokens_per_s", "live_sessions"]
)
def test_a_machine_without_something_is_refused_by_name(option: str) -> None:
    with pytest.raises(PlanInvalid, match=f"--{option.replace('_', '-')} is 0; it must be between"):
        characterise(trace(arrival(0.0)), Machine(**{option: 0}))
    with pytest.raises(PlanInvalid, match="is nan"):
        characterise(trace(arrival(0.0)), Machine(decode_tokens_per_s=math.nan))
