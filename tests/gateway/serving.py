"""A whole server in the test's own loop, on a free port, and a client that speaks bytes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from core import EngineConfig
from gateway.app import build_app
from gateway.backends import Backend
from gateway.backends.scripted import Script, ScriptedBackend
from gateway.config import ServerConfig
from gateway.keys import ADMISSION, KEEP_ALIVE, LIFECYCLE
from gateway.lifespan import OpenBackend, bind, run

CHAT = "/v1/chat/completions"


@dataclass
class Server:
    """What a test needs of a running server."""

    app: web.Application
    port: int
    stopped: "asyncio.Task[None]"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.app[LIFECYCLE].request_stop()

    def check_nothing_is_held(self) -> None:
        """Promise 2 of the architecture, on the gateway's side."""
        self.app[ADMISSION].check()
        assert self.app[ADMISSION].num_admitted == 0
        assert self.app[KEEP_ALIVE].num_streams == 0


def make_config(**changes: Any) -> ServerConfig:
    engine = changes.pop("engine", None) or EngineConfig(checkpoint="scripted")
    return ServerConfig(engine=engine, **{"port": 0, "model_id": "scripted", "log_level": "error", **changes})


@asynccontextmanager
async def serving(open_backend: OpenBackend, *, ready: bool = True, **changes: Any) -> AsyncIterator[Server]:
    """Run a server for the length of the scope, through its own lifespan, then stop it."""
    app = build_app(make_config(**changes))
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        async with asyncio.TaskGroup() as tasks:
            life = tasks.create_task(run(app, sock=sock, open_backend=open_backend, handle_signals=False))
            if ready:
                await app[LIFECYCLE].ready()
            server = Server(app, port, life)
            try:
                yield server
            finally:
                server.stop()


def giving(backend: Backend) -> OpenBackend:
    """An `open_backend` that hands out one that exists."""

    @asynccontextmanager
    async def open_backend(_config: ServerConfig) -> AsyncIterator[Backend]:
        yield backend

    return open_backend


@asynccontextmanager
async def scripted(
    script: Script | None = None, **changes: Any
) -> AsyncIterator[tuple[Server, ScriptedBackend]]:
    """A server whose answers come from a script. At the end nothing may be held."""
    backend = ScriptedBackend(script)
    async with serving(giving(backend), **changes) as server:
        yield server, backend
        async with asyncio.timeout(10):
            await backend.until_running(0)
            await server.app[ADMISSION].idle()
        server.check_nothing_is_held()


def chat_body(**fields: Any) -> bytes:
    message = {"role": "user", "content": "Say hello."}
    return json.dumps({"model": "scripted", "messages": [message], **fields}).encode()


def http_request(body: bytes, *, path: str = CHAT, method: str = "POST", headers: str = "") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of OpenAI's shape; nothing else may stand beside it."""
        assert self.headers["content-type"].startswith("application/json"), self.headers
        document = json.loads(self.body)
        assert list(document) == ["error"]
        error: dict[str, Any] = document["error"]
        assert list(error) == ["message", "type", "param", "code"]
        assert isinstance(error["message"], str)
        assert error["message"]
        return error


class Connection:
    """One raw connection, so that a test sees the bytes and may leave when it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def head(self) -> tuple[int, dict[str, str]]:
        raw = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status_line, *lines = raw.rstrip().split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        return int(status_line.split()[1]), headers

    async def chunk(self) -> bytes:
        """One chunk of a chunked body; empty at its end."""
        size = int(await self.reader.readline(), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def response(self) -> Response:
        status, headers = await self.head()
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while data := await self.chunk():
                body += data
        else:
            body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return Response(status, headers, body)

    def leave(self) -> None:
        """Close without a word, as a killed client does."""
        self.writer.transport.abort()


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def ask(server: Server, body: bytes = b"", **how: Any) -> Response:
    """One request on its own connection."""
    async with connected(server) as connection, asyncio.timeout(20):
        connection.send(http_request(body, **how))
        return await connection.response()


async def get(server: Server, path: str) -> Response:
    return await ask(server, path=path, method="GET")


def sse_data(body: bytes) -> list[Any]:
    """The `data:` of each event, decoded; comments are left out. Asserts the framing."""
    assert body.endswith(b"\n\n"), body[-40:]
    events = []
    for frame in body.decode().removesuffix("\n\n").split("\n\n"):
        assert "\n" not in frame, f"one line per event: {frame!r}"
        if frame.startswith(":"):
            continue
        assert frame.startswith("data: "), frame
        data = frame.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


def streamed_text(body: bytes) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for event in sse_data(body)
        if event != "[DONE]"
        for choice in event.get("choices", [])
    )


def metric(text: bytes, name: str) -> float:
    """The value of one sample of `/metrics`, labels and all."""
    lines = [line for line in text.decode().splitlines() if line.rpartition(" ")[0] == name]
    assert len(lines) == 1, f"{name}: {lines}"
    return float(lines[0].rpartition(" ")[2])
