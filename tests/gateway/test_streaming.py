"""What a streamed answer looks like on the wire, byte by byte."""

import asyncio
import json

import pytest

from gateway.backends.scripted import Script
from gateway.errors import GenerationFailed
from tests.gateway.serving import ask, chat_body, connected, http_request, scripted, sse_data, streamed_text


async def test_a_stream_is_framed_as_openai_frames_it() -> None:
    async with scripted(Script(deltas=("Hel", "lo"))) as (server, _):
        response = await ask(server, chat_body(stream=True))
    first = sse_data(response.body)[0]
    head = (
        f'{{"id":"{first["id"]}","created":{first["created"]},"model":"scripted",'
        f'"system_fingerprint":"fp_scripted","object":"chat.completion.chunk","choices":[{{"index":0,"delta":'
    )
    tail = '"logprobs":null,"finish_reason":'
    assert response.body.decode() == (
        f'data: {head}{{"role":"assistant","content":""}},{tail}null}}]}}\n\n'
        f'data: {head}{{"content":"Hel"}},{tail}null}}]}}\n\n'
        f'data: {head}{{"content":"lo"}},{tail}null}}]}}\n\n'
        f'data: {head}{{}},{tail}"stop"}}]}}\n\n'
        "data: [DONE]\n\n"
    )


async def test_a_stream_is_told_to_pass_proxies_at_once_and_uncompressed() -> None:
    async with scripted() as (server, _):
        body = chat_body(stream=True)
        response = await ask(server, body, headers="Accept-Encoding: gzip, deflate, br\r\n")
    assert response.status == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["transfer-encoding"] == "chunked"
    assert "content-encoding" not in response.headers
    assert streamed_text(response.body) == "Hello world!"


async def test_usage_comes_once_in_a_chunk_of_its_own_and_is_null_elsewhere() -> None:
    async with scripted() as (server, _):
        body = chat_body(stream=True, stream_options={"include_usage": True})
        *chunks, usage_chunk, done = sse_data((await ask(server, body)).body)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert usage_chunk["choices"] == []
    assert usage_chunk["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


async def test_usage_comes_also_when_the_answer_was_cut_by_max_tokens() -> None:
    async with scripted() as (server, _):
        body = chat_body(stream=True, stream_options={"include_usage": True}, max_tokens=2)
        events = sse_data((await ask(server, body)).body)
    assert events[-3]["choices"][0]["finish_reason"] == "length"
    assert events[-2]["usage"]["completion_tokens"] == 2


async def test_every_chunk_of_a_stream_has_the_same_head() -> None:
    async with scripted() as (server, _):
        body = chat_body(stream=True, stream_options={"include_usage": True})
        *chunks, _done = sse_data((await ask(server, body)).body)
    names = ("id", "created", "model", "system_fingerprint", "object")
    assert len({tuple(chunk[name] for name in names) for chunk in chunks}) == 1


async def test_text_with_every_awkward_character_arrives_as_it_was() -> None:
    text = 'quote " backslash \\ newline \n tab \t return \r separator \u2028 emoji \U0001f979 nul \x00'
    async with scripted(Script(deltas=tuple(text))) as (server, _):
        assert streamed_text((await ask(server, chat_body(stream=True))).body) == text


async def test_whole_and_streamed_answers_say_the_same() -> None:
    async with scripted(Script(deltas=("a", "b", "\U0001f979", ""))) as (server, _):
        whole = (await ask(server, chat_body())).json
        streamed = sse_data((await ask(server, chat_body(stream=True))).body)
    choice = whole["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "ab\U0001f979", "refusal": None}
    assert choice["finish_reason"] == streamed[-2]["choices"][0]["finish_reason"] == "stop"
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in streamed[:-1]) == "ab\U0001f979"
    assert whole["object"] == "chat.completion"
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_the_head_and_the_role_are_sent_before_the_prompt_is_computed() -> None:
    async with scripted(Script(first_after_s=60)) as (server, _), connected(server) as connection:
        connection.send(http_request(chat_body(stream=True)))
        async with asyncio.timeout(5):
            status, _headers = await connection.head()
            chunk = await connection.chunk()
        assert status == 200
        assert json.loads(chunk.removeprefix(b"data: "))["choices"][0]["delta"]["role"] == "assistant"
        connection.leave()


async def test_comments_keep_a_silent_stream_open() -> None:
    script = Script(deltas=("late",), first_after_s=0.3)
    async with scripted(script, keep_alive_s=0.04) as (server, _):
        response = await ask(server, chat_body(stream=True))
    role, *comments, text, last, done, _end = response.body.split(b"\n\n")
    assert len(comments) >= 2
    assert set(comments) == {b": keep-alive"}
    assert b"role" in role
    assert b"late" in text
    assert b"finish_reason" in last
    assert done == b"data: [DONE]"


async def test_no_comment_comes_before_the_status_line() -> None:
    script = Script(start_after_s=0.2)
    async with scripted(script, keep_alive_s=0.02) as (server, _), connected(server) as connection:
        connection.send(http_request(chat_body(stream=True)))
        status, _headers = await connection.head()
        assert status == 200
        assert b"role" in await connection.chunk()


async def test_a_stream_that_speaks_often_gets_no_comments() -> None:
    script = Script(deltas=("x",) * 20, every_s=0.01)
    async with scripted(script, keep_alive_s=5) as (server, _):
        assert b": keep-alive" not in (await ask(server, chat_body(stream=True))).body


async def test_a_failure_after_the_first_byte_is_the_last_event() -> None:
    script = Script(fails_with=(GenerationFailed.code, "it broke"))
    async with scripted(script) as (server, _):
        response = await ask(server, chat_body(stream=True))
    assert response.status == 200
    *_, last = sse_data(response.body)
    assert last == {
        "error": {"message": "it broke", "type": "server_error", "param": None, "code": "generation_failed"}
    }
    assert b"[DONE]" not in response.body


async def test_a_failure_of_a_whole_answer_is_a_status() -> None:
    script = Script(fails_with=(GenerationFailed.code, "it broke"))
    async with scripted(script) as (server, _):
        response = await ask(server, chat_body())
    assert response.status == 500
    assert response.error["code"] == "generation_failed"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_bug_of_ours_shows_nothing_of_the_inside(stream: bool) -> None:
    script = Script(raises=ZeroDivisionError("secret path /root/x"))
    async with scripted(script) as (server, _):
        response = await ask(server, chat_body(stream=stream))
        assert (await ask(server, chat_body())).status == 500
    assert response.status == (200 if stream else 500)
    last = sse_data(response.body)[-1] if stream else response.json
    assert last["error"]["code"] == "internal_error"
    assert b"secret" not in response.body
    assert b"ZeroDivision" not in response.body
