"""The client's side of HTTP: framing, reuse, bounds, and servers that break the protocol."""

import asyncio
import re
import shutil
import socket
import ssl
import subprocess
import time

import pytest

from loadtest import transport
from loadtest.client import Call, Client, Deadlines
from loadtest.dialects import find_dialect
from loadtest.errors import PlanInvalid, TargetUnusable
from loadtest.transport import parse_target, raise_open_files
from tests.loadtest.raw_server import EVENT_HEAD, WHOLE, raw_server, says, sized, until

CHAT = find_dialect("chat")
CHUNKED = EVENT_HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def a_call(**fields) -> Call:
    return Call(
        **{"id": "r", "session": "s", "turn": 0, "body": b"{}", "scheduled_at": time.monotonic(), **fields}
    )


def chunks(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


async def ask_once(answer, **options):
    async with raw_server(answer) as server, Client(server.url, CHAT, **options) as client:
        return await client.send(a_call())


@pytest.mark.parametrize(
    ("url", "host", "port", "is_tls", "path"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, False, ""),
        ("localhost:8000", "localhost", 8000, False, ""),
        ("https://example.test", "example.test", 443, True, ""),
        ("https://example.test/v1/", "example.test", 443, True, ""),
        ("http://example.test/proxy/v1", "example.test", 80, False, "/proxy"),
        ("http://[::1]:9", "::1", 9, False, ""),
    ],
)
def test_a_target_is_a_url_with_or_without_its_v1(url, host, port, is_tls, path):
    address = parse_target(url)
    assert (address.host, address.port, address.is_tls, address.path) == (host, port, is_tls, path)


@pytest.mark.parametrize(
    "url",
    [
        "", "ftp://x", "http://", "http://x:99999", "http://x:port", "http://u:p@x", "http://x/?q=1",
        "http://x/a b", "http://x/\r\nX: y", "http://[::1", "http://x#f",
    ],
)  # fmt: skip
def test_a_target_that_is_no_url_is_refused_with_its_text(url):
    with pytest.raises(TargetUnusable, match="target"):
        parse_target(url)


@pytest.mark.parametrize("key", ["", "a\r\nX: y", "ключ"])
def test_an_api_key_that_no_header_can_hold_is_refused(key):
    with pytest.raises(PlanInvalid, match="api-key"):
        Client("http://127.0.0.1:1", CHAT, api_key=key)


async def test_a_request_says_what_a_server_needs_and_nothing_twice():
    async with (
        raw_server(says(sized(WHOLE))) as server,
        Client(server.url + "/v1", CHAT, api_key="k1") as client,
    ):
        record = await client.send(a_call(body=b'{"x":1}'))
    assert record.fault is None
    (request,) = server.requests
    head, _, body = request.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /v1/chat/completions HTTP/1.1"
    names = [line.partition(b":")[0].lower() for line in lines[1:]]
    assert len(names) == len(set(names))
    assert b"Host: " + server.url.removeprefix("http://").encode() in lines
    assert b"Authorization: Bearer k1" in lines
    assert body == b'{"x":1}'


@pytest.mark.parametrize(
    "answer",
    [
        says(sized(WHOLE)),
        says(CHUNKED + chunks(WHOLE)),
        says(CHUNKED, chunks(*(WHOLE[i : i + 1] for i in range(len(WHOLE))))),
        says(EVENT_HEAD + b"Connection: close\r\n\r\n", WHOLE, closes=True),
        says(b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + sized(WHOLE)),
    ],
    ids=["sized", "chunked", "a byte a chunk", "until the close", "after interim answers"],
)
async def test_every_framing_of_http_carries_the_same_answer(answer):
    record = await ask_once(answer)
    assert record.fault is None
    assert len(record.content_times) == 1
    assert record.num_bytes > len(WHOLE)


