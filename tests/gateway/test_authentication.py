"""With a key file nobody gets anywhere without a key, and no tenant sees another's cached prompts."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from openai import AsyncOpenAI, AuthenticationError
from structlog.testing import capture_logs

from core import ConfigError
from gateway.app import build_app
from gateway.backends.scripted import Script
from gateway.middleware.api_key import PUBLIC
from tests.gateway.serving import (
    CHAT,
    Server,
    ask,
    chat_body,
    connected,
    get,
    http_request,
    make_config,
    scripted,
)
from tests.gateway.test_api_keys import KEY, OTHER, key_file
from tests.gateway.test_local_backend import greedy, served


@pytest.fixture
def keys(tmp_path: Path) -> str:
    return key_file(tmp_path, f"alice: {KEY}\nbob: {OTHER}\n")


def bearer(key: str) -> str:
    return f"Authorization: Bearer {key}\r\n"


def routes(app: web.Application) -> set[tuple[str, str]]:
    """Method and path of every route, a variable part filled in."""
    paths = {
        (route.method, route.resource.canonical.replace("{model_id}", "scripted"))
        for route in app.router.routes()
        if route.resource is not None
    }
    assert len(paths) >= 6
    return paths


async def head_of(server: Server, path: str, method: str, headers: str = "") -> tuple[int, dict[str, str]]:
    """Status and headers alone: an answer to HEAD has nothing else."""
    async with connected(server) as connection, asyncio.timeout(10):
        connection.send(http_request(b"", path=path, method=method, headers=headers))
        return await connection.head()


async def test_every_route_but_the_probes_needs_a_key(keys: str) -> None:
    async with scripted(api_key_file=keys) as (server, backend):
        for method, path in sorted(routes(server.app)):
            status, headers = await head_of(server, path, method)
            if path in ("/livez", "/readyz", "/health"):
                assert status == 200, (method, path)
            else:
                assert status == 401, (method, path)
                assert headers["www-authenticate"] == 'Bearer realm="tidegate"'
            status, _ = await head_of(server, path, method, headers=bearer(KEY))
            assert status != 401, (method, path)
        assert backend.num_opened == 0
    assert {("GET", "/livez"), ("GET", "/readyz"), ("GET", "/health")} == PUBLIC


@pytest.mark.parametrize(
    "path",
    ["/", "/v1/nowhere", "/livez/", "/livez/x", "//livez", "/livez/../v1/models", "/%2e/v1/models",
     "/v1/models/livez", "/v1/models//livez", "/LIVEZ", "/livez%2f..%2fmetrics"],
)  # fmt: skip
async def test_no_way_of_writing_a_path_gets_around_the_key(keys: str, path: str) -> None:
    async with scripted(api_key_file=keys) as (server, _):
        assert (await get(server, path)).status == 401


@pytest.mark.parametrize("method", ["OPTIONS", "PUT", "DELETE", "TRACE", "PROPFIND"])
async def test_no_method_gets_around_the_key(keys: str, method: str) -> None:
    async with scripted(api_key_file=keys) as (server, _):
        for path in (CHAT, "/livez", "/metrics"):
            assert (await ask(server, path=path, method=method)).status == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (bearer(KEY), 200),
        (f"authorization: bearer   {KEY}\r\n", 200),
        (f"x-api-key: {KEY}\r\n", 200),
        (f"Authorization: Basic dTpw\r\nX-API-Key: {KEY}\r\n", 200),
        ("", 401),
        (bearer("wrong-0123456789abcdef"), 401),
        (bearer(KEY[:-1]), 401),
        (bearer(f"{KEY} {KEY}"), 401),
        (f"Authorization: {KEY}\r\n", 401),
        ("Authorization: Bearer\r\n", 401),
        (bearer(KEY) + bearer("wrong-0123456789abcdef"), 401),
        (f"{bearer('wrong-0123456789abcdef')}x-api-key: {KEY}\r\n", 401),
        (f"Cookie: Authorization={KEY}\r\n", 401),
    ],
)
async def test_a_key_comes_in_one_of_two_headers(keys: str, headers: str, status: int) -> None:
    async with scripted(api_key_file=keys) as (server, backend):
        response = await ask(server, chat_body(), headers=headers)
        assert response.status == status
        assert backend.num_opened == (status == 200)
        if status == 401:
            error = response.error
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
            assert KEY not in error["message"]
            assert "wrong-" not in error["message"]


async def test_a_key_in_the_address_is_no_key(keys: str) -> None:
    async with scripted(api_key_file=keys) as (server, _):
        assert (await get(server, f"/v1/models?api_key={KEY}")).status == 401


async def test_who_has_no_key_is_refused_before_the_body_is_read(keys: str) -> None:
    async with scripted(api_key_file=keys) as (server, _), connected(server) as connection:
        async with asyncio.timeout(10):
            connection.send(f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Length: 4000000\r\n\r\n{{".encode())
            assert (await connection.response()).status == 401


async def test_the_official_client_says_authentication_error(keys: str) -> None:
    async with scripted(api_key_file=keys) as (server, _):
        for key, works in ((KEY, True), ("wrong-0123456789abcdef", False)):
            async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
                if works:
                    assert [model.id async for model in client.models.list()] == ["scripted"]
                else:
                    with pytest.raises(AuthenticationError):
                        await client.models.list()


async def test_the_log_names_the_tenant_and_never_the_key(keys: str) -> None:
    with capture_logs() as logs:
        async with scripted(api_key_file=keys) as (server, _):
            await ask(server, chat_body(stream=True), headers=bearer(OTHER))
            await ask(server, chat_body(), headers=bearer("wrong-0123456789abcdef"))
    lines = [line for line in logs if line["event"] == "request_ended"]
    assert [(line["status"], line.get("tenant")) for line in lines] == [(200, "bob"), (401, None)]
    assert lines[1]["outcome"] == "invalid_api_key"
    assert OTHER not in repr(logs)
    assert "wrong-" not in repr(logs)


async def test_a_bad_key_file_ends_the_start() -> None:
    with pytest.raises(ConfigError, match="/nowhere/keys: cannot be read"):
        build_app(make_config(api_key_file="/nowhere/keys"))


async def test_a_tenant_finds_its_own_prompts_again_and_nobody_elses(keys: str) -> None:
    secret = greedy("The plan of the harbour is under the third lantern from the left.", max_tokens=4)

    async with served(api_key_file=keys) as (server, _):

        async def usage(key: str) -> dict[str, Any]:
            answer = (await ask(server, secret, headers=bearer(key))).json
            message: dict[str, Any] = answer["choices"][0]["message"]
            return message | {"cached": answer["usage"]["prompt_tokens_details"]["cached_tokens"]}

        first, bobs, again, bobs_again = [await usage(key) for key in (KEY, OTHER, KEY, OTHER)]
    assert first["cached"] == bobs["cached"] == 0
    assert again["cached"] == bobs_again["cached"] > 0
    texts = {answer["content"] for answer in (first, bobs, again, bobs_again)}
    assert len(texts) == 1


async def test_a_client_cannot_name_its_tenant(keys: str) -> None:
    async with scripted(api_key_file=keys) as (server, backend):
        await ask(server, chat_body(user="bob"), headers=bearer(KEY) + "X-Tenant: bob\r\n")
        refused = await ask(server, chat_body(tenant="bob"), headers=bearer(KEY))
    assert [request.tenant for request in backend.requests] == ["alice"]
    assert (refused.status, refused.error["param"]) == (400, "tenant")


@pytest.mark.parametrize("stream", [True, False])
async def test_with_keys_and_origins_too_a_client_that_leaves_ends_its_generation(
    keys: str, stream: bool
) -> None:
    endless = Script(deltas=("word ",) * 1_000_000, every_s=0.002)
    headers = bearer(KEY) + "Origin: https://app.example\r\n"
    async with (
        scripted(endless, api_key_file=keys, cors_origins=("https://app.example",)) as (
            server,
            backend,
        ),
        connected(server) as connection,
        asyncio.timeout(10),
    ):
        connection.send(http_request(chat_body(stream=stream), headers=headers))
        await backend.until_running(1)
        connection.leave()
        await backend.until_running(0)


async def test_without_a_key_file_everybody_may_ask_and_any_key_is_ignored() -> None:
    async with scripted() as (server, backend):
        assert (await ask(server, chat_body())).status == 200
        assert (await ask(server, chat_body(), headers=bearer("none"))).status == 200
    assert {request.tenant for request in backend.requests} == {""}
