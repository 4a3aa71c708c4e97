"""Plans: what is read, what is refused and how clearly, and what makes two of them the same."""

import gzip
import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.errors import PlanInvalid
from loadtest.plan import MAX_TOKENS, answer_segments, dump_plan, load_plan, parse_plan, plan_of
from loadtest.traces import read_trace
from tests.loadtest.plans import PLANS, plan, request

LINE: dict[str, Any] = {"id": "r0", "session": "s0", "segments": [["a", 10]], "max_tokens": 8, "at_s": 0}


def text(*lines: dict[str, Any]) -> str:
    return "\n".join(json.dumps(line) for line in lines)


def refused(*lines: dict[str, Any]) -> str:
    with pytest.raises(PlanInvalid) as caught:
        parse_plan(text(*lines), "some.jsonl")
    return str(caught.value)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.name)
def test_the_published_plans_are_read(path: Path) -> None:
    read = load_plan(path)
    assert read.name == path.name.removesuffix(".plan.jsonl.gz")
    assert 16 <= len(read.requests) <= 70
    assert all(request.num_prompt_tokens <= 2_052 for request in read.requests)


def test_there_are_six_published_plans() -> None:
    assert len(PLANS) == 6


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.name)
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_a_plan_written_and_read_again_is_the_same(path: Path, ending: str, tmp_path: Path) -> None:
    first = load_plan(path)
    dump_plan(first, tmp_path / f"again.{ending}")
    again = load_plan(tmp_path / f"again.{ending}")
    assert (again.requests, again.sha256) == (first.requests, first.sha256)
    assert again.name == "again"


def test_notes_are_written_and_read_and_are_not_part_of_the_hash(tmp_path: Path) -> None:
    noted = plan_of("test", [request()], notes=["bursts spread", "tokens x 0.5"])
    dump_plan(noted, tmp_path / "noted.jsonl")
    again = load_plan(tmp_path / "noted.jsonl")
    assert again.notes == noted.notes
    assert again.sha256 == noted.sha256 == plan(request()).sha256


def test_notes_of_another_kind_are_refused() -> None:
    for line in ({"notes": "one"}, {"notes": [], "more": 1}):
        assert refused(line, LINE).startswith("some.jsonl, line 1: ")
    assert refused(LINE, {"notes": []}).startswith("some.jsonl, line 2: ")


def test_after_may_be_one_id_or_several() -> None:
    lines = (
        LINE,
        {**LINE, "id": "r1", "at_s": None, "after": "r0", "delay_s": 1.5},
        {**LINE, "id": "r2", "at_s": None, "after": ["r0", "r1"], "join": "all"},
    )
    read = parse_plan(text(*lines), "some.jsonl")
    assert [request.after for request in read.requests] == [(), ("r0",), ("r0", "r1")]
    assert read.requests[1].delay_s == 1.5


def test_the_hash_is_of_the_work_alone() -> None:
    plain = parse_plan(text(LINE), "a")
    spelled_otherwise = parse_plan(
        "\n\n" + json.dumps({**LINE, "at_s": 0.0, "delay_s": 0.0, "stop": "tool_use"}, indent=None) + "\r\n",
        "b",
    )
    assert plain.sha256 == spelled_otherwise.sha256
    assert plan_of("c", plain.requests, notes=["scaled"]).sha256 == plain.sha256


