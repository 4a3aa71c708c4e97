"""Tokens, templates and embeddings over a socket, under the same limits as generations."""

import asyncio
import base64
import json
import struct
from typing import Any

import pytest
from openai import AsyncOpenAI

from gateway.backends.scripted import Script, ScriptedBackend
from gateway.keys import ADMISSION
from gateway.text_routes import MAX_EMBEDDING_INPUTS, ROUTES
from tests.gateway.serving import (
    Response,
    Server,
    ask,
    chat_body,
    connected,
    giving,
    http_request,
    scripted,
    serving,
)

MESSAGES = [{"role": "user", "content": "Hi"}]
EXAMPLES: dict[str, dict[str, Any]] = {
    "/tokenize": {"model": "scripted", "prompt": "Hi"},
    "/detokenize": {"model": "scripted", "tokens": [72, 105]},
    "/apply-template": {"model": "scripted", "messages": MESSAGES},
    "/v1/embeddings": {"model": "scripted", "input": "Hi"},
}
over_routes = pytest.mark.parametrize("path", sorted(ROUTES))


async def post(server: Server, path: str, **fields: Any) -> Response:
    return await ask(server, json.dumps(EXAMPLES[path] | fields).encode(), path=path)


def test_every_route_has_an_example() -> None:
    assert EXAMPLES.keys() == ROUTES.keys()


async def test_text_and_conversations_become_tokens_and_come_back() -> None:
    async with scripted() as (server, _):
        assert (await post(server, "/tokenize")).json == {"count": 2, "tokens": [72, 105]}
        chat = (await post(server, "/tokenize", prompt=None, messages=MESSAGES)).json
        assert (await post(server, "/detokenize", tokens=chat["tokens"])).json == {"prompt": "user: Hi\n"}
        assert (await post(server, "/apply-template")).json == {"prompt": "user: Hi\n"}
        assert (await post(server, "/tokenize", prompt="")).json == {"count": 0, "tokens": []}
        assert (await post(server, "/detokenize", tokens=[])).json == {"prompt": ""}


async def test_the_official_client_reads_embeddings_both_ways() -> None:
    async with (
        scripted() as (server, _),
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        floats = await client.embeddings.create(model="scripted", input=["ab", "b"], encoding_format="float")
        packed = await client.embeddings.create(model="scripted", input=["ab", "b"])  # base64 underneath
        ids = await client.embeddings.create(model="scripted", input=[[97, 98], [98]])
    assert [each.index for each in floats.data] == [0, 1]
    assert floats.data[0].embedding[97:99] == pytest.approx([0.5**0.5] * 2)
    assert floats.data[1].embedding[98] == 1
    for other in (packed, ids):
        for one, same in zip(floats.data, other.data, strict=True):
            assert one.embedding == pytest.approx(same.embedding)
    assert (floats.usage.prompt_tokens, floats.usage.total_tokens) == (3, 3)
    assert floats.model == "scripted"


async def test_base64_is_little_endian_float32() -> None:
    async with scripted() as (server, _):
        data = (await post(server, "/v1/embeddings", input="a", encoding_format="base64")).json["data"]
    vector = struct.unpack("<256f", base64.b64decode(data[0]["embedding"]))
    assert (vector[97], sum(vector)) == (1, 1)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"prompt": "x" * 2_000_000}, "prompt"),
        ("/tokenize", {"other": 1}, "other"),
        ("/detokenize", {"tokens": None}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, 2, 10**6]}, "tokens[2]"),
        ("/detokenize", {"tokens": [1] * 200_001}, None),
        ("/apply-template", {"messages": []}, "messages"),
        ("/apply-template", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/apply-template", {"chat_template": "{{ 1 }}"}, "chat_template"),
        ("/apply-template", {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1]"),
        ("/v1/embeddings", {"input": [[1], []]}, "input[1]"),
        ("/v1/embeddings", {"input": [1, 10**6]}, "input[1]"),
        ("/v1/embeddings", {"input": {"text": "x"}}, "input"),
        ("/v1/embeddings", {"input": ["a"] * (MAX_EMBEDDING_INPUTS + 1)}, "input"),
        ("/v1/embeddings", {"dimensions": 64}, "dimensions"),
        ("/v1/embeddings", {"dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"encoding_format": "hex"}, "encoding_format"),
    ],
)
async def test_a_wrong_value_is_refused_with_its_path(
    path: str, fields: dict[str, Any], param: str | None
) -> None:
    async with scripted() as (server, _):
        response = await post(server, path, **fields)
    assert (response.status, response.error["param"]) == (400, param)


@over_routes
async def test_the_limits_of_generations_hold_here_too(path: str) -> None:
    async with scripted(max_body_bytes=2048, max_json_depth=16) as (server, _):
        unknown = await post(server, path, model="gpt-9")
        nested = await ask(server, b'{"model":' + b"[" * 17 + b"]" * 17 + b"}", path=path)
        large = await ask(server, b" " * 4096, path=path)
        packed = await ask(server, b"\x1f\x8b", path=path, headers="Content-Encoding: gzip\r\n")
        wrong = await ask(server, path=path, method="GET")
        assert (await post(server, path)).status == 200
    assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
    assert (nested.status, nested.error["code"]) == (400, "body_too_deep")
    assert (large.status, large.error["code"]) == (413, "body_too_large")
    assert (packed.status, packed.error["code"]) == (415, "unsupported_media")
    assert (wrong.status, wrong.error["code"]) == (405, "method_not_allowed")


@over_routes
async def test_a_full_or_draining_server_refuses_them(path: str) -> None:
    async with (
        scripted(Script(every_s=0.01, deltas=("x",) * 10_000), max_queued=0) as (server, _),
        connected(server) as connection,
        asyncio.timeout(10),
    ):
        most = server.app[ADMISSION].max_admitted
        connection.send(http_request(chat_body(n=most, stream=True)))
        await connection.head()
        full = await post(server, path)
        server.app[ADMISSION].close()
        draining = await post(server, path)
        connection.leave()
        await server.app[ADMISSION].idle()
    assert (full.status, full.error["code"]) == (429, "overloaded")
    assert (draining.status, draining.error["code"]) == (503, "draining")


async def test_a_client_that_leaves_gives_its_permit_back() -> None:
    waiting, gone = asyncio.Event(), asyncio.Event()

    class Slow(ScriptedBackend):
        async def apply_template(self, *_: object, **__: object) -> str:
            waiting.set()
            try:
                await asyncio.sleep(60)
            finally:
                gone.set()
            return ""

    async with serving(giving(Slow())) as server:
        async with connected(server) as connection, asyncio.timeout(10):
            connection.send(
                http_request(json.dumps(EXAMPLES["/apply-template"]).encode(), path="/apply-template")
            )
            await waiting.wait()
            connection.leave()
            await gone.wait()
            await server.app[ADMISSION].idle()
        server.check_nothing_is_held()
