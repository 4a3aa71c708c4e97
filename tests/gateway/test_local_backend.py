"""The whole server over the real engine, with a worker whose tokens depend on every KV slot."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from core import Engine, EngineConfig, SamplingParams
from gateway.backends import Backend
from gateway.backends.local import LocalBackend
from gateway.config import ServerConfig
from gateway.keys import ADMISSION
from tests.fakes.kv_worker import generate_alone
from tests.gateway.serving import (
    Server,
    ask,
    chat_body,
    connected,
    get,
    http_request,
    metric,
    serving,
    sse_data,
    streamed_text,
)
from tests.gateway.test_generation import CHATML
from tokenization import ChatTemplate, byte_tokenizer
from tokenization.user_text import MARKERS

WORKER = "tests.fakes.kv_worker:load_worker"
TOKENIZER = byte_tokenizer()
TEMPLATE = ChatTemplate(CHATML, TOKENIZER)
VOCAB_SIZE = TOKENIZER.vocab_size


@dataclass
class Opened:
    """What a test may look at while the server runs."""

    engines: list[Engine] = field(default_factory=list)

    @property
    def engine(self) -> Engine:
        return self.engines[-1]

    def num_held_blocks(self) -> int:
        return self.engine.stats().scheduler.num_held_blocks


@asynccontextmanager
async def served(options: str = "", **changes: Any) -> AsyncIterator[tuple[Server, Opened]]:
    engine_fields = {
        "executor": "thread",
        "num_blocks": 256,
        "block_size": 4,
        "max_model_len": 1024,
        "allow_longer_context": True,
    }
    engine = EngineConfig(
        checkpoint=f"fake:vocab={VOCAB_SIZE}{options}", **engine_fields | changes.pop("engine_fields", {})
    )
    opened = Opened()

    @asynccontextmanager
    async def open_backend(config: ServerConfig) -> AsyncIterator[Backend]:
        async with Engine.open(config.engine, worker=WORKER) as running:
            opened.engines.append(running)
            yield LocalBackend(running, tokenizer=TOKENIZER, template=TEMPLATE, model_id=config.model_id)

    async with serving(open_backend, engine=engine, **changes) as server:
        yield server, opened
        async with asyncio.timeout(20):
            await server.app[ADMISSION].idle()
        server.check_nothing_is_held()
        if not server.stopped.done():  # an engine that is gone takes its last step's blocks along
            await blocks_back(opened)


async def blocks_back(opened: Opened, *, within_steps: int = 2) -> None:
    """Wait until nobody holds a block; at most the steps in flight may end meanwhile."""
    before = opened.engine.stats().num_steps
    while opened.num_held_blocks():
        await asyncio.sleep(0.001)
        assert opened.engine.stats().num_steps <= before + within_steps


async def blocks_held(opened: Opened) -> None:
    """Wait until a step has begun. The engine tells nobody when that is, so look again and again."""
    while not opened.num_held_blocks():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def prompt_ids(text: str) -> list[int]:
    return TOKENIZER.encode_rendered(TEMPLATE.render([{"role": "user", "content": text}]))


def alone(text: str, *, max_tokens: int) -> list[int]:
    """The oracle: the tokens this prompt gives with nobody beside it."""
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=0, stop_token_ids=tuple(TOKENIZER.eos_token_ids)
    )
    return generate_alone(prompt_ids(text), sampling, vocab_size=VOCAB_SIZE)


def greedy(text: str, **fields: Any) -> bytes:
    return chat_body(messages=[{"role": "user", "content": text}], temperature=0, **fields)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_answer_is_what_the_engine_gives_alone(stream: bool) -> None:
    async with served() as (server, _):
        response = await ask(server, greedy("Hello", max_tokens=40, stream=stream))
    expected = alone("Hello", max_tokens=40)
    text = streamed_text(response.body) if stream else response.json["choices"][0]["message"]["content"]
    assert text == TOKENIZER.decode(expected)


async def test_usage_is_honest_about_the_prefix_cache() -> None:
    async with served() as (server, _):
        first = (await ask(server, greedy("The same words", max_tokens=4))).json["usage"]
        second = (await ask(server, greedy("The same words", max_tokens=4))).json["usage"]
    assert first["prompt_tokens"] == second["prompt_tokens"] == len(prompt_ids("The same words"))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    # All of the prompt but its last token, which is always computed.
    assert second["prompt_tokens_details"]["cached_tokens"] == len(prompt_ids("The same words")) - 1
    assert second["completion_tokens"] == 4


async def test_many_at_once_give_what_each_gives_alone() -> None:
    texts = [f"question {i % 5} " + "x" * (i * 7 % 50) for i in range(16)]
    async with served(engine_fields={"num_blocks": 64, "max_step_tokens": 64, "max_running": 16}) as (
        server,
        _,
    ):
        responses = await asyncio.gather(
            *(ask(server, greedy(text, max_tokens=24, stream=i % 2 == 0)) for i, text in enumerate(texts))
        )
    for i, (text, response) in enumerate(zip(texts, responses, strict=True)):
        expected = TOKENIZER.decode(alone(text, max_tokens=24))
        if i % 2 == 0:
            assert streamed_text(response.body) == expected
        else:
            assert response.json["choices"][0]["message"]["content"] == expected


async def test_a_stop_string_ends_the_request_in_the_engine_too() -> None:
    question = next(f"Hello {n}" for n in range(99) if len(alone(f"Hello {n}", max_tokens=200)) == 200)
    answer = TOKENIZER.decode(alone(question, max_tokens=200))
    stop = next(answer[i : i + 2] for i in range(10, 150) if "\ufffd" not in answer[i : i + 2])
    async with served() as (server, opened):
        response = await ask(server, greedy(question, max_tokens=900, stop=[stop]))
        await blocks_back(opened)
        assert opened.engine.stats().scheduler.num_running == 0
    choice = response.json["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == answer[: answer.index(stop)]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_gives_its_blocks_back_within_a_step(stream: bool) -> None:
    async with served(",step_s=0.005") as (server, opened):
        async with connected(server) as connection, asyncio.timeout(20):
            connection.send(http_request(greedy("Hello", max_tokens=900, stream=stream)))
            if stream:
                await connection.head()
                await connection.chunk()
            await blocks_held(opened)
            connection.leave()
            await server.app[ADMISSION].idle()
            await blocks_back(opened)
        text = (await get(server, "/metrics")).body
        assert metric(text, "tidegate_requests_running") == 0
        assert metric(text, "tidegate_requests_waiting") == 0
        assert metric(text, 'tidegate_kv_blocks{state="held"}') == 0
        states = [metric(text, f'tidegate_kv_blocks{{state="{s}"}}') for s in ("free", "held", "evictable")]
        assert sum(states) == 256


async def test_what_can_never_fit_is_refused_before_it_is_queued() -> None:
    async with served() as (server, opened):
        for body, param in (
            (greedy("x" * 2000), "messages"),
            (greedy("x" * 2000, stream=True), "messages"),
            (greedy("Hello", max_tokens=5000), "max_tokens"),
            (greedy("x" * 600, stream=True, max_tokens=900), "max_tokens"),
        ):
            response = await ask(server, body)
            assert (response.status, response.error["code"]) == (400, "context_length_exceeded")
            assert response.error["param"] == param
        assert opened.engine.stats().num_requests == 0


async def test_too_many_tokens_are_refused_with_how_many_are_allowed() -> None:
    async with served() as (server, _):
        refused = (await ask(server, greedy("Hello", max_tokens=5000))).error["message"]
        room = int(refused.removesuffix(" are allowed").rpartition(" ")[2])
        assert refused.startswith("max_tokens is 5000; the context length is 1024 and the prompt has ")
        assert (await ask(server, greedy("Hello", max_tokens=room + 1))).status == 400
        assert (await ask(server, greedy("Hello", max_tokens=room))).status == 200


async def test_a_text_that_leaves_no_marker_is_refused_with_its_path() -> None:
    everything = "".join(MARKERS)
    messages = [
        {"role": "system", "content": everything},
        {"role": "user", "content": "Hi"},
        {"role": "user", "content": f"{next(t.text for t in TOKENIZER.added_tokens if t.special)}"},
    ]
    async with served() as (server, _):
        refused = await ask(server, chat_body(messages=messages, max_tokens=2))
        alone = await ask(server, chat_body(messages=messages[1:], max_tokens=2))
        without_it = await ask(server, chat_body(messages=messages[:2], max_tokens=2))
    assert (refused.status, refused.error["code"]) == (400, "no_marker_left")
    assert refused.error["param"] == "messages[2].content"
    assert (alone.status, without_it.status) == (200, 200)


async def test_without_max_tokens_the_answer_fills_the_context() -> None:
    async with served(engine_fields={"max_model_len": 64}) as (server, _):
        usage = (await ask(server, greedy("seven"))).json["usage"]
    expected = alone("seven", max_tokens=64 - len(prompt_ids("seven")))
    assert usage["completion_tokens"] == len(expected)


async def test_a_failed_step_ends_its_streams_with_an_error_and_the_server_goes_on() -> None:
    async with served(",raise_on_step=5") as (server, _):
        response = await ask(server, greedy("Hello", max_tokens=100, stream=True))
        events = sse_data(response.body)
        assert events[-1]["error"]["code"] == "generation_failed"
        assert b"RuntimeError" not in response.body
        assert (await ask(server, greedy("Hello", max_tokens=4))).status == 200
        assert (await get(server, "/livez")).status == 200


async def test_draining_lets_the_engine_finish_what_runs() -> None:
    async with served(",step_s=0.005") as (server, _), connected(server) as connection:
        connection.send(http_request(greedy("Hello", max_tokens=30, stream=True)))
        await connection.head()
        first = await connection.chunk()
        server.stop()
        body = first
        while chunk := await connection.chunk():
            body += chunk
        await server.stopped
    assert streamed_text(body) == TOKENIZER.decode(alone("Hello", max_tokens=30))


async def test_a_drain_that_runs_out_ends_streams_with_an_error_event() -> None:
    async with served(",step_s=0.02", drain_timeout_s=0.05) as (server, _), connected(server) as connection:
        connection.send(http_request(greedy("Hello there", max_tokens=900, stream=True)))
        await connection.head()
        body = await connection.chunk()
        server.stop()
        while chunk := await connection.chunk():
            body += chunk
        await server.stopped
    assert json.loads(body.rstrip().rpartition(b"data: ")[2])["error"]["code"] == "draining"


async def test_a_long_prompt_does_not_hold_the_loop() -> None:
    engine_fields = {"max_model_len": 400_000, "num_blocks": 110_000, "max_step_tokens": 4096}
    async with served(engine_fields=engine_fields) as (server, _):
        loop = asyncio.get_running_loop()
        delays: list[float] = []

        async def watch() -> None:
            while True:
                due = loop.time() + 0.005
                await asyncio.sleep(0.005)
                delays.append(loop.time() - due)

        watching = asyncio.create_task(watch())
        async with connected(server) as connection:
            connection.send(http_request(greedy("word " * 60_000, max_tokens=1, stream=True)))
            async with asyncio.timeout(60):
                await connection.head()
            connection.leave()
        watching.cancel()
    assert max(delays) < 0.25, f"{max(delays):.3f} s"


async def test_choices_share_their_prompt_and_are_each_what_one_alone_is() -> None:
    question = "The same words for all of us. " * 6
    num_prompt_tokens = len(prompt_ids(question))
    async with served() as (server, opened):
        many = (await ask(server, greedy(question, n=4, max_tokens=8))).json
        computed = opened.engine.stats().scheduler.num_computed_tokens
    expected = TOKENIZER.decode(alone(question, max_tokens=8))
    assert [choice["message"]["content"] for choice in many["choices"]] == [expected] * 4
    assert many["usage"]["prompt_tokens"] == num_prompt_tokens
    # The prompt once, and for each sibling at most the block that is not full and the tokens it makes.
    assert computed <= num_prompt_tokens + 3 * 4 + 4 * 8


async def test_a_choice_that_fails_ends_all_and_gives_every_block_back() -> None:
    async with served(",sample_error_on_step=4") as (server, opened):
        response = await ask(server, greedy("Hello", n=3, max_tokens=100, stream=True))
        events = sse_data(response.body)
        assert [event["error"]["code"] for event in events if "error" in event] == ["generation_failed"]
        assert "error" in events[-1]
        await blocks_back(opened)
        assert opened.engine.stats().scheduler.num_running == 0
        assert (await ask(server, greedy("Hello", n=3, max_tokens=4))).status == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_all_its_choices(stream: bool) -> None:
    async with served(",step_s=0.005") as (server, opened):
        async with connected(server) as connection, asyncio.timeout(20):
            connection.send(http_request(greedy("Hello", n=3, max_tokens=900, stream=stream)))
            await blocks_held(opened)
            connection.leave()
            await server.app[ADMISSION].idle()
            await blocks_back(opened)
        assert opened.engine.stats().scheduler.num_waiting == 0


async def test_completions_are_named_in_their_own_words_when_they_are_too_long() -> None:
    body = {"model": "scripted", "prompt": ["a", "x" * 2000], "max_tokens": 4}
    async with served() as (server, opened):
        for fields, param in (
            ({}, "prompt"),
            ({"prompt": "x" * 600, "max_tokens": 900}, "max_tokens"),
            ({"prompt": [[97] * 1024]}, "prompt"),
        ):
            response = await ask(server, json.dumps(body | fields).encode(), path="/v1/completions")
            assert (response.status, response.error["code"]) == (400, "context_length_exceeded")
            assert response.error["param"] == param
        assert opened.num_held_blocks() == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, f"logit_bias.{VOCAB_SIZE}"),
        ({"logit_bias": {"999999": -100}}, "logit_bias.999999"),
        ({"stop_token_ids": [1, VOCAB_SIZE]}, "stop_token_ids[1]"),
        ({"prompt": [1, VOCAB_SIZE]}, "prompt[1]"),
        ({"prompt": [[1], [2, 2**31 - 1]]}, "prompt[1][1]"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
    ],
)
async def test_what_the_vocabulary_does_not_have_is_refused_by_name(
    fields: dict[str, Any], param: str
) -> None:
    body = {"model": "scripted", "prompt": "a", "max_tokens": 4}
    async with served() as (server, opened):
        response = await ask(server, json.dumps(body | fields).encode(), path="/v1/completions")
        assert (response.status, response.error["param"]) == (400, param)
        assert (await ask(server, json.dumps(body).encode(), path="/v1/completions")).status == 200
        assert opened.engine.stats().num_requests == 1
