"""Web pages: nothing unless their origin was named, and then just enough."""

from pathlib import Path

import pytest

from core import ConfigError
from tests.gateway.serving import CHAT, ask, chat_body, get, make_config, scripted
from tests.gateway.test_api_keys import KEY, key_file

PAGE = "https://app.example"
PREFLIGHT = (
    f"Origin: {PAGE}\r\nAccess-Control-Request-Method: POST\r\n"
    "Access-Control-Request-Headers: authorization, content-type\r\n"
)


async def test_without_named_origins_no_page_may_read_anything() -> None:
    async with scripted() as (server, _):
        answer = await ask(server, chat_body(), headers=f"Origin: {PAGE}\r\n")
        preflight = await ask(server, path=CHAT, method="OPTIONS", headers=PREFLIGHT)
    assert answer.status == 200  # a client that is no browser may send an Origin
    assert preflight.status == 405
    for response in (answer, preflight):
        assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_page_of_a_named_origin_reads_answers_streams_and_errors(stream: bool) -> None:
    async with scripted(cors_origins=(PAGE, "http://localhost:3000")) as (server, _):
        for origin in (PAGE, "http://localhost:3000"):
            for body in (chat_body(stream=stream), b"{"):
                response = await ask(server, body, headers=f"Origin: {origin}\r\n")
                assert response.headers["access-control-allow-origin"] == origin
                assert response.headers["vary"] == "Origin"
                assert "X-Request-Id" in response.headers["access-control-expose-headers"]
                assert "access-control-allow-credentials" not in response.headers


@pytest.mark.parametrize(
    "origin",
    ["https://app.example.evil.example", "https://evil.example/https://app.example", "http://app.example",
     "https://app.example:8443", "https://xapp.example", "null", "", "https://APP.example"],
)  # fmt: skip
async def test_any_other_origin_gets_no_permission(origin: str) -> None:
    async with scripted(cors_origins=(PAGE,)) as (server, _):
        response = await ask(server, chat_body(), headers=f"Origin: {origin}\r\n")
        preflight = await ask(server, path=CHAT, method="OPTIONS", headers=PREFLIGHT.replace(PAGE, origin))
    assert "access-control-allow-origin" not in response.headers
    assert response.headers["vary"] == "Origin"  # so that no cache hands it to another page
    assert preflight.status == 405
    assert "access-control-allow-origin" not in preflight.headers


async def test_a_preflight_is_answered_without_a_key_and_the_request_needs_one(tmp_path: Path) -> None:
    keys = key_file(tmp_path, KEY)
    async with scripted(cors_origins=(PAGE,), api_key_file=keys) as (server, _):
        preflight = await ask(server, path=CHAT, method="OPTIONS", headers=PREFLIGHT)
        bare = await ask(server, chat_body(), headers=f"Origin: {PAGE}\r\n")
        no_preflight = await ask(server, path=CHAT, method="OPTIONS", headers=f"Origin: {PAGE}\r\n")
    assert (preflight.status, preflight.body) == (204, b"")
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    assert bare.status == 401
    assert bare.headers["access-control-allow-origin"] == PAGE  # or the page could not read why
    assert no_preflight.status == 401


async def test_any_origin_means_any_but_never_with_credentials() -> None:
    async with scripted(cors_origins=("*",)) as (server, _):
        responses = [
            await ask(server, chat_body(), headers="Origin: https://anywhere.example\r\nCookie: a=b\r\n"),
            await ask(server, path=CHAT, method="OPTIONS", headers=PREFLIGHT),
        ]
        assert "access-control-allow-origin" not in (await get(server, "/livez")).headers
    for response in responses:
        assert response.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in response.headers


@pytest.mark.parametrize(
    "origin", ["app.example", "https://app.example/", "https://App.example", "https://", "https://a b", "**"]
)
def test_what_no_browser_sends_is_refused_as_an_origin(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origin"):
        make_config(cors_origins=(origin,)).validated()