@pytest.mark.parametrize(
    "change",
    [
        {"id": "r1"},
        {"session": "s1"},
        {"segments": [["a", 11]]},
        {"segments": [["a", 10, "system"], ["b", 1]]},
        {"max_tokens": 9},
        {"at_s": 0.5},
        {"at_s": None, "at_unit": 0},
        {"cancel_after_s": 1.0},
        {"cancel_after_tokens": 3},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_work_has_another_hash(change: dict[str, Any]) -> None:
    assert parse_plan(text({**LINE, **change}), "a").sha256 != parse_plan(text(LINE), "a").sha256


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": 0}, f"max_tokens is 0; it must be between 1 and {MAX_TOKENS}"),
        ({"max_tokens": "8"}, "Expected `int`, got `str` - at `$.max_tokens`"),
        ({"segments": [["a", 0]]}, "segments[0] num_tokens is 0; it must be between 1"),
        ({"segments": [["a", 10], ["b", "x"]]}, "at `$.segments[1][1]`"),
        ({"segments": [["a", 10, "robot"]]}, "Invalid enum value 'robot' - at `$.segments[0][2]`"),
        ({"segments": [["a", MAX_TOKENS], ["b", 1]]}, "the prompt's tokens is 10000001"),
        ({"segments": []}, "the prompt's tokens is 0"),
        ({"segments": [["", 1]]}, "segments[0] id has 0 characters; it must have between 1 and 200"),
        ({"id": "x" * 201}, "id has 201 characters"),
        ({"at_s": -1}, "at_s is -1.0; it must be between 0 and"),
        ({"at_s": 1e12}, "at_s is 1000000000000.0"),
        ({"cancel_after_tokens": 0}, "cancel_after_tokens is 0"),
        ({"cancel_after_s": -0.1}, "cancel_after_s is -0.1"),
        ({"at_s": None}, "exactly one of at_s, at_unit and after must be given; there is none"),
        ({"at_unit": 1}, "there is at_s and at_unit"),
        ({"after": "r1"}, "there is at_s and after"),
        ({"delay_s": 1}, "delay_s counts from the end of the requests in after, and there are none"),
        ({"temperature": 0.5}, "Object contains unknown field `temperature`"),
        ({"join": "any"}, "Invalid enum value 'any' - at `$.join`"),
        ({"segments": [["a", 1], ["b", 1, "assistant"]]}, "they end with 'assistant'"),
        ({"segments": [["a", 1, "system"]]}, "they end with 'system'"),
        ({"segments": [["a", 1], ["b", 1, "system"], ["c", 1]]}, "segments must be system ones, then"),
        ({"segments": [["a", 1, "assistant"], ["c", 1]]}, "beginning with a user's"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_a_bad_field_is_named_with_file_line_and_bound(change: dict[str, Any], words: str) -> None:
    message = refused({**LINE, "id": "first"}, {**LINE, **change})
    assert message.startswith("some.jsonl, line 2: ")
    assert words in message


def test_a_missing_field_is_named() -> None:
    assert "missing required field `session`" in refused({k: v for k, v in LINE.items() if k != "session"})


def test_a_line_that_is_no_json_is_named_by_its_number() -> None:
    with pytest.raises(PlanInvalid, match=r"some\.jsonl, line 3: "):
        parse_plan(text(LINE) + "\n\n{nonsense", "some.jsonl")


def test_an_id_used_twice_names_both_lines() -> None:
    assert refused(LINE, LINE) == "some.jsonl, line 2: id 'r0' was used before, at some.jsonl, line 1"


def test_waiting_for_a_request_that_is_not_there_is_refused() -> None:
    message = refused(LINE, {**LINE, "id": "r1", "at_s": None, "after": "r9"})
    assert message == "some.jsonl, line 2: after names 'r9', which is no request of the plan"


def test_waiting_for_one_request_twice_is_refused() -> None:
    assert "after names a request twice" in refused(
        LINE, {**LINE, "id": "r1", "at_s": None, "after": ["r0", "r0"]}
    )


def test_requests_that_wait_for_each_other_are_refused_with_the_circle() -> None:
    waits = {"b": "a", "a": "c", "c": ["b", "r0"], "outside": "c"}
    lines = [{**LINE, "id": name, "at_s": None, "after": after} for name, after in waits.items()]
    message = refused(LINE, *lines)
    assert "after makes a circle: " in message
    circle = message.split(": ")[-1].split(" -> ")
    assert circle[0] == circle[-1]
    assert sorted(circle[1:]) == ["a", "b", "c"]


def test_a_request_that_waits_for_itself_is_a_circle() -> None:
    assert "circle: r1 -> r1" in refused(LINE, {**LINE, "id": "r1", "at_s": None, "after": "r1"})


def test_a_number_that_is_none_is_refused_in_plans_made_by_code_too() -> None:
    with pytest.raises(PlanInvalid, match=r"plan test, request 'r0': at_s is nan"):
        plan(request(at_s=math.nan))


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["r0", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@given(
    st.lists(st.dictionaries(st.sampled_from([*LINE, "after", "at_unit", "notes"]), JSON_VALUES), max_size=3)
)
def test_whatever_stands_in_a_plan_the_answer_is_a_plan_or_a_message(changes: list[dict[str, Any]]) -> None:
    lines = [{**LINE, **change} if "notes" not in change else change for change in changes]
    try:
        read = parse_plan(text(*lines), "some.jsonl")
    except PlanInvalid as error:
        assert str(error).startswith("some.jsonl")
    else:
        assert 1 <= len(read.requests) <= len(lines)


@given(st.text(max_size=60) | st.binary(max_size=60))
def test_whatever_stands_in_a_file_the_answer_is_a_message(content: str | bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "any"
        path.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
        for read in (load_plan, read_trace):
            with pytest.raises(PlanInvalid):
                read(path)


def test_an_empty_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(PlanInvalid, match=r"empty\.jsonl holds no request"):
        load_plan(tmp_path / "empty.jsonl")


def test_a_small_file_that_unpacks_to_a_large_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadtest.text_files.MAX_FILE_BYTES", 10_000)
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(b"\n" * 10_001))
    with pytest.raises(PlanInvalid, match=r"bomb\.jsonl\.gz holds more than 10000 bytes"):
        load_plan(tmp_path / "bomb.jsonl.gz")


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "marked.jsonl").write_text(text(LINE), encoding="utf-8-sig")
    assert len(load_plan(tmp_path / "marked.jsonl").requests) == 1


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(text(LINE).encode())[:-9])
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(b"\x1f\x8b" + b"nonsense" * 4)
    other = tmp_path / "other.jsonl"
    other.write_bytes(b"\xff\xfe{}")
    for path, words in (
        (tmp_path / "none.jsonl", "cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
        (cut, "is not a whole gzip file"),
        (broken, "is not a whole gzip file"),
        (other, "is not UTF-8 text"),
    ):
        with pytest.raises(PlanInvalid, match=words) as caught:
            load_plan(path)
        assert str(path) in str(caught.value)


def test_a_long_chain_is_checked_without_recursion() -> None:
    chain = [request("r0"), *(request(f"r{n}", after=(f"r{n - 1}",)) for n in range(1, 5_000))]
    assert len(plan(*reversed(chain)).requests) == 5_000


def test_a_recorded_answer_is_known_by_the_prompt_it_follows() -> None:
    first = request("r0", ("sys", 5, "system"), ("q0", 5))
    second = request(
        "r1", *map(msgspec.structs.astuple, first.segments), ("a0", 7, "assistant"), ("q1", 5), after=("r0",)
    )
    other = request("r2", ("sys", 5, "system"), ("q9", 5), ("a9", 7, "assistant"), ("q1", 5), after=("r0",))
    assert answer_segments(plan(first, second, other)) == {"a0": "r0"}
