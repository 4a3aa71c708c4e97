"""What a record says of a stream. Users' complaints about load testers, each as a test.

Nothing here asserts that something was quick: only lower bounds, orderings and counts.
"""

import asyncio
import time
from itertools import pairwise

import pytest
import uvloop

from loadtest.client import Call, Client, Deadlines, encode_body
from loadtest.dialects import Ask, Message, dialect_names, find_dialect
from loadtest.exchange import count_tokens
from loadtest.mock.script import MockOptions
from loadtest.mock.server import running_mock
from loadtest.mock.ticker import EARLY_S
from loadtest.record import RequestRecord
from tests.loadtest.raw_server import EVENT_HEAD, raw_server, says, sized, until

CLOCK_S = EARLY_S + 0.001
"""The mock may be early by so much, and timers round."""


def a_call(
    *, dialect="chat", text=" a b c", max_tokens=6, model="mock", continuous_usage=True, **fields
) -> Call:
    ask = Ask(
        model=model,
        messages=(Message("user", text),),
        max_tokens=max_tokens,
        continuous_usage=continuous_usage,
    )
    body = encode_body(find_dialect(dialect), ask)
    return Call(
        **{"id": "r", "session": "s", "turn": 0, "scheduled_at": time.monotonic(), **fields}, body=body
    )


async def ask_mock(options: MockOptions, *, dialect="chat", deadlines=None, **fields) -> RequestRecord:
    async with (
        running_mock(options) as mock,
        Client(f"http://127.0.0.1:{mock.port}", find_dialect(dialect), deadlines=deadlines) as client,
    ):
        return await client.send(a_call(dialect=dialect, **fields))


async def ask_raw(body: bytes, **fields) -> RequestRecord:
    async with raw_server(says(sized(body))) as server, Client(server.url, find_dialect("chat")) as client:
        return await client.send(a_call(**fields))


def chunk(delta: str, *, rest: str = "") -> bytes:
    return f'data: {{"choices":[{{"delta":{delta}}}]{rest}}}\n\n'.encode()


@pytest.mark.parametrize("dialect", dialect_names())
async def test_a_stream_is_timed_counted_and_kept(dialect):
    options = MockOptions(ttft_s=0.05, itl_s=0.01)
    record = await ask_mock(options, dialect=dialect, turn=3, keep_text=True, num_planned_prompt_tokens=3)
    assert record.fault is None
    assert record.sent_at is not None
    assert record.first_token_at is not None
    assert record.last_token_at is not None
    assert record.scheduled_at <= record.sent_at
    assert record.first_token_at - record.sent_at >= 0.05 - CLOCK_S
    assert record.last_token_at - record.sent_at >= 0.05 + 5 * 0.01 - CLOCK_S
    assert record.last_token_at <= record.ended_at
    assert record.first_token_at == record.first_visible_at == record.content_times[0]
    assert all(a <= b for a, b in pairwise(record.content_times))
    assert record.content_tokens == (1.0,) * 6
    assert record.token_source == "continuous usage"
    assert (record.num_prompt_tokens, record.num_output_tokens, record.num_cached_tokens) == (3, 6, 0)
    assert (record.finish_reason, record.text, record.turn) == ("length", " word" * 6, 3)
    assert (record.num_planned_prompt_tokens, record.cancelled) == (3, False)


@pytest.mark.parametrize("fail", ["none", "status", "cut", "garbage"])
def test_on_uvloop_as_in_a_real_run_it_is_the_same(fail):
    record = uvloop.run(ask_mock(MockOptions(ttft_s=0.02, itl_s=0.001, fail=fail)))
    assert record.sent_at is not None
    kinds = {"none": None, "status": "http", "cut": "cut", "garbage": "protocol"}
    assert (record.fault and record.fault.kind) == kinds[fail]
    assert len(record.content_times) == {"none": 6, "status": 0}.get(fail, 3)
    assert all(at - record.sent_at >= 0.02 - 2 * CLOCK_S for at in record.content_times)


async def test_an_answer_that_nobody_needs_is_not_kept():
    assert (await ask_mock(MockOptions(ttft_s=0, itl_s=0))).text == ""


# Complaint 3: the empty first chunk.


