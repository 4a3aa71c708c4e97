"""Whatever bytes come, cut wherever, a request ends in exactly one record that does not contradict itself."""

import asyncio
import time
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.call import Call, Deadlines
from loadtest.dialects import find_dialect
from loadtest.exchange import Exchange
from loadtest.mock.script import MockOptions, Prompt, Script
from loadtest.record import RequestRecord
from loadtest.transport import Connection, Connections, parse_target

PROMPT = Prompt(
    is_chat=True, words=["a"] * 3, max_tokens=5, streams=True, include_usage=True, continuous_usage=True
)


class FakeTransport(asyncio.Transport):
    """Writes nowhere; closed is closed."""

    def __init__(self) -> None:
        super().__init__()
        self._is_closed = False

    def writelines(self, list_of_data) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        self._is_closed = True

    abort = close


def an_answer() -> bytes:
    script = Script(MockOptions(keepalive_s=0.03), PROMPT, request_id="m", num_cached=1)
    datas = [step.data for step in script.steps(fails=False)]
    body = b"".join(b"%x\r\n%b\r\n" % (len(data), data) for data in datas)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + body + b"0\r\n\r\n"


ANSWER = an_answer()


async def play(data: bytes, cuts: set[int], **fields) -> tuple[RequestRecord, bool]:
    """The record, and whether the line went back to the pool."""
    pool = Connections(parse_target("http://x"), connect_s=1)
    connection, transport = Connection(pool), FakeTransport()
    connection.connection_made(transport)
    call = Call(id="r", session="s", turn=0, body=b"{}", scheduled_at=time.monotonic(), **fields)
    exchange = Exchange(call, find_dialect("chat").read, Deadlines())
    exchange.start(connection, b"POST")
    places = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    for start, end in pairwise(places):
        if start < end and not transport.is_closing():
            connection.data_received(data[start:end])
    went_back = connection in pool._idle
    connection.connection_lost(None)
    assert exchange.done.done()
    exchange.release()
    return exchange.record(), went_back


def check(record: RequestRecord) -> None:
    assert record.sent_at is not None
    assert record.scheduled_at <= record.sent_at <= record.ended_at
    assert all(a <= b for a, b in pairwise((record.sent_at, *record.content_times, record.ended_at)))
    assert len(record.content_tokens) in {0, len(record.content_times)}
    assert (record.token_source == "unknown") == (record.content_tokens == ())
    assert not (record.cancelled and record.fault is not None)
    assert record.fault is None or record.fault.message


@settings(max_examples=80, deadline=None)
@given(cuts=st.sets(st.integers(1, len(ANSWER)), max_size=40))
def test_a_whole_answer_is_the_same_wherever_it_is_cut(cuts):
    record, went_back = asyncio.run(play(ANSWER, cuts, keep_text=True))
    check(record)
    assert record.fault is None
    assert went_back
    assert (record.text, record.content_tokens) == (" word" * 5, (1.0,) * 5)
    assert record.num_cached_tokens == 1
    assert len(ANSWER) - 7 <= record.num_bytes <= len(ANSWER)  # HTTP's own end may come after [DONE]


@settings(max_examples=80, deadline=None)
@given(end=st.integers(0, len(ANSWER) - 1), cuts=st.sets(st.integers(1, len(ANSWER)), max_size=10))
def test_an_answer_that_breaks_off_anywhere_is_a_cut_or_was_over(end, cuts):
    record, went_back = asyncio.run(play(ANSWER[:end], cuts))
    check(record)
    assert not went_back
    is_over = b"[DONE]\n\n" in ANSWER[:end]
    assert (record.fault is None) == is_over
    assert record.fault is None or record.fault.kind == "cut"


@settings(max_examples=150, deadline=None)
@given(
    place=st.integers(0, len(ANSWER)),
    num_lost=st.integers(0, 30),
    noise=st.binary(max_size=30),
    cuts=st.sets(st.integers(1, len(ANSWER)), max_size=10),
    limit=st.none() | st.integers(0, 6),
)
def test_an_answer_with_damage_anywhere_still_gives_one_record(place, num_lost, noise, cuts, limit):
    data = ANSWER[:place] + noise + ANSWER[place + num_lost :]
    record, _ = asyncio.run(play(data, cuts, cancel_after_tokens=limit))
    check(record)
