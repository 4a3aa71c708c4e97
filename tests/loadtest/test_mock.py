"""The mock does what its options say: the script in exact numbers, the server in counts and orders."""

import asyncio
import json
import time
import urllib.error
import urllib.request
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.client import Client
from loadtest.dialects import find_dialect
from loadtest.errors import PlanInvalid
from loadtest.event_stream import EventStream
from loadtest.mock.memory import PrefixMemory
from loadtest.mock.script import MockOptions, Prompt, Script, Step, check_options
from loadtest.mock.server import MockServer, running_mock
from loadtest.mock.ticker import EARLY_S, Ticker
from tests.loadtest.mock_process import mock_process, mock_stats
from tests.loadtest.raw_server import until
from tests.loadtest.test_client import a_call

PROMPT = Prompt(
    is_chat=True, words=["a"] * 10, max_tokens=9, streams=True, include_usage=True, continuous_usage=True
)


def steps_of(options: MockOptions, *, prompt: Prompt = PROMPT, num_cached=0) -> list[Step]:
    script = Script(options, prompt, request_id="m", num_cached=num_cached)
    return list(script.steps(fails=options.fail != "none"))


def content_steps(steps: list[Step]) -> list[Step]:
    return [step for step in steps if step.num_tokens]


def tpot_s(steps: list[Step]) -> float:
    timed = content_steps(steps)
    return (timed[-1].offset_s - timed[0].offset_s) / (sum(step.num_tokens for step in timed) - 1)


async def post(server: MockServer, path: str, body: object, *, method="POST") -> tuple[int, Any]:
    def ask() -> tuple[int, bytes]:
        data = None if method == "GET" else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", data=data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    status, text = await asyncio.to_thread(ask)
    return status, json.loads(text)


# The script.


def test_tokens_are_due_at_the_time_to_first_and_then_a_gap_apart():
    timed = content_steps(steps_of(MockOptions(ttft_s=0.1, itl_s=0.02)))
    assert [step.offset_s for step in timed] == pytest.approx([0.1 + i * 0.02 for i in range(9)])


@pytest.mark.parametrize("tokens_per_event", [1, 2, 3, 5, 100])
def test_tokens_in_one_event_leave_the_time_per_token_as_it_is(tokens_per_event):
    steps = steps_of(MockOptions(ttft_s=0.1, itl_s=0.02, tokens_per_event=tokens_per_event))
    assert tpot_s(steps) == pytest.approx(0.02)
    assert content_steps(steps)[0].offset_s == pytest.approx(0.1)


def test_a_prompt_token_that_is_not_cached_takes_its_time():
    options = MockOptions(ttft_s=0.1, prefill_s_per_token=0.01)
    assert content_steps(steps_of(options))[0].offset_s == pytest.approx(0.2)
    assert content_steps(steps_of(options, num_cached=8))[0].offset_s == pytest.approx(0.12)


def test_a_stall_moves_all_that_comes_after_it():
    options = MockOptions(ttft_s=0.1, itl_s=0.02, stall_after_tokens=4, stall_s=3)
    times = [step.offset_s for step in content_steps(steps_of(options))]
    gaps = [b - a for a, b in pairwise(times)]
    assert gaps == pytest.approx([0.02, 0.02, 0.02, 3.02, 0.02, 0.02, 0.02, 0.02])


def test_comments_fill_every_silence():
    options = MockOptions(ttft_s=1.0, itl_s=0.3, keepalive_s=0.25)
    steps = steps_of(options)
    assert all(b.offset_s - a.offset_s <= 0.25 + 1e-9 for a, b in pairwise(steps))
    assert sum(step.num_tokens for step in steps) == 9


@settings(max_examples=60, deadline=None)
@given(
    tokens_per_event=st.integers(1, 12), num_reasoning_tokens=st.integers(0, 12),
    max_tokens=st.integers(1, 12), is_chat=st.booleans(), line_end=st.sampled_from(["\n", "\r\n", "\r"]),
    num_empty_deltas=st.integers(0, 2),
)  # fmt: skip
def test_a_script_is_a_whole_answer_of_its_dialect(*, max_tokens, is_chat, **options):
    prompt = msgspec.structs.replace(PROMPT, max_tokens=max_tokens, is_chat=is_chat)
    steps = steps_of(MockOptions(**options), prompt=prompt)
    assert all(a.offset_s <= b.offset_s for a, b in pairwise(steps))
    assert [step.then for step in steps] == ["go on"] * (len(steps) - 1) + ["end"]
    events = EventStream().feed(b"".join(step.data for step in steps))
    assert events.pop() == (b"", b"[DONE]")
    read = find_dialect("chat" if is_chat else "completions").read
    readings = [read(data) for _, data in events]
    text = "".join(reading.reasoning + reading.text for reading in readings)
    assert text == " word" * max_tokens
    assert readings[-1].usage is not None
    assert readings[-1].usage.num_output_tokens == max_tokens
    assert [reading.finish_reason for reading in readings if reading.finish_reason] == ["length"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ttft_s", -1.0),
        ("itl_s", float("nan")),
        ("tokens_per_event", 0),
        ("fail_status", 200),
        ("fail_every", 0),
    ],
)
def test_an_option_out_of_its_bounds_is_refused_by_name(name, value):
    with pytest.raises(PlanInvalid, match=f"{name} is"):
        check_options(MockOptions(**{name: value}))


