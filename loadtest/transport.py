"""HTTP/1.1 connections of a client that stamps bytes as the socket gives them.

HTTP libraries hand over a body some time after it was read. Here the stamp is taken in
`data_received`, before anything is parsed. `http` and `https` alike; no proxy, no redirect.
"""

import asyncio
import contextlib
import resource
import socket
import ssl
import time
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools  # type: ignore[import-untyped]
import msgspec

from loadtest.errors import TargetUnusable
from loadtest.record import Fault

MAX_HEAD_BYTES = 64 << 10
MAX_BODY_BYTES = 1 << 30
DRAIN_S = 5.0
"""A server that has said `[DONE]` may take so long to end its HTTP message; then the line is closed."""

MIN_OPEN_FILES = 16384


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where a target is."""

    host: str
    port: int
    is_tls: bool
    path: str
    """What stands before a dialect's path; mostly empty."""

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"


def parse_target(url: str) -> Address:
    """An `http` or `https` URL. A trailing `/v1` is dropped: dialects bring their own.

    Raises:
        TargetUnusable: saying what is wrong with it.
    """
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        port = parts.port
        host = (parts.hostname or "").encode("idna").decode() if parts.hostname else ""
    except (ValueError, UnicodeError) as error:
        raise TargetUnusable(f"target {url!r} is no URL: {error}") from error
    if parts.scheme not in {"http", "https"}:
        raise TargetUnusable(f"target {url!r} must begin with http:// or https://")
    if not host:
        raise TargetUnusable(f"target {url!r} names no host")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise TargetUnusable(f"target {url!r} must be scheme, host, port and path, nothing more")
    path = parts.path.rstrip("/").removesuffix("/v1")
    if not path.isascii() or any(character <= " " for character in path):
        raise TargetUnusable(f"target {url!r} has characters in its path that a URL cannot hold")
    is_tls = parts.scheme == "https"
    return Address(host=host, port=port or (443 if is_tls else 80), is_tls=is_tls, path=path)


