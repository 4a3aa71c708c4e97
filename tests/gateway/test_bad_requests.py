"""Whatever is sent, the answer is a 4xx in OpenAI's shape, and the server is right afterwards."""

import asyncio
import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import body as request_body
from gateway.keys import ADMISSION
from tests.gateway.serving import CHAT, Server, ask, chat_body, connected, get, http_request, scripted
from tests.gateway.test_dialect_conformance import JSON
from tests.gateway.threads import server_thread

VALID = json.loads(chat_body(max_tokens=2, stop=["x"], stream=True, stream_options={"include_usage": True}))
BODIES_PER_EXAMPLE = 10


def _changed(body: bytes, at: float, piece: bytes) -> bytes:
    place = int(at * len(body))
    return body[:place] + piece + body[place + len(piece) :]


def _encoded(value: object) -> bytes:
    return json.dumps(value).encode()


malformed = (
    st.binary(max_size=300)
    | JSON.map(_encoded)
    | st.builds(
        lambda f, v: _encoded(VALID | {f: v}), st.sampled_from(sorted(VALID)) | st.text(max_size=9), JSON
    )
    | st.builds(lambda end: chat_body(stream=True)[: int(end * 90)], st.floats(0, 1))
    | st.builds(_changed, st.just(chat_body(stream=True)), st.floats(0, 1), st.binary(min_size=1, max_size=3))
    | st.builds(lambda v: _encoded(VALID | {"messages": [v]}), JSON)
    | st.builds(lambda v: _encoded(VALID | {"messages": [{"role": "user", "content": v}]}), JSON)
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with server_thread(access_log=False) as (running, _):
        yield running


def post_all(server: Server, path: str, bodies: list[bytes]) -> None:
    """Each gets an answer or a 4xx; then a plain chat is still right."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        for body in bodies:
            connection.request("POST", path, body)
            response = connection.getresponse()
            answer = response.read()
            assert response.status in (200, 400, 404), (body, answer)
            if response.status != 200:
                assert list(json.loads(answer)["error"]) == ["message", "type", "param", "code"]
        connection.request("POST", CHAT, chat_body())
        assert (
            json.loads(connection.getresponse().read())["choices"][0]["message"]["content"] == "Hello world!"
        )
    finally:
        connection.close()


@settings(max_examples=100)
@given(bodies=st.lists(malformed, min_size=BODIES_PER_EXAMPLE, max_size=BODIES_PER_EXAMPLE))
def test_a_thousand_malformed_bodies_never_make_a_server_error(server: Server, bodies: list[bytes]) -> None:
    post_all(server, CHAT, bodies)


OTHER_ROUTES: dict[str, dict[str, object]] = {
    "/v1/completions": {
        "model": "scripted", "prompt": ["Hi", "Ho"], "n": 2, "max_tokens": 2, "logprobs": 1, "echo": True,
        "logit_bias": {"5": 1}, "stop_token_ids": [1], "top_k": 5, "best_of": 2, "stream": True,
    },
    "/tokenize": {"model": "scripted", "prompt": "Hi", "add_special_tokens": True},
    "/detokenize": {"model": "scripted", "tokens": [1, 2]},
    "/apply-template": {
        "model": "scripted", "messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": True
    },
    "/v1/embeddings": {"model": "scripted", "input": ["Hi"], "encoding_format": "float", "dimensions": 256},
}  # fmt: skip

HAND_MADE: list[object] = [
    None, True, -1, 0, 1.5, 2**31, 2**63, 2**64, -(2**63), 1e308, "", "x", "\u0000", "\ud800", [], [[]],
    [[[]]], {}, [None], [True], [-1], [2**31], [1e308], [""], ["x", 1], [1, "x"], [[1], "x"], [[-1]],
    [[1.5]], [{}], {"x": 1}, {"": 1}, {"-1": 1}, {"999999": 100}, {"1e3": 1}, [[258] * 3], [999_999],
    [[999_999]], ["x"] * 300, [1] * 3000, "x" * 100_000, [{"role": "user", "content": [[]]}],
    [{"role": "user", "content": None}], [{"role": "x", "content": "x"}], "NaN", "base64", [b"".hex()],
]  # fmt: skip


def hand_made_bodies(path: str) -> list[bytes]:
    """Every odd value in every field of the route, and every field left out."""
    whole = OTHER_ROUTES[path]
    bodies = [_encoded(whole | {field: value}) for field in whole for value in HAND_MADE]
    bodies += [_encoded({k: v for k, v in whole.items() if k != field}) for field in whole]
    raw = json.dumps(whole)
    bodies += [raw[:end].encode() for end in range(0, len(raw), 3)]
    bodies += [raw.replace("Hi", r"\ud83d").encode(), raw.replace("scripted", "x" * 300).encode()]
    return [body for body in bodies if len(body) < 200_000]


@pytest.mark.parametrize("path", OTHER_ROUTES)
def test_odd_values_in_every_field_of_every_route_never_make_a_server_error(
    server: Server, path: str
) -> None:
    post_all(server, path, hand_made_bodies(path))


@pytest.mark.parametrize("path", OTHER_ROUTES)
@settings(max_examples=40)
@given(data=st.data())
def test_malformed_bodies_of_every_route_never_make_a_server_error(
    server: Server, path: str, data: st.DataObject
) -> None:
    whole = OTHER_ROUTES[path]
    raw = _encoded(whole)
    bodies = (
        st.binary(max_size=100)
        | JSON.map(_encoded)
        | st.builds(lambda f, v: _encoded(whole | {f: v}), st.sampled_from(sorted(whole)), JSON)
        | st.builds(lambda f, v: _encoded(whole | {f: v}), st.text(max_size=9), JSON)
        | st.builds(lambda end: raw[: int(end * len(raw))], st.floats(0, 1))
        | st.builds(_changed, st.just(raw), st.floats(0, 1), st.binary(min_size=1, max_size=3))
    )
    post_all(server, path, data.draw(st.lists(bodies, min_size=20, max_size=25)))


def test_every_route_that_takes_a_body_is_among_them(server: Server) -> None:
    taking = {
        resource.canonical
        for resource in server.app.router.resources()
        if any(route.method == "POST" for route in resource)
    }
    assert taking == {CHAT, *OTHER_ROUTES}


async def test_a_body_over_the_limit_gets_413_declared_or_not() -> None:
    async with scripted(max_body_bytes=2048) as (server, backend):
        big = chat_body(user="x" * 4096)
        declared = await ask(server, big)
        async with connected(server) as connection, asyncio.timeout(10):
            connection.send(f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            connection.send(b"%x\r\n%s\r\n0\r\n\r\n" % (len(big), big))
            chunked = await connection.response()
        fits = await ask(server, chat_body(user="x" * 512))
    assert (declared.status, declared.error["code"]) == (413, "body_too_large")
    assert (chunked.status, chunked.error["code"]) == (413, "body_too_large")
    assert "2048" in declared.error["message"]
    assert fits.status == 200
    assert backend.num_opened == 1


async def test_a_compressed_body_is_refused_before_it_is_unpacked() -> None:
    async with scripted() as (server, backend):
        for encoding in ("gzip", "deflate", "br", "zstd"):
            response = await ask(server, b"\x1f\x8b\x08", headers=f"Content-Encoding: {encoding}\r\n")
            assert (response.status, response.error["code"]) == (415, "unsupported_media")
        plain = await ask(server, chat_body(), headers="Content-Encoding: identity\r\n")
    assert plain.status == 200
    assert backend.num_opened == 1


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/x-www-form-urlencoded", 415),
    ],
)
async def test_the_body_must_be_json_if_it_says_what_it_is(kind: str, status: int) -> None:
    async with scripted() as (server, _):
        assert (await ask(server, chat_body(), headers=f"Content-Type: {kind}\r\n")).status == status


async def test_a_body_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "BODY_TIMEOUT_S", 0.05)
    async with scripted() as (server, _), connected(server) as connection, asyncio.timeout(10):
        connection.send(f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Length: 100\r\n\r\n{{".encode())
        response = await connection.response()
    assert (response.status, response.error["code"]) == (408, "body_too_slow")


async def test_a_body_that_makes_no_progress_is_given_up_long_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "STALL_TIMEOUT_S", 0.2)
    body = chat_body()
    async with scripted() as (server, _), asyncio.timeout(10):
        async with connected(server) as connection:
            connection.send(http_request(body)[: -len(body)])
            for i in range(len(body) // 8):  # slower than the bound in all, never in one place
                connection.send(body[8 * i : 8 * i + 8])
                await asyncio.sleep(0.03)
            connection.send(body[len(body) // 8 * 8 :])
            assert (await connection.response()).status == 200
        async with connected(server) as connection:
            connection.send(http_request(body)[:-5])
            stalled = await connection.response()
    assert (stalled.status, stalled.error["code"]) == (408, "body_too_slow")
    assert "nothing" in stalled.error["message"]


@pytest.mark.parametrize("head", ["Transfer-Encoding: chunked", f"Content-Length: {16 << 20}"])
async def test_bodies_that_do_not_come_keep_nobody_out(head: str) -> None:
    async with scripted() as (server, backend), asyncio.timeout(20), AsyncExitStack() as connections:
        for _ in range(70):
            connection = await connections.enter_async_context(connected(server))
            connection.send(f"POST {CHAT} HTTP/1.1\r\nHost: t\r\n{head}\r\n\r\n".encode())
        assert server.app[ADMISSION].num_reading_bytes == 0
        assert [(await ask(server, chat_body())).status for _ in range(3)] == [200] * 3
        assert backend.num_opened == 3


async def test_large_bodies_wait_for_none_and_small_ones_pass_when_the_room_for_bodies_is_taken() -> None:
    async with scripted() as (server, _), asyncio.timeout(20), connected(server) as reader:
        admission = server.app[ADMISSION]
        admission.max_reading_bytes = 300_000
        large = http_request(chat_body(metadata={"a": "x" * 250_000}))
        reader.send(large[:-10])
        while admission.num_reading_bytes < len(large) - 1000:  # noqa: ASYNC110  # it tells nobody
            await asyncio.sleep(0.001)
        refused = await ask(server, chat_body(metadata={"a": "x" * 250_000}))
        small = await ask(server, chat_body())
        reader.send(large[-10:])
        read = await reader.response()
    assert (refused.status, refused.error["code"]) == (429, "overloaded")
    assert "large request bodies" in refused.error["message"]
    assert refused.headers["retry-after"] == "1"
    assert (small.status, read.status) == (200, 200)


@pytest.mark.parametrize(
    "raw",
    [
        b"GARBAGE\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_not_http_is_refused_and_the_server_lives(raw: bytes) -> None:
    async with scripted() as (server, backend):
        async with connected(server) as connection, asyncio.timeout(10):
            connection.send(raw)
            status, _ = await connection.head()
            assert 400 <= status < 500
        assert (await get(server, "/livez")).status == 200
        assert backend.num_opened == 0


async def test_a_refused_request_does_not_wait_for_the_rest_of_its_body() -> None:
    async with scripted(max_body_bytes=2048) as (server, _), connected(server) as connection:
        async with asyncio.timeout(5):
            connection.send(f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Length: {1 << 30}\r\n\r\n".encode())
            assert (await connection.response()).status == 413


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with scripted() as (server, _), connected(server) as connection, asyncio.timeout(10):
        connection.send(http_request(chat_body()) + http_request(b"{") + http_request(chat_body(stream=True)))
        assert [(await connection.response()).status for _ in range(3)] == [200, 400, 200]


def test_a_head_request_to_a_probe_has_no_body(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(b"HEAD /livez HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")
        answer = b""
        while piece := sock.recv(4096):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n\r\n")