# The memory.


def test_the_memory_knows_what_it_was_given_and_nothing_else():
    memory = PrefixMemory(1)
    assert memory.num_cached(["a", "b", "c"]) == 0
    memory.add(["a", "b", "c"])
    assert memory.num_cached(["a", "b", "c", "d"]) == 3
    assert memory.num_cached(["a", "b", "x"]) == 2
    assert memory.num_cached(["b", "c"]) == 0
    assert memory.num_cached(["a", "b", "c"]) == 2  # the last one is computed always
    assert memory.num_cached([]) == 0


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.sampled_from("ab"), max_size=12), max_size=6),
    asked=st.lists(st.sampled_from("ab"), max_size=12),
    block_tokens=st.integers(1, 4),
)
def test_the_memory_is_the_longest_common_beginning_in_whole_blocks(prompts, asked, block_tokens):
    memory = PrefixMemory(block_tokens)
    longest = 0
    for prompt in prompts:
        memory.add(prompt)
        common = next((i for i, (a, b) in enumerate(zip(prompt, asked, strict=False)) if a != b), None)
        longest = max(longest, min(len(prompt), len(asked)) if common is None else common)
    expected = min(longest, max(0, len(asked) - 1)) // block_tokens * block_tokens
    assert memory.num_cached(asked) == expected


# The ticker.


async def test_calls_come_in_order_of_time_and_never_before_it():
    ticker = Ticker()
    called: list[tuple[int, float]] = []

    def call(number: int) -> None:
        called.append((number, time.monotonic()))

    start_at = time.monotonic()
    delays = [0.05, 0.01, 0.03, 0.01, 0.0]
    for number, delay_s in enumerate(delays):
        ticker.call_at(start_at + delay_s, partial(call, number))
    await until(lambda: len(called) == len(delays))
    assert [number for number, _ in called] == [4, 1, 3, 2, 0]
    assert all(at - start_at >= delays[number] - EARLY_S for number, at in called)
    assert len(ticker.lateness_s) == len(delays)


async def test_a_call_that_sets_calls_does_not_keep_the_loop_to_itself():
    ticker = Ticker()
    num_called = 0

    def again() -> None:
        nonlocal num_called
        num_called += 1
        ticker.call_at(0.0, again)

    again()
    await until(lambda: num_called > 3)  # each turn of the loop is ours as well
    ticker.close()


async def test_a_call_that_fails_stops_no_other():
    ticker = Ticker()
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    called: list[int] = []

    def fail() -> None:
        raise ZeroDivisionError

    ticker.call_at(0.0, fail)
    ticker.call_at(0.0, lambda: called.append(1))
    await until(lambda: called)
    assert isinstance(reported[0]["exception"], ZeroDivisionError)


# The server.


async def test_cached_tokens_are_what_an_earlier_prompt_or_answer_shares():
    async with (
        running_mock(MockOptions(ttft_s=0, itl_s=0)) as mock,
        Client(f"http://127.0.0.1:{mock.port}", find_dialect("chat")) as client,
    ):
        found = [
            (await client.send(a_call(text=text, max_tokens=2))).num_cached_tokens
            for text in (" a b c d", " a b x y", " q b c d", " a b c d word word z")
        ]
    assert found == [0, 2, 0, 6]


@pytest.mark.parametrize(("cached", "expected"), [("off", [0, 0]), ("warm", [3, 3]), ("honest", [0, 3])])
async def test_a_cache_can_be_off_or_warm_whatever_is_asked(cached, expected):
    async with (
        running_mock(MockOptions(ttft_s=0, itl_s=0, cached=cached)) as mock,
        Client(f"http://127.0.0.1:{mock.port}", find_dialect("completions")) as client,
    ):
        calls = [a_call(dialect="completions", text=" a b c d", max_tokens=1) for _ in range(2)]
        assert [(await client.send(call)).num_cached_tokens for call in calls] == expected


async def test_requests_above_the_limit_wait_their_turn_in_order():
    async with (
        running_mock(MockOptions(ttft_s=0.01, itl_s=0, max_running=1)) as mock,
        Client(f"http://127.0.0.1:{mock.port}", find_dialect("chat")) as client,
    ):
        async with asyncio.TaskGroup() as tasks:
            for _ in range(5):
                tasks.create_task(client.send(a_call()))
        seen = list(mock.seen)
        assert [each.is_queued for each in seen] == [False] + [True] * 4
        for earlier, later in pairwise(seen):
            assert earlier.ended_at is not None
            assert later.started_at is not None
            assert later.started_at >= earlier.ended_at
        assert mock.stats()["num_running"] == mock.stats()["num_waiting"] == 0


