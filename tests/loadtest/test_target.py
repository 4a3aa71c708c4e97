import asyncio
import socket

import msgspec
import pytest

from loadtest.errors import PlanInvalid, TargetUnusable
from loadtest.mock.script import MockOptions
from loadtest.mock.server import running_mock
from loadtest.servers import ServerState
from loadtest.target import Looker, Target, base_url, probe, single_token_words, words_by_tokenize
from tests.loadtest.raw_server import raw_server

WORDS = tuple(f"w{i}" for i in range(100))


async def probed(url: str, *, model: str | None = None, deadline_s: float = 10.0) -> Target:
    async with Looker(url, deadline_s=deadline_s) as looker:
        target, _ = await probe(looker, model=model)
        return target


def page(status: int, body: object) -> bytes:
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(content)) + content


def pages(models: bytes, *, others: bytes = page(404, {})):
    """A raw server's answers: one for `/v1/models`, one for everything else."""

    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(models if b" /v1/models " in request.partition(b"\r\n")[0] else others)
        await writer.drain()

    return answer


async def test_a_dead_server_is_one_clear_line():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(TargetUnusable, match=rf"no connection to http://127.0.0.1:{port} .*is the server up"):
        await probed(f"http://127.0.0.1:{port}")


async def test_a_server_that_takes_the_connection_and_says_nothing_is_given_up():
    async def silence(_: bytes, __: asyncio.StreamWriter) -> None: ...

    async with raw_server(silence) as server:
        with pytest.raises(TargetUnusable, match=r"did not answer GET /v1/models within 0\.2 s"):
            await probed(server.url, deadline_s=0.2)


async def test_a_server_that_wants_a_key_is_told_from_a_dead_one():
    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        known = b"authorization: bearer secret" in request.lower()
        writer.write(page(200, {"data": [{"id": "a"}]}) if known else page(401, {}))
        await writer.drain()

    async with raw_server(answer) as server:
        with pytest.raises(TargetUnusable, match="HTTP 401: give its key with --api-key"):
            await probed(server.url)
        async with Looker(server.url, api_key="secret") as looker:
            target, _ = await probe(looker)
    assert target.model == "a"


@pytest.mark.parametrize(
    ("models", "says"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "does not answer GET /v1/models as HTTP should"),
        (page(404, {}), "has no /v1/models: name the model with --model"),
        (page(418, {}), "HTTP 418: name the model with --model"),
        (page(500, b"out of  memory"), "HTTP 500: out of memory"),
        (page(200, b"<html>"), "not JSON: is it an inference server"),
        (page(200, {"data": []}), "lists no model: it may be loading still"),
        (page(200, {"data": [{"no": "id"}, 3]}), "lists no model"),
        (page(200, [1, 2]), "lists no model"),
    ],
)
async def test_what_is_wrong_with_a_server_is_said(models, says):
    async with raw_server(pages(models)) as server:
        with pytest.raises(TargetUnusable, match=says):
            await probed(server.url)


async def test_a_server_without_a_list_of_models_can_be_measured_by_naming_one():
    async with raw_server(pages(page(404, {}))) as server:
        target = await probed(server.url, model="mine")
    assert (target.model, target.models, target.server, target.version) == ("mine", (), "unknown", None)


async def test_of_several_models_the_first_is_asked_and_a_note_says_so():
    listed = {"data": [{"id": "a"}, {"id": "b"}]}
    async with raw_server(pages(page(200, listed))) as server:
        first, named = await probed(server.url), await probed(server.url, model="c")
    assert first.model == "a"
    assert "2 models" in first.notes[0]
    assert "c is not in the server's list: a, b" in named.notes[0]


async def test_a_servers_own_pages_may_fail_without_harm():
    listed = {"data": [{"id": "a", "owned_by": "vllm"}]}
    async with raw_server(pages(page(200, listed), others=b"junk\r\n\r\n")) as raw, Looker(raw.url) as looker:
        target, found = await probe(looker)
        assert await looker.state(found) == ServerState()
    assert (target.server, target.version) == ("vllm", None)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://host:8000", "http://host:8000"),
        ("http://host:8000/v1/", "http://host:8000"),
        ("https://host/api/v1", "https://host/api"),
    ],
)
def test_the_dialects_path_is_taken_off_a_url(url, expected):
    assert base_url(url) == expected


@pytest.mark.parametrize(
    "url", ["host:8000", "ftp://host", "http://", "http://host:99999", "http://h:0", "http://h/v1?x=1", ""]
)
def test_what_is_no_url_is_refused_by_name(url):
    with pytest.raises(PlanInvalid, match="--target is"):
        base_url(url)


async def test_words_that_are_not_one_token_are_found_by_halving():
    asked = []

    async def count(words):
        asked.append(len(words))
        return sum(3 if word in ("w17", "w90") else 1 for word in words)

    found = await single_token_words(WORDS, count)
    assert found == tuple(word for word in WORDS if word not in ("w17", "w90"))
    assert asked[0] == 100
    assert len(asked) < 40


async def test_words_are_unknown_where_the_server_does_not_tell():
    async def count(_):
        return None

    assert await single_token_words(WORDS, count) is None


async def test_the_number_of_questions_about_words_is_bounded():
    async def count(words):
        return 2 * len(words)

    assert await single_token_words(WORDS, count, max_counts=10) == ()


async def test_the_mocks_words_are_one_token_each_by_its_own_count():
    async with running_mock(MockOptions()) as mock, Looker(f"http://127.0.0.1:{mock.port}") as looker:
        target, server = await probe(looker)
        words = await words_by_tokenize(looker, server, model=target.model, words=WORDS)
    assert words == WORDS


async def test_a_server_without_tokenize_tells_no_words():
    async with raw_server(pages(page(200, {"data": [{"id": "a"}]}))) as raw, Looker(raw.url) as looker:
        _, server = await probe(looker)
        assert await words_by_tokenize(looker, server, model="a", words=WORDS) is None
