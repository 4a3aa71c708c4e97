"""Traces as they were published: what is read from each format, and what is refused."""

import gzip
import json
from pathlib import Path

import pytest

from loadtest.errors import PlanInvalid
from loadtest.ideal import ideal_hit
from loadtest.plan import dump_plan, load_plan, plan_of
from loadtest.reuse import reuse_of
from loadtest.traces import read_trace, trace_format_names
from tests.loadtest.plans import PLANS, TRACES


def test_every_format_is_seen_from_its_first_line() -> None:
    found = {read_trace(path).format for path in (*TRACES.glob("*.gz"), PLANS[0])}
    assert found == set(trace_format_names())


def test_mooncake_gives_times_lengths_and_blocks() -> None:
    trace = read_trace(TRACES / "mooncake.jsonl.gz")
    assert (trace.name, trace.clock, len(trace.requests)) == ("mooncake", "wall", 60)
    first = trace.requests[0]
    assert (first.num_input_tokens, first.num_output_tokens, first.at_s) == (6_758, 500, 0.0)
    assert first.parts is not None
    assert first.parts[0] == trace.requests[1].parts[0] == ("b0", 512)  # type: ignore[index]
    assert first.parts[-1] == ("b13", 6_758 - 13 * 512)
    assert all(sum(n for _, n in r.parts or ()) == r.num_input_tokens for r in trace.requests)


def test_azure_gives_times_from_the_first_row_on_and_no_prefixes() -> None:
    trace = read_trace(TRACES / "azure.csv.gz")
    assert (trace.name, trace.clock, len(trace.requests)) == ("azure", "wall", 120)
    first, second = trace.requests[:2]
    assert (first.num_input_tokens, first.num_output_tokens, first.at_s) == (374, 44, 0.0)
    assert second.at_s == pytest.approx(50.995169 - 46.68059, abs=1e-5)
    assert first.parts is None
    assert first.session is None


def test_weka_gives_sessions_pauses_and_sub_agents_in_order_of_time() -> None:
    trace = read_trace(TRACES / "weka.jsonl.gz")
    assert trace.clock == "session"
    one = [request for request in trace.requests if request.session == "trace_0643"]
    assert [request.num_input_tokens for request in one] == [6_343, 9_393, 9_533, 9_729, 9_893, 10_204]
    assert [request.pause_s for request in one] == [None, 3.0, 3.0, 3.0, 3.0, 4.0]
    assert one[0].server_s == 4.2
    other = [request for request in trace.requests if request.session == "trace_0003"]
    assert [request.agent for request in other].count("agent1") == 4
    assert len(other) == 7
    assert [request.at_s for request in other] == sorted(request.at_s for request in other)
    assert min(request.at_s for request in other if request.agent) == pytest.approx(134.227)
    assert all(sum(n for _, n in r.parts or ()) == r.num_input_tokens for r in trace.requests)


def test_wekas_block_numbers_are_each_sessions_own() -> None:
    trace = read_trace(TRACES / "weka.jsonl.gz")
    one, other = (
        {name for r in trace.requests if r.session == session for name, _ in r.parts or ()}
        for session in ("trace_0643", "trace_0003")
    )
    assert one
    assert other
    assert not one & other


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.name)
def test_a_plan_read_as_a_trace_has_the_same_ideal_hit(path: Path) -> None:
    trace, plan = read_trace(path), load_plan(path)
    times = [request.at_s for request in trace.requests]
    reuse = reuse_of([request.parts or () for request in trace.requests], times, block_tokens=1)
    assert reuse.ideal == pytest.approx(ideal_hit(plan).share(), abs=0.002)
    assert reuse.num_prompt_tokens == sum(request.num_prompt_tokens for request in plan.requests)


def test_a_plan_with_notes_is_seen_as_a_plan_and_keeps_them(tmp_path: Path) -> None:
    noted = plan_of("x", load_plan(PLANS[0]).requests, notes=["scaled"])
    dump_plan(noted, tmp_path / "noted.plan.jsonl")
    trace = read_trace(tmp_path / "noted.plan.jsonl")
    assert trace.format == "planned"
    assert trace.notes[0] == "scaled"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hello", "begins like no known trace; known are azure, mooncake, planned, weka"),
        ("", "begins like no known trace"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "trace.jsonl holds no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,5\n", "line 2: there are 2 fields"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n\n2023-11-16 18:17:03,x,1\n",
            "line 3: ContextTokens is 'x'",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1,-1\n", "line 2: GeneratedTokens is"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "line 2: TIMESTAMP is 'yesterday'"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-13-16 18:17:03,1,1\n",
            "line 2: TIMESTAMP .* is no date",
        ),
        ('{"timestamp": 0, "hash_ids": []}', r"line 1: Object missing required field `input_length`"),
        (
            '{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": []}',
            r"line 1: Expected `float` >= 0.* at `\$\.timestamp`",
        ),
        (
            '{"id": "a", "block_size": 0, "requests": []}',
            r"line 1: Expected `int` >= 1 - at `\$\.block_size`",
        ),
        (
            '{"id": "a", "block_size": 64, "requests": [{"t": 1}]}',
            r"line 1: Object missing required field `in`",
        ),
        ('{"timestamp": 0, "hash_ids": [], "x": ' + "[" * 9_999, r"line 1: nested too deep"),
        ('{"id": "a", "block_size": 64, "requests": [{"t": ' + "[" * 9_999, r"line 1: nested too deep"),
        ('{"id": "r", "segments": []}', r"line 1: Object missing required field `session`"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(PlanInvalid, match=words):
        read_trace(path)


def test_a_format_may_be_named_and_must_exist(tmp_path: Path) -> None:
    path = tmp_path / "no_first_line.jsonl"
    path.write_text(json.dumps({"x": 1}))
    with pytest.raises(PlanInvalid, match="missing required field `timestamp`"):
        read_trace(path, format_name="mooncake")
    with pytest.raises(PlanInvalid, match="no trace format 'moon'; known are azure, mooncake"):
        read_trace(path, format_name="moon")


def test_a_name_loses_what_only_says_how_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "conv.first.csv.gz"
    path.write_bytes((TRACES / "azure.csv.gz").read_bytes())
    assert read_trace(path).name == "conv.first"
    assert gzip.decompress(path.read_bytes()).startswith(b"TIMESTAMP")
