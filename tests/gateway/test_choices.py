"""Several choices and log-probabilities over a socket: streamed and whole are one answer."""

import asyncio
import json
from typing import Any

import pytest

from gateway.backends.scripted import Script
from gateway.errors import GenerationFailed
from gateway.keys import ADMISSION
from tests.gateway.serving import CHAT, Response, ask, connected, http_request, scripted, sse_data

COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
EMOJI = Script(deltas=("Hello", " \U0001f979", "", "!"))

CHAT_BODIES: list[dict[str, Any]] = [
    {"n": 3},
    {"n": 2, "logprobs": True},
    {"logprobs": True, "top_logprobs": 2},
    {"n": 2, "logprobs": True, "top_logprobs": 20, "max_tokens": 2},
]
COMPLETION_BODIES: list[dict[str, Any]] = [
    {"prompt": "a"},
    {"prompt": ["a", "b"], "n": 2},
    {"prompt": [1, 2, 3], "logprobs": 0},
    {"prompt": [[1], [2, 3]], "logprobs": 3, "max_tokens": 2},
    {"prompt": ["a", [2, 3]], "n": 2, "logprobs": 1},
]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": MESSAGES, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "scripted", **fields}


async def both_ways(path: str, body: dict[str, Any]) -> tuple[Response, Response]:
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    async with scripted(EMOJI) as (server, _):
        whole = await ask(server, json.dumps(body).encode(), path=path)
        streamed = await ask(server, json.dumps(body | streaming).encode(), path=path)
    assert whole.status == streamed.status == 200, whole.body
    return whole, streamed


def chunks_of(streamed: Response) -> list[dict[str, Any]]:
    *chunks, done = sse_data(streamed.body)
    assert done == "[DONE]"
    assert chunks[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    return chunks


@pytest.mark.parametrize("fields", CHAT_BODIES, ids=str)
async def test_a_streamed_chat_of_choices_is_the_whole_one(fields: dict[str, Any]) -> None:
    whole, streamed = await both_ways(CHAT, chat(**fields))
    *chunks, last = chunks_of(streamed)
    rebuilt = [
        {"index": i, "text": "", "tokens": [], "roles": 0, "finish": []} for i in range(fields.get("n", 1))
    ]
    for chunk in chunks:
        [choice] = chunk["choices"]
        into: dict[str, Any] = rebuilt[choice["index"]]
        into["text"] += choice["delta"].get("content", "")
        into["roles"] += "role" in choice["delta"]
        into["tokens"] += (choice["logprobs"] or {}).get("content", [])
        into["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    for choice, built in zip(whole.json["choices"], rebuilt, strict=True):
        assert choice["index"] == built["index"]
        assert choice["message"]["content"] == built["text"]
        assert [choice["finish_reason"]] == built["finish"]
        assert built["roles"] == 1
        assert (choice["logprobs"] or {"content": []})["content"] == built["tokens"]
        assert (choice["logprobs"] is not None) == ("logprobs" in fields)
    assert last["usage"] == whole.json["usage"]


@pytest.mark.parametrize("fields", COMPLETION_BODIES, ids=str)
async def test_a_streamed_completion_of_choices_is_the_whole_one(fields: dict[str, Any]) -> None:
    whole, streamed = await both_ways(COMPLETIONS, completion(**fields))
    *chunks, last = chunks_of(streamed)
    rebuilt: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        assert chunk["object"] == "text_completion"
        [choice] = chunk["choices"]
        built = rebuilt.setdefault(
            choice["index"], {"text": "", "index": choice["index"], "logprobs": None, "finish_reason": None}
        )
        assert built["finish_reason"] is None, "nothing follows the end of a choice"
        built["text"] += choice["text"]
        built["finish_reason"] = choice["finish_reason"]
        for name, values in (choice["logprobs"] or {}).items():
            built["logprobs"] = built["logprobs"] or {}
            built["logprobs"][name] = built["logprobs"].get(name, []) + values
    assert whole.json["choices"] == [rebuilt[index] for index in sorted(rebuilt)]
    assert last["usage"] == whole.json["usage"]
    assert len(rebuilt) == fields.get("n", 1) * (
        len(fields["prompt"]) if isinstance(fields["prompt"], list) and fields["prompt"][0] != 1 else 1
    )


async def test_a_chats_log_probabilities_have_openais_shape() -> None:
    async with scripted(EMOJI) as (server, _):
        body = chat(logprobs=True, top_logprobs=1, max_tokens=2)
        [choice] = (await ask(server, json.dumps(body).encode())).json["choices"]
    assert choice["logprobs"] == {
        "content": [
            {
                "token": token,
                "logprob": -0.5,
                "bytes": list(token.encode()),
                "top_logprobs": [
                    {"token": f"{token}0", "logprob": -1.0, "bytes": list(f"{token}0".encode())}
                ],
            }
            for token in ("Hello", " \U0001f979")
        ],
        "refusal": None,
    }


async def test_a_completions_log_probabilities_have_openais_shape() -> None:
    async with scripted(EMOJI) as (server, _):
        body = completion(prompt="a", logprobs=1, max_tokens=2)
        [choice] = (await ask(server, json.dumps(body).encode(), path=COMPLETIONS)).json["choices"]
    assert choice["logprobs"] == {
        "tokens": ["Hello", " \U0001f979"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"Hello0": -1.0}, {" \U0001f9790": -1.0}],
        "text_offset": [0, 5],
    }


async def test_every_choice_holds_a_permit() -> None:
    async with scripted(Script(every_s=0.01, deltas=("x",) * 10_000), max_queued=0) as (server, backend):
        most = server.app[ADMISSION].max_admitted
        async with connected(server) as connection, asyncio.timeout(10):
            connection.send(http_request(json.dumps(chat(n=most - 1, stream=True)).encode()))
            await connection.head()
            assert server.app[ADMISSION].num_admitted == most - 1
            refused = await ask(server, json.dumps(chat(n=2)).encode())
            assert (refused.status, refused.error["code"]) == (429, "overloaded")
            connection.leave()
            await server.app[ADMISSION].idle()
            await backend.until_running(0)
        hopeless = await ask(server, json.dumps(chat(n=most + 1)).encode())
        assert (hopeless.status, hopeless.error["param"]) == (400, "n")


async def test_a_failure_ends_all_choices_with_one_error() -> None:
    async with scripted(Script(fails_with=(GenerationFailed.code, "it broke"))) as (server, _):
        events = sse_data((await ask(server, json.dumps(chat(n=3, stream=True)).encode())).body)
        whole = await ask(server, json.dumps(chat(n=3)).encode())
    assert [event["error"]["message"] for event in events if "error" in event] == ["it broke"]
    assert "error" in events[-1]
    assert whole.status == 500