async def test_roles_empty_deltas_and_keep_alives_do_not_start_the_clock():
    options = MockOptions(ttft_s=0.2, itl_s=0, role_chunk=True, num_empty_deltas=5, keepalive_s=0.01)
    record = await ask_mock(options, max_tokens=3)
    assert record.fault is None
    assert record.sent_at is not None
    assert record.first_token_at is not None
    assert record.first_token_at - record.sent_at >= 0.2 - CLOCK_S
    assert len(record.content_times) == 3
    assert record.num_events == 3 + 1 + 5 + 2  # role, empty deltas, the finish reason and usage


@pytest.mark.parametrize("delta", ['{"role":"assistant"}', '{"content":""}', '{"content":null}', "{}"])
async def test_a_stream_of_empty_chunks_has_no_first_token(delta):
    record = await ask_raw(chunk(delta) * 3 + b": ping\n\ndata: [DONE]\n\n")
    assert record.fault is None
    assert record.first_token_at is record.last_token_at is record.first_visible_at is None
    assert record.content_tokens == ()
    assert record.token_source == "unknown"


# Complaint 4: reasoning.


async def test_reasoning_is_the_first_token_and_not_the_first_visible_one():
    record = await ask_mock(MockOptions(ttft_s=0.02, itl_s=0.02, num_reasoning_tokens=3), keep_text=True)
    assert record.first_token_at == record.content_times[0]
    assert record.first_visible_at == record.content_times[3]
    assert record.content_tokens == (1.0,) * 6
    assert record.text == " word" * 3


async def test_a_tool_call_is_visible_content():
    delta = '{"tool_calls":[{"index":0,"function":{"name":"f","arguments":"{}"}}]}'
    record = await ask_raw(chunk('{"reasoning":"hm"}') + chunk(delta) + b"data: [DONE]\n\n")
    assert len(record.content_times) == 2
    assert record.first_visible_at == record.content_times[1]


# Complaint 2: a chunk is not a token.


@pytest.mark.parametrize(
    ("usage", "source"), [("continuous", "continuous usage"), ("final", "by text length")]
)
async def test_two_tokens_in_an_event_are_two_tokens(usage, source):
    record = await ask_mock(MockOptions(ttft_s=0, itl_s=0.001, tokens_per_event=2, usage=usage), max_tokens=9)
    assert record.content_tokens == pytest.approx((1, 2, 2, 2, 2))
    assert record.token_source == source
    assert record.num_output_tokens == 9


async def test_a_server_that_is_not_asked_for_usage_with_each_event_is_counted_by_its_total():
    record = await ask_mock(MockOptions(ttft_s=0, itl_s=0), continuous_usage=False)
    assert record.token_source == "one per event"
    assert record.content_tokens == (1.0,) * 6


async def test_without_usage_nothing_is_known_and_nothing_is_zero():
    record = await ask_mock(MockOptions(ttft_s=0, itl_s=0, usage="never"))
    assert record.fault is None
    assert (record.content_tokens, record.token_source) == ((), "unknown")
    assert record.num_prompt_tokens is record.num_output_tokens is record.num_cached_tokens is None


async def test_cached_tokens_that_are_not_told_are_unknown():
    record = await ask_mock(MockOptions(ttft_s=0, itl_s=0, cached="silent"))
    assert record.num_cached_tokens is None
    assert record.num_prompt_tokens == 3


@pytest.mark.parametrize(
    ("lengths", "totals", "total", "reason", "tokens", "source"),
    [
        ([5, 5], [1, 3], 3, "length", (1, 2), "continuous usage"),
        ([5, 5], [1, None], 2, "length", (1, 1), "one per event"),
        ([5, 5], [0, 0], 2, "length", (1, 1), "one per event"),
        ([5, 5], [3, 1], 2, "length", (1, 1), "one per event"),
        ([5, 5], [None, None], 3, "stop", (1, 1), "one per event"),
        ([5, 10], [None, None], 3, "length", (1, 2), "by text length"),
        ([5, 5], [None, None], None, None, (), "unknown"),
        ([], [], 5, "length", (), "unknown"),
    ],
)
def test_tokens_of_an_event_are_taken_from_the_best_that_is_told(
    lengths, totals, total, reason, tokens, source
):
    found, found_source = count_tokens(lengths=lengths, totals=totals, total=total, finish_reason=reason)
    assert found == pytest.approx(tokens)
    assert found_source == source


# Complaint 5: the client as the bottleneck.


