"""What every dialect promises, run over the folder: a new file is tested the moment it appears."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gateway.dialects
from gateway.dialects import Dialect, find_dialects
from gateway.errors import ErrorReport, InvalidRequest
from gateway.events import ChoiceEnded, EndReason, Event, Finished, Started, TextDelta, Usage

DIALECTS = find_dialects()
over_dialects = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.path)
REPORT = ErrorReport(status=500, type="server_error", code="some_code", message="it broke", param=None)
USAGE = Usage(num_prompt_tokens=11, num_cached_tokens=5, num_output_tokens=3)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def example(dialect: Dialect, **fields: object) -> dict[str, object]:
    body: dict[str, object] = json.loads(dialect.example(model="m", stream=False))
    return body | fields


def parse(dialect: Dialect, body: object) -> None:
    dialect.parse(json.dumps(body).encode(), max_depth=64)


def write(dialect: Dialect, events: Sequence[Event], *, stream: bool) -> list[bytes]:
    request = dialect.parse(dialect.example(model="m", stream=stream), max_depth=64)
    writer = dialect.writer(request, request_id="f00", created=1_700_000_000, model="m", fingerprint="fp")
    return [writer.chunk(event) for event in events] if stream else [writer.whole(events)]


def frames(chunk: bytes) -> list[bytes]:
    """The SSE frames of a chunk, which must be whole ones."""
    assert chunk.endswith(b"\n\n")
    assert b"\r" not in chunk
    return chunk.removesuffix(b"\n\n").split(b"\n\n")


def test_every_file_of_the_folder_is_a_dialect() -> None:
    files = [p for p in Path(gateway.dialects.__file__).parent.glob("*.py") if p.stem != "__init__"]
    assert len(DIALECTS) == len(files) > 0
    assert len({dialect.path for dialect in DIALECTS}) == len(DIALECTS)
    assert all(dialect.path.startswith("/") for dialect in DIALECTS)


@over_dialects
@pytest.mark.parametrize("stream", [True, False])
def test_the_example_says_what_it_was_asked_to_say(dialect: Dialect, stream: bool) -> None:
    request = dialect.parse(dialect.example(model="some/model", stream=stream), max_depth=64)
    assert request.model == "some/model"
    assert request.stream is stream
    assert bool(request.messages) != bool(request.prompts)


@over_dialects
@given(body=st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(dialect: Dialect, body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        dialect.parse(body, max_depth=64)


@over_dialects
@given(value=JSON, data=st.data())
def test_any_value_in_any_field_is_parsed_or_refused_by_name(
    dialect: Dialect, value: object, data: st.DataObject
) -> None:
    field = data.draw(st.sampled_from(sorted(example(dialect))))
    try:
        parse(dialect, example(dialect, **{field: value}))
    except InvalidRequest as error:
        assert error.param is not None
        assert error.param.startswith(field)


@over_dialects
@given(name=st.text(max_size=300), value=JSON)
def test_no_unknown_field_is_ignored(dialect: Dialect, name: str, value: object) -> None:
    name = f"x_{name}"
    with pytest.raises(InvalidRequest) as caught:
        parse(dialect, example(dialect, **{name: value}))
    assert caught.value.param is not None
    assert name.startswith(caught.value.param.removesuffix("..."))
    assert len(caught.value.param) <= 128


@over_dialects
def test_each_required_field_is_missed_by_name(dialect: Dialect) -> None:
    whole = example(dialect)
    whole.pop("stream")
    for field in whole:
        with pytest.raises(InvalidRequest) as caught:
            parse(dialect, {name: value for name, value in whole.items() if name != field})
        assert caught.value.param == field


@over_dialects
def test_a_cut_body_is_refused_at_every_byte(dialect: Dialect) -> None:
    body = dialect.example(model="m", stream=True)
    for end in range(len(body)):
        with pytest.raises(InvalidRequest):
            dialect.parse(body[:end], max_depth=64)


@over_dialects
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@pytest.mark.parametrize("depth", [63, 500, 200_000])
def test_deep_nesting_is_refused_whatever_it_stands_in(dialect: Dialect, opening: bytes, depth: int) -> None:
    example_body = dialect.example(model="m", stream=True)
    for body in (opening * depth, example_body[:-1] + b',"metadata":' + opening * depth):
        with pytest.raises(InvalidRequest):
            dialect.parse(body, max_depth=64)


@over_dialects
@given(texts=st.lists(st.text(min_size=1), min_size=1, max_size=5))
def test_streamed_and_whole_answers_hold_the_same_text(dialect: Dialect, texts: list[str]) -> None:
    events: list[Event] = [
        Started(num_prompt_tokens=11),
        *map(TextDelta, texts),
        Finished(reason=EndReason.STOP, usage=USAGE),
    ]
    chunks = write(dialect, events, stream=True)
    for text, chunk in zip(texts, chunks[1:], strict=False):
        assert json.dumps(text, ensure_ascii=False) in json.dumps(
            [json.loads(frame.partition(b"data: ")[2]) for frame in frames(chunk)], ensure_ascii=False
        )
    [body] = write(dialect, events, stream=False)
    assert json.dumps("".join(texts), ensure_ascii=False) in json.dumps(json.loads(body), ensure_ascii=False)


@over_dialects
@pytest.mark.parametrize("stream", [True, False])
def test_choices_are_told_apart_wherever_they_can_be_asked_for(dialect: Dialect, stream: bool) -> None:
    asked = json.dumps(example(dialect, n=2, stream=stream)).encode()
    try:
        request = dialect.parse(asked, max_depth=64)
    except InvalidRequest as error:
        assert error.param == "n"  # an API without choices says so
        return
    assert request.num_choices == 2

    def written(first: int, second: int) -> bytes:
        writer = dialect.writer(request, request_id="f00", created=1, model="m", fingerprint="fp")
        events: list[Event] = [
            Started(num_prompt_tokens=1),
            TextDelta("one", first),
            TextDelta("two", second),
            ChoiceEnded(index=first, reason=EndReason.STOP),
            Finished(reason=EndReason.LENGTH, usage=USAGE, index=second),
        ]
        return b"".join(map(writer.chunk, events)) if stream else writer.whole(events)

    assert written(0, 1) != written(1, 0)
    for text in (b"one", b"two"):
        assert text in written(0, 1)


@over_dialects
@pytest.mark.parametrize("reason", EndReason)
def test_every_end_is_written_and_told_apart(dialect: Dialect, reason: EndReason) -> None:
    others = [other for other in EndReason if other is not reason]
    for stream in (True, False):
        ends = [
            write(dialect, [Started(num_prompt_tokens=1), Finished(reason=each, usage=USAGE)], stream=stream)
            for each in (reason, *others)
        ]
        assert all(frames(end[-1]) if stream else json.loads(end[0]) for end in ends)
        assert len({b"".join(end) for end in ends}) == len(EndReason)


@over_dialects
def test_an_error_is_said_in_a_body_and_in_a_stream(dialect: Dialect) -> None:
    assert "it broke" in json.dumps(json.loads(dialect.error(REPORT)))
    request = dialect.parse(dialect.example(model="m", stream=True), max_depth=64)
    writer = dialect.writer(request, request_id="f00", created=1, model="m", fingerprint="fp")
    [frame] = frames(writer.error(REPORT))
    assert b"it broke" in frame