def raise_open_files(wanted: int = MIN_OPEN_FILES) -> int:
    """Lift the process's soft limit of open files as far as it may go; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Sink(Protocol):
    """Who reads one answer. Either `end` or `lost` is its last call."""

    num_bytes: int
    """As the socket gave them, heads and framing too."""

    def head(self, status: int, headers: dict[bytes, bytes]) -> None: ...

    def body(self, data: bytes, at: float) -> None: ...

    def end(self, at: float) -> None: ...

    def lost(self, at: float, fault: Fault) -> None: ...


class _Message:
    """What httptools calls back: the parts of one answer."""

    __slots__ = (
        "headers",
        "is_head_whole",
        "is_last",
        "is_surplus",
        "is_whole",
        "on_body",
        "parser",
        "pieces",
        "status",
    )

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.on_body = self.pieces.append
        self.headers: dict[bytes, bytes] = {}
        self.status = 0
        self.is_head_whole = False
        self.is_whole = False
        self.is_last = False
        self.is_surplus = False
        self.parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self.is_surplus = self.is_whole

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self.is_whole:
            return
        self.status = self.parser.get_status_code()
        self.is_head_whole = self.status >= 200  # 100 Continue and 103 Early Hints come before the answer

    def on_message_complete(self) -> None:
        if self.is_head_whole:
            self.is_whole = True
            self.is_last = not self.parser.should_keep_alive()  # the parser knows it here only
        else:
            self.headers.clear()

    @property
    def ends_with_connection(self) -> bool:
        chunked = b"chunked" in self.headers.get(b"transfer-encoding", b"").lower()
        return self.is_head_whole and not chunked and b"content-length" not in self.headers


class Connection(asyncio.Protocol):
    """One socket and at most one question at a time."""

    def __init__(self, pool: "Connections") -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._sink: Sink | None = None
        self._message: _Message | None = None
        self._is_head_told = False
        self._num_bytes = 0
        self.num_asked = 0

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def _is_writing(self) -> bool:
        """An answer that came before the question was sent is a refusal: its rest would be out of step."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def ask(self, head: bytes, body: bytes, sink: Sink) -> float:
        """Write a request whose answer `sink` reads; returns when its first byte was handed over."""
        assert self._transport is not None, "asked before it was open"
        assert self._message is None, "one question at a time"
        self._sink = sink
        self._message = _Message()
        self._is_head_told = False
        self._num_bytes = 0
        self.num_asked += 1
        at = time.monotonic()
        self._transport.writelines((head, body))
        return at

    def leave(self) -> None:
        """Nobody reads this answer any more, and it is not worth the wait."""
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    def detach(self) -> None:
        """The answer has been read, but for the end of its HTTP message: reuse the line once that is here."""
        self._sink = None
        if self._message is not None and not self._message.is_whole:
            asyncio.get_running_loop().call_later(DRAIN_S, self._close_unless_drained, self._message)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def cut(self) -> None:
        """Close at once; who reads is told that the answer is lost."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        at = time.monotonic()
        message = self._message
        if message is None:
            self.close()  # an answer nobody asked for: what follows would be out of step
            return
        self._num_bytes += len(data)
        sink = self._sink
        if sink is not None:
            sink.num_bytes += len(data)
        try:
            message.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not message.is_whole:
                self._fail(at, f"not HTTP/1.1: {error}")
                return
            message.is_surplus = True
        if not message.is_head_whole and self._num_bytes > MAX_HEAD_BYTES:
            self._fail(at, f"the answer's head is longer than {MAX_HEAD_BYTES} bytes")
            return
        if self._num_bytes > MAX_BODY_BYTES:
            self._fail(at, f"the answer is longer than {MAX_BODY_BYTES} bytes")
            return
        self._pass_on(message, at)

    def eof_received(self) -> None:
        """The transport closes itself; `connection_lost` follows."""

    def connection_lost(self, exc: Exception | None) -> None:
        at = time.monotonic()
        message, sink = self._message, self._sink
        self._message = self._sink = None
        self._pool.forget(self)
        if sink is None or message is None:
            return
        if message.ends_with_connection and exc is None:
            sink.end(at)
            return
        where = "inside the answer" if message.is_head_whole else "before an answer"
        sink.lost(at, Fault(kind="cut", message=f"the connection was closed {where}{_reason(exc)}"))

    def _pass_on(self, message: _Message, at: float) -> None:
        if message.is_head_whole and not self._is_head_told:
            self._is_head_told = True
            if self._sink is not None:
                self._sink.head(message.status, message.headers)
        pieces = message.pieces
        if pieces:
            if self._sink is not None:
                self._sink.body(pieces[0] if len(pieces) == 1 else b"".join(pieces), at)
            pieces.clear()
        if message.is_whole and self._message is message:
            self._finish(message, at)

    def _finish(self, message: _Message, at: float) -> None:
        sink, self._sink, self._message = self._sink, None, None
        if message.is_surplus or message.is_last or self._is_writing:
            self.close()
        elif self.is_open:
            self._pool.give_back(self)
        if sink is not None:
            sink.end(at)

    def _fail(self, at: float, why: str) -> None:
        sink = self._sink
        self.leave()
        if sink is not None:
            sink.lost(at, Fault(kind="protocol", message=why))

    def _close_unless_drained(self, message: _Message) -> None:
        if self._message is message:
            self.leave()


class Connections:
    """Open connections to one address, without a limit: a limit would be a queue inside the client."""

    def __init__(self, address: Address, *, connect_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._address = address
        self._connect_s = connect_s
        self._tls = (tls or ssl.create_default_context()) if address.is_tls else None
        self._idle: dict[Connection, None] = {}
        self._open: set[Connection] = set()
        self._hosts: list[str] = []
        self._asking = asyncio.Lock()
        self.num_opened = 0

    async def take(self, *, fresh: bool = False) -> Connection | Fault:
        """A connection that waits for a question, or why there is none."""
        while self._idle and not fresh:
            connection, _ = self._idle.popitem()  # the youngest: the server closes the oldest first
            if connection.is_open:
                return connection
        try:
            async with asyncio.timeout(self._connect_s):
                return await self._connect()
        except TimeoutError:
            why = f"no connection within {self._connect_s:g} s"
        except OSError as error:
            why = str(error) or type(error).__name__
        return Fault(kind="connect", message=f"{self._address.host_header}: {why}")

    def give_back(self, connection: Connection) -> None:
        self._idle[connection] = None

    def forget(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        self._open.discard(connection)

    def close(self) -> None:
        for connection in tuple(self._open):
            connection.cut()
        self._idle.clear()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        failure: OSError | None = None
        for host in await self._resolved():
            try:
                _, connection = await loop.create_connection(
                    lambda: Connection(self),
                    host,
                    self._address.port,
                    ssl=self._tls,
                    server_hostname=self._address.host if self._tls else None,
                )
            except OSError as error:
                failure = error
                continue
            self._hosts = [host]  # the one that answers is asked from now on
            self._open.add(connection)
            self.num_opened += 1
            return connection
        raise failure or OSError("the name has no address")

    async def _resolved(self) -> list[str]:
        """Asked once: two thousand look-ups at once would wait for each other."""
        async with self._asking:
            if not self._hosts:
                loop = asyncio.get_running_loop()
                where = (self._address.host, self._address.port)
                found = await loop.getaddrinfo(*where, type=socket.SOCK_STREAM)
                self._hosts = list(dict.fromkeys(str(info[4][0]) for info in found))
        return self._hosts


def _reason(error: Exception | None) -> str:
    return f": {error}" if error is not None and str(error) else ""
