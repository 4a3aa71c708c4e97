"""The official `openai` package, sync and async, against the whole server."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionUserMessageParam

from core import RequestTooLong
from gateway.backends.scripted import Script, ScriptedBackend
from gateway.errors import GenerationFailed
from tests.gateway.serving import scripted
from tests.gateway.threads import server_thread

HELLO: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "Say hello."}]


@pytest.fixture
def sync_client() -> Iterator[tuple[OpenAI, ScriptedBackend]]:
    with (
        server_thread() as (server, backend),
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, backend


@asynccontextmanager
async def async_client() -> AsyncIterator[tuple[AsyncOpenAI, ScriptedBackend]]:
    async with (
        scripted() as (server, backend),
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, backend


def test_the_sync_client_gets_a_whole_answer(sync_client: tuple[OpenAI, ScriptedBackend]) -> None:
    answer = sync_client[0].chat.completions.create(model="scripted", messages=HELLO)
    assert answer.choices[0].message.content == "Hello world!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.id.startswith("chatcmpl-")


def test_the_sync_client_streams(sync_client: tuple[OpenAI, ScriptedBackend]) -> None:
    stream = sync_client[0].chat.completions.create(
        model="scripted", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello world!"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 10


def test_the_sync_client_lists_models(sync_client: tuple[OpenAI, ScriptedBackend]) -> None:
    assert [model.id for model in sync_client[0].models.list()] == ["scripted"]
    assert sync_client[0].models.retrieve("scripted").owned_by == "tidegate"


async def test_the_async_client_streams() -> None:
    async with async_client() as (it, _):
        stream = await it.chat.completions.create(model="scripted", messages=HELLO, stream=True)
        text = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(text) == "Hello world!"


async def test_the_async_clients_accumulator_takes_the_stream() -> None:
    async with async_client() as (it, _):
        async with it.chat.completions.stream(model="scripted", messages=HELLO) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert "content.delta" in kinds
        assert "content.done" in kinds
        assert final.choices[0].message.content == "Hello world!"


async def test_leaving_the_clients_stream_ends_the_generation() -> None:
    async with async_client() as (it, backend):
        backend.script = Script(deltas=("x",) * 1_000_000, every_s=0.002)
        async with asyncio.timeout(10):
            stream = await it.chat.completions.create(model="scripted", messages=HELLO, stream=True)
            async for _ in stream:
                break
            await stream.close()
            await backend.until_running(0)


async def test_a_failure_in_mid_stream_is_an_api_error() -> None:
    async with async_client() as (it, backend):
        backend.script = Script(fails_with=(GenerationFailed.code, "it broke"))
        stream = await it.chat.completions.create(model="scripted", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="it broke"):
            async for _ in stream:
                pass


async def test_errors_are_the_clients_own_classes() -> None:
    async with async_client() as (it, backend):
        with pytest.raises(openai.NotFoundError, match="served: scripted") as missing:
            await it.chat.completions.create(model="gpt-9", messages=HELLO)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await it.chat.completions.create(model="scripted", messages=HELLO, verbosity="low")
        assert (bad.value.param, bad.value.code) == ("verbosity", "unsupported_parameter")
        backend.script = Script(
            refuses=RequestTooLong(num_prompt_tokens=9, max_tokens=9, limit=10, limit_name="the context")
        )
        with pytest.raises(openai.BadRequestError, match="9 tokens") as long:
            await it.chat.completions.create(model="scripted", messages=HELLO, stream=True)
        assert long.value.code == "context_length_exceeded"