async def test_a_stamp_is_of_the_read_and_all_events_of_one_read_share_it():
    record = await ask_raw(chunk('{"content":"a"}') * 500 + b"data: [DONE]\n\n")
    assert len(record.content_times) == 500
    assert len(set(record.content_times)) < 10


async def test_no_limit_on_connections_makes_requests_wait_in_the_client():
    options = MockOptions(ttft_s=0.3, itl_s=0)
    async with (
        running_mock(options) as mock,
        Client(f"http://127.0.0.1:{mock.port}", find_dialect("chat")) as client,
    ):
        async with asyncio.TaskGroup() as tasks:
            sending = [tasks.create_task(client.send(a_call(max_tokens=1))) for _ in range(150)]
            await until(lambda: len(mock.seen) == 150)
            assert not any(task.done() and task.result().fault for task in sending)
        assert [task.result().fault for task in sending] == [None] * 150


async def test_an_event_in_pieces_and_other_line_ends_are_the_same_answer():
    for line_end in ("\n", "\r\n", "\r"):
        record = await ask_mock(
            MockOptions(ttft_s=0, itl_s=0, piece_bytes=150, line_end=line_end), max_tokens=2
        )
        assert record.fault is None
        assert record.content_tokens == (1.0, 1.0)


# Complaint 1 and the stall: what the server holds back shows, in the client's times.


async def test_a_stall_of_the_stream_delays_what_comes_after_it():
    options = MockOptions(ttft_s=0, itl_s=0.001, stall_after_tokens=2, stall_s=0.3)
    record = await ask_mock(options, max_tokens=4)
    assert record.sent_at is not None
    assert record.content_times[2] - record.sent_at >= 0.3 - CLOCK_S


async def test_a_wait_for_a_turn_is_in_the_time_to_first_token():
    options = MockOptions(ttft_s=0.1, itl_s=0, max_running=1)
    async with (
        running_mock(options) as mock,
        Client(f"http://127.0.0.1:{mock.port}", find_dialect("chat")) as client,
        asyncio.TaskGroup() as tasks,
    ):
        sending = [tasks.create_task(client.send(a_call(max_tokens=1))) for _ in range(4)]
    records = [task.result() for task in sending]
    last_first_token_at = max(record.first_token_at or 0 for record in records)
    assert last_first_token_at - min(record.sent_at or 0 for record in records) >= 4 * (0.1 - CLOCK_S)


# Complaint 8: failures are results.


@pytest.mark.parametrize(
    ("fail", "kind", "message"),
    [
        ("status", "http", "told to fail"),
        ("error event", "stream", "told to fail"),
        ("cut", "cut", "after 4 events"),
        ("no done", "cut", "[DONE]"),
        ("garbage", "protocol", "not the dialect's JSON"),
        ("hang", "timeout", "no event for"),
    ],
)
async def test_every_failure_has_its_kind_and_keeps_what_came_before(fail, kind, message):
    deadlines = Deadlines(idle_s=1.5 if fail == "hang" else 300)
    record = await ask_mock(MockOptions(ttft_s=0, itl_s=0.001, fail=fail), deadlines=deadlines)
    assert record.fault is not None
    assert record.fault.kind == kind
    assert message in record.fault.message
    assert len(record.content_times) == {"status": 0, "no done": 6}.get(fail, 3)
    assert not record.cancelled
    if fail == "status":
        assert record.fault.status == 503


async def test_a_server_that_only_keeps_the_line_open_is_noticed():
    options = MockOptions(ttft_s=60, keepalive_s=0.01)
    record = await ask_mock(options, deadlines=Deadlines(idle_s=0.2))
    assert record.fault is not None
    assert record.fault.kind == "timeout"


async def test_an_answer_without_end_stops_at_the_total_deadline():
    options = MockOptions(ttft_s=0, itl_s=0.01)
    record = await ask_mock(options, deadlines=Deadlines(total_s=1.0), max_tokens=100_000)
    assert record.fault is not None
    assert record.fault.kind == "timeout"
    assert record.first_token_at is not None


async def test_a_missing_key_is_a_401_with_the_servers_words():
    record = await ask_mock(MockOptions(api_key="secret"))
    assert record.fault is not None
    assert (record.fault.kind, record.fault.status) == ("http", 401)
    assert "API key" in record.fault.message


async def test_a_key_is_sent():
    async with (
        running_mock(MockOptions(ttft_s=0, itl_s=0, api_key="k")) as mock,
        Client(f"http://127.0.0.1:{mock.port}", find_dialect("chat"), api_key="k") as client,
    ):
        assert (await client.send(a_call())).fault is None