async def test_a_connection_is_used_again_and_a_busy_one_is_not():
    gate = asyncio.Event()

    async def answer(_, writer):
        await gate.wait()
        writer.write(sized(WHOLE))

    async with raw_server(answer) as server, Client(server.url, CHAT) as client:
        async with asyncio.TaskGroup() as tasks:
            both = [tasks.create_task(client.send(a_call())) for _ in range(2)]
            await until(lambda: len(server.requests) == 2)
            gate.set()
        assert [task.result().fault for task in both] == [None, None]
        assert client.num_connections == 2
        for _ in range(5):
            assert (await client.send(a_call())).fault is None
        assert client.num_connections == 2


async def test_a_line_that_the_server_closes_after_its_answer_is_not_used_again():
    answer = says(sized(WHOLE, head=EVENT_HEAD + b"Connection: close\r\n"))
    async with raw_server(answer) as server, Client(server.url, CHAT) as client:
        for _ in range(3):
            assert (await client.send(a_call())).fault is None
        assert client.num_connections == 3


async def test_a_request_that_meets_a_closing_line_is_sent_once_more_and_keeps_its_first_time():
    async def answer(_, writer):
        if server.num_connections == 1 and len(server.requests) == 2:
            writer.transport.abort()
        else:
            writer.write(sized(WHOLE))

    async with raw_server(answer) as server, Client(server.url, CHAT) as client:
        await client.send(a_call())
        before = time.monotonic()
        record = await client.send(a_call())
        assert record.fault is None
        assert record.sent_at is not None
        assert before <= record.sent_at <= record.ended_at
        assert (client.num_resent, len(server.requests)) == (1, 3)


async def test_a_request_on_a_fresh_line_is_never_sent_twice():
    async def answer(_, writer):
        writer.transport.abort()

    async with raw_server(answer) as server, Client(server.url, CHAT) as client:
        record = await client.send(a_call())
        assert record.fault is not None
        assert record.fault.kind == "cut"
        assert (client.num_resent, len(server.requests)) == (0, 1)


@pytest.mark.parametrize("surplus", [sized(WHOLE), b"noise", b"\r\n\r\nHTTP/9"])
async def test_a_line_with_unasked_bytes_is_out_of_step_and_is_dropped(surplus):
    answer = says(sized(WHOLE) + surplus)
    async with raw_server(answer) as server, Client(server.url, CHAT) as client:
        for _ in range(3):
            record = await client.send(a_call())
            assert record.fault is None
            assert len(record.content_times) == 1
        assert client.num_connections == 3


async def test_a_refusal_before_the_question_is_out_does_not_leave_half_a_question_on_the_line():
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        await gate.wait()
        writer.transport.abort()

    gate = asyncio.Event()
    listener = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1024)
    port = listener.sockets[0].getsockname()[1]
    async with Client(f"http://127.0.0.1:{port}", CHAT) as client:
        record = await client.send(a_call(body=b"x" * (64 << 20)))
        assert record.fault is not None
        assert (record.fault.kind, record.fault.status) == ("http", 413)
        assert not client._connections._idle
        gate.set()
    listener.close()


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (says(b"SSH-2.0-OpenSSH\r\n"), "protocol", "not HTTP"),
        (says(CHUNKED + b"xyz\r\n"), "protocol", "not HTTP"),
        (says(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000), "protocol", "head is longer"),
        (
            says(b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc"),
            "protocol",
            "not HTTP",
        ),
        (says(sized(WHOLE, head=EVENT_HEAD + b"Content-Encoding: gzip\r\n")), "protocol", "gzip"),
        (says(EVENT_HEAD + b"\r\n", closes=True), "cut", r"without \[DONE\]"),
        (says(EVENT_HEAD + b"Content-Length: 900\r\n\r\n" + WHOLE[:20], closes=True), "cut", "inside"),
        (says(CHUNKED, closes=True), "cut", "inside"),
        (says(b"HTTP/1.1 200", closes=True), "cut", "before an answer"),
        (says(closes=True), "cut", "before an answer"),
    ],
)
async def test_a_server_that_breaks_off_or_speaks_otherwise_is_a_fault_with_its_kind(answer, kind, message):
    record = await ask_once(answer)
    assert record.fault is not None
    assert record.fault.kind == kind
    assert re.search(message, record.fault.message), record.fault
    assert record.first_token_at is None


