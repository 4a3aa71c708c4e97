"""Server-sent events come out the same, wherever the bytes are cut and whatever ends a line."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.event_stream import EventStream, EventTooLong

EVENTS = [(b"", b'{"a":1}'), (b"error", b"x"), (b"", b"one\ntwo"), (b"", "é☂".encode()), (b"", b"[DONE]")]
TEXT = (
    b": hello\n\n"
    b'data: {"a":1}\n\n'
    b"event: error\ndata:x\nid: 4\n\n"
    b"retry: 10\n\n"
    b"data: one\n:comment\ndata: two\n\n" + "data: é☂\n\n".encode() + b"data: [DONE]\n\n"
)


def read(pieces: list[bytes]) -> list[tuple[bytes, bytes]]:
    stream = EventStream()
    return [event for piece in pieces for event in stream.feed(piece)]


@settings(max_examples=150, deadline=None)
@given(
    cuts=st.sets(st.integers(1, 160)), line_end=st.sampled_from([b"\n", b"\r\n", b"\r"]), bom=st.booleans()
)
def test_events_do_not_depend_on_where_the_bytes_are_cut(cuts, line_end, bom):
    text = (b"\xef\xbb\xbf" if bom else b"") + TEXT.replace(b"\n", line_end)
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    assert read([text[a:b] for a, b in pairwise(places)]) == EVENTS


def test_many_events_in_one_piece_are_many_events():
    assert read([b"\n\n", b"data: 1\n\ndata: 2\n\n", b"data: 3\n\ndata: 4\n\n"]) == [
        (b"", b"1"),
        (b"", b"2"),
        (b"", b"3"),
        (b"", b"4"),
    ]


def test_an_event_is_complete_with_its_blank_line_and_not_before():
    stream = EventStream()
    assert stream.feed(b"data: half") == []
    assert stream.feed(b" of it\n") == []
    assert stream.feed(b"\n") == [(b"", b"half of it")]


def test_a_done_without_a_blank_line_is_still_one():
    stream = EventStream()
    assert stream.feed(b"data: 1\n\ndata: [DONE]\n") == [(b"", b"1")]
    assert stream.says_done()
    assert not EventStream().says_done()


def test_bytes_that_never_become_an_event_are_bounded():
    stream = EventStream(max_event_bytes=100)
    stream.feed(b"data: " + b"x" * 90)
    with pytest.raises(EventTooLong, match="100 bytes"):
        stream.feed(b"x" * 20)