async def test_an_unknown_model_is_a_404_that_names_it():
    record = await ask_mock(MockOptions(), model="other")
    assert record.fault is not None
    assert (record.fault.status, "other" in record.fault.message) == (404, True)


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (b"HTTP/1.1 500 X\r\nContent-Length: 4\r\n\r\nboom", "http", "500: boom"),
        (b"HTTP/1.1 502 X\r\nContent-Length: 0\r\n\r\n", "http", "502"),
        (b"HTTP/1.1 302 X\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n", "http", "302"),
        (
            b'HTTP/1.1 429 X\r\nContent-Length: 26\r\n\r\n{"error":{"message":"hm"}}',
            "http",
            "429: hm",
        ),
        (
            b'HTTP/1.1 200 X\r\nContent-Type: application/json\r\nContent-Length: 14\r\n\r\n{"error":"no"}',
            "protocol",
            "no event stream, but: no",
        ),
        (b"HTTP/1.1 200 X\r\nContent-Type: text/html\r\nContent-Length: 4\r\n\r\n<p/>", "protocol", "<p/>"),
    ],
)
async def test_an_answer_that_is_no_stream_is_a_fault_with_its_words(answer, kind, message):
    async with raw_server(says(answer)) as server, Client(server.url, find_dialect("chat")) as client:
        record = await client.send(a_call())
    assert record.fault is not None
    assert record.fault.kind == kind
    assert message in record.fault.message


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (b'event: error\ndata: {"error":{"message":"late"}}\n\n', "late"),
        (b"event: error\ndata: plain words\n\n", "plain words"),
        (b'event: error\ndata: {"detail":"x"}\n\n', "detail"),
        (b'data: {"error":"late"}\n\n', "late"),
    ],
)
async def test_an_error_event_is_a_failure_whatever_it_looks_like(event, message):
    record = await ask_raw(chunk('{"content":"a"}') + event + b"data: [DONE]\n\n")
    assert record.fault is not None
    assert record.fault.kind == "stream"
    assert message in record.fault.message
    assert len(record.content_times) == 1


async def test_json_as_deep_as_a_well_is_a_fault_and_no_crash():
    record = await ask_raw(b"data: " + b'{"error":' + b"[" * 100_000 + b"\n\n")
    assert record.fault is not None
    assert record.fault.kind == "protocol"


async def test_what_follows_done_is_not_read():
    async with (
        raw_server(
            says(EVENT_HEAD + b"Content-Length: 900\r\n\r\n" + chunk('{"content":"a"}') + b"data: [DONE]\n\n")
        ) as server,
        Client(server.url, find_dialect("chat")) as client,
    ):
        record = await client.send(a_call())
    assert record.fault is None
    assert len(record.content_times) == 1


# Cancels.


async def test_a_cancel_after_tokens_leaves_and_is_no_failure():
    options = MockOptions(ttft_s=0, itl_s=0.01)
    async with (
        running_mock(options) as mock,
        Client(f"http://127.0.0.1:{mock.port}", find_dialect("chat")) as client,
    ):
        record = await client.send(a_call(max_tokens=10_000, cancel_after_tokens=3))
        assert record.fault is None
        assert record.cancelled
        assert sum(record.content_tokens) >= 3
        await until(lambda: mock.seen[0].is_cancelled)
        assert mock.stats()["num_running"] == 0


async def test_a_cancel_after_tokens_counts_tokens_and_not_events():
    options = MockOptions(ttft_s=0, itl_s=0.01, tokens_per_event=4)
    record = await ask_mock(options, max_tokens=1000, cancel_after_tokens=5)
    assert record.cancelled
    assert len(record.content_times) < 5


async def test_a_cancel_after_a_time_leaves_before_the_first_token_too():
    record = await ask_mock(MockOptions(ttft_s=60), cancel_after_s=0.1)
    assert record.cancelled
    assert record.fault is None
    assert record.first_token_at is None
    assert record.sent_at is not None
    assert record.ended_at - record.sent_at >= 0.1


async def test_an_answer_that_ends_before_its_cancel_is_whole():
    record = await ask_mock(MockOptions(ttft_s=0, itl_s=0), cancel_after_s=60, cancel_after_tokens=100)
    assert not record.cancelled
    assert record.finish_reason == "length"