async def test_a_client_that_leaves_gives_its_turn_or_its_place_back():
    async with (
        running_mock(MockOptions(ttft_s=60, max_running=1)) as mock,
        Client(f"http://127.0.0.1:{mock.port}", find_dialect("chat")) as client,
    ):
        async with asyncio.TaskGroup() as tasks:
            sending = [tasks.create_task(client.send(a_call())) for _ in range(3)]
            await until(lambda: len(mock.seen) == 3)
            for task in sending:
                task.cancel()
        await until(lambda: all(each.is_cancelled for each in mock.seen))
        assert mock.stats()["num_running"] == mock.stats()["num_waiting"] == 0


async def test_the_whole_servers_stall_holds_everybody_back():
    options = MockOptions(ttft_s=0, itl_s=0.05, stall_at_s=0.1, stall_s=0.5)
    async with (
        running_mock(options) as mock,
        Client(f"http://127.0.0.1:{mock.port}", find_dialect("chat")) as client,
        asyncio.TaskGroup() as tasks,
    ):
        sending = [tasks.create_task(client.send(a_call(max_tokens=8))) for _ in range(3)]
    first_at = mock.seen[0].at
    for record in (task.result() for task in sending):
        assert record.fault is None
        assert record.ended_at - first_at >= 0.5 + 7 * 0.05 - 0.01


async def test_a_stall_shifts_what_it_meets_and_leaves_the_rest():
    async with running_mock(MockOptions(stall_at_s=10, stall_s=3)) as mock:
        mock._first_at = 100.0
        assert mock.due_at(100, 9) == 109  # before it
        assert mock.due_at(100, 10.5) == 113.5  # it lies between
        assert mock.due_at(111, 1) == 114  # begun inside: nothing happened before its end
        assert mock.due_at(113, 1) == 114  # begun after it


async def test_a_whole_answer_comes_to_who_does_not_stream():
    async with running_mock(MockOptions(ttft_s=0, itl_s=0)) as mock:
        body = {"model": "mock", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 2}
        status, answer = await post(mock, "/v1/chat/completions", body)
        assert status == 200
        assert answer["choices"][0]["message"]["content"] == " word word"
        assert answer["usage"]["prompt_tokens"] == 2
        body = {"model": "mock", "prompt": "a b", "max_completion_tokens": 3}
        _, answer = await post(mock, "/v1/completions", body)
        assert answer["choices"][0]["text"] == " word" * 3


async def test_the_mock_says_what_it_serves_how_late_it_was_and_whom_it_saw():
    async with running_mock(MockOptions(ttft_s=0, itl_s=0, model="tiny")) as mock:
        assert (await post(mock, "/v1/models", None, method="GET"))[1]["data"][0]["id"] == "tiny"
        assert (await post(mock, "/tokenize", {"model": "tiny", "prompt": "a b c"}))[1]["count"] == 3
        body = {"model": "tiny", "prompt": "a b", "max_tokens": 2}
        assert (await post(mock, "/v1/completions", body))[0] == 200
        _, stats = await post(mock, "/mock/stats", None, method="GET")
        assert stats["num_requests"] == 1
        assert stats["lateness_p99_s"] >= 0
        _, seen = await post(mock, "/mock/requests", None, method="GET")
        assert [each["num_prompt_tokens"] for each in seen] == [2]
        await post(mock, "/mock/forget", {})
        _, stats = await post(mock, "/mock/stats", None, method="GET")
        assert (stats["num_requests"], stats["lateness_p99_s"]) == (0, None)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/nowhere", {}, 404),
        ("/v1/completions", [1], 400),
        ("/v1/completions", {"model": "mock"}, 400),
        ("/v1/completions", {"model": "mock", "prompt": "a", "max_tokens": 0}, 400),
        ("/v1/completions", {"model": "x", "prompt": "a"}, 404),
        ("/v1/chat/completions", {"model": "mock", "prompt": "a"}, 400),
    ],
)
async def test_what_the_mock_cannot_use_is_refused(path, body, status):
    async with running_mock(MockOptions()) as mock:
        found, answer = await post(mock, path, body)
        assert found == status
        assert answer["error"]["message"]


async def test_only_each_nth_request_fails():
    options = MockOptions(ttft_s=0, itl_s=0, fail="status", fail_every=3)
    async with (
        running_mock(options) as mock,
        Client(f"http://127.0.0.1:{mock.port}", find_dialect("chat")) as client,
    ):
        records = [await client.send(a_call()) for _ in range(6)]
    assert [record.fault is not None for record in records] == [False, False, True] * 2


async def test_a_port_that_is_taken_is_said():
    async with running_mock(MockOptions()) as mock:
        with pytest.raises(PlanInvalid, match=str(mock.port)):
            async with running_mock(MockOptions(), port=mock.port):
                pass


async def test_the_mock_runs_as_a_process_and_stamps_its_events_on_the_common_clock():
    with mock_process(MockOptions(ttft_s=0.01, itl_s=0.001, stamp=True)) as url:
        before = time.monotonic()
        async with Client(url, find_dialect("chat")) as client:
            record = await client.send(a_call())
        assert record.fault is None
        assert record.first_token_at is not None
        assert before < record.first_token_at < time.monotonic()
        stats = await asyncio.to_thread(mock_stats, url)
        assert stats["num_events"] == 6