async def test_an_answer_without_an_end_is_bounded(monkeypatch):
    monkeypatch.setattr(transport, "MAX_BODY_BYTES", 100_000)
    record = await ask_once(says(EVENT_HEAD + b"\r\n", b": noise\n\n" * 20_000))
    assert record.fault is not None
    assert record.fault.kind == "protocol"
    assert "longer than 100000" in record.fault.message


async def test_a_dead_server_is_a_connect_fault_and_nothing_was_sent():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and never listening
        async with Client(f"http://127.0.0.1:{taken.getsockname()[1]}", CHAT) as client:
            record = await client.send(a_call())
    assert record.fault is not None
    assert record.fault.kind == "connect"
    assert record.sent_at is None
    assert record.num_bytes == 0


async def test_a_name_with_several_addresses_is_asked_once_and_the_one_that_answers_is_kept(monkeypatch):
    loop = asyncio.get_running_loop()
    num_asked = 0

    async def addresses(host, port, **_):
        nonlocal num_asked
        num_asked += 1
        assert host == "server.test"
        return [(2, 1, 6, "", (each, port)) for each in ("127.0.0.2", "127.0.0.1")]

    async with raw_server(says(sized(WHOLE))) as server:
        monkeypatch.setattr(loop, "getaddrinfo", addresses)
        port = server.url.rpartition(":")[2]
        async with Client(f"http://server.test:{port}", CHAT) as client:
            async with asyncio.TaskGroup() as tasks:
                sending = [tasks.create_task(client.send(a_call())) for _ in range(20)]
            assert [task.result().fault for task in sending] == [None] * 20
    assert num_asked == 1


async def test_a_name_that_nobody_has_is_a_connect_fault():
    async with Client("http://no-such-host.invalid:80", CHAT) as client:
        record = await client.send(a_call())
    assert record.fault is not None
    assert record.fault.kind == "connect"


async def test_a_tls_handshake_that_does_not_come_ends_at_the_deadline():
    async def serve(_, writer):
        await gate.wait()
        writer.transport.abort()

    gate = asyncio.Event()
    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with Client(f"https://127.0.0.1:{port}", CHAT, deadlines=Deadlines(connect_s=0.1)) as client:
        record = await client.send(a_call())
    gate.set()
    listener.close()
    assert record.fault is not None
    assert record.fault.kind == "connect"
    assert "0.1 s" in record.fault.message


@pytest.fixture
def certificate(tmp_path):
    """A key and a certificate of its own for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, certificate


async def test_tls_is_the_same_and_a_stranger_is_refused(certificate):
    key, certificate = certificate
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))
    async with raw_server(says(sized(WHOLE)), tls=served) as server:
        async with Client(server.url, CHAT, tls=trusting) as client:
            assert (await client.send(a_call())).fault is None
            assert (await client.send(a_call())).fault is None
            assert client.num_connections == 1
        async with Client(server.url, CHAT) as stranger:
            record = await stranger.send(a_call())
    assert record.fault is not None
    assert record.fault.kind == "connect"
    assert "certificate" in record.fault.message.lower()


async def test_closing_the_client_ends_what_is_on_its_way():
    async def answer(_, writer):
        writer.write(CHUNKED)

    async with (
        raw_server(answer) as server,
        asyncio.TaskGroup() as tasks,
        Client(server.url, CHAT) as client,
    ):
        sending = tasks.create_task(client.send(a_call()))
        await until(lambda: server.requests)
    fault = sending.result().fault
    assert fault is not None
    assert fault.kind == "cut"


async def test_a_task_that_is_cancelled_takes_its_connection_along():
    async def answer(_, writer):
        writer.write(CHUNKED)

    async with raw_server(answer) as server, Client(server.url, CHAT) as client:
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(client.send(a_call()))
            await until(lambda: server.requests)
            sending.cancel()
        assert sending.cancelled()
        await until(lambda: not client._connections._open)


def test_the_limit_of_open_files_is_lifted_and_never_lowered():
    before = raise_open_files(1)
    assert raise_open_files(before) == before
