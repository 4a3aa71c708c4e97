"""The mock's side of one HTTP/1.1 connection. Requests that come before an answer's end wait for it."""

import asyncio
import time
from collections import deque
from http import HTTPStatus
from typing import Protocol, cast

import httptools  # type: ignore[import-untyped]
import msgspec

MAX_REQUEST_BYTES = 256 << 20

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
STREAM_END = b"0\r\n\r\n"


class HttpRequest(msgspec.Struct, frozen=True, kw_only=True):
    method: str
    path: str
    body: bytes
    at: float
    """Its last byte was read."""
    api_key: str | None


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """An answer in one piece: JSON."""

    body: object
    status: int = 200


class Running(Protocol):
    """An answer that takes time."""

    def client_left(self) -> None: ...


class Answering(Protocol):
    """Who answers, and keeps count of its connections."""

    connections: set["Connection"]

    def answer(self, request: HttpRequest, connection: "Connection") -> None: ...


class Connection(asyncio.Protocol):
    def __init__(self, server: Answering) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._api_key: str | None = None
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._is_last = False
        """The client said that it closes the line after this answer."""
        self._running: Running | None = None
        self._waiting: deque[HttpRequest] = deque()

    # What the mock does with it.

    def begin(self, running: Running) -> None:
        assert self._running is None, "one answer at a time"
        self._running = running

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def finish(self) -> None:
        """The answer is out; the next request that came on this line is read."""
        self._running = None
        if self._is_last:
            self.close()
        elif self._waiting:
            self._server.answer(self._waiting.popleft(), self)

    def reply(self, reply: Reply) -> None:
        body = msgspec.json.encode(reply.body)
        again = b"Retry-After: 1\r\n" if reply.status in {429, 503} else b""
        reason = HTTPStatus(reply.status).phrase if reply.status in HTTPStatus._value2member_map_ else "-"
        self.write(
            b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n%b"
            % (reply.status, reason.encode(), again, len(body), body)
        )
        self.finish()

    def close(self) -> None:
        """Once what was written is out."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._server.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.abort()
        if self._num_bytes > MAX_REQUEST_BYTES:
            self.abort()
        if self._running is None and self._waiting:
            self._server.answer(self._waiting.popleft(), self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._waiting.clear()
        running, self._running = self._running, None
        if running is not None:
            running.client_left()

    # What httptools calls.

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"authorization":
            self._api_key = value.decode("latin-1").removeprefix("Bearer ")
        elif name.lower() == b"expect":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        request = HttpRequest(
            method=self._parser.get_method().decode(),
            path=self._url.partition(b"?")[0].decode("latin-1"),
            body=b"".join(self._pieces),
            at=time.monotonic(),
            api_key=self._api_key,
        )
        self._url, self._api_key, self._pieces, self._num_bytes = b"", None, [], 0
        self._is_last = not self._parser.should_keep_alive()
        self._waiting.append(request)
