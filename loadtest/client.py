"""Sends requests to one target and brings back what happened to each.

async with Client("http://127.0.0.1:8000", find_dialect("chat")) as client:
    record = await client.send(call)
"""

import ssl
from typing import Self

from loadtest.call import Call, Deadlines, encode_body
from loadtest.dialects import Dialect
from loadtest.errors import PlanInvalid
from loadtest.exchange import Exchange
from loadtest.record import Fault, RequestRecord
from loadtest.transport import Connections, parse_target

__all__ = ["Call", "Client", "Deadlines", "encode_body"]


class Client:
    """One target's connections. Belongs to one event loop."""

    def __init__(
        self,
        target: str,
        dialect: Dialect,
        *,
        api_key: str | None = None,
        deadlines: Deadlines | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`tls` replaces the system's trust, for servers with certificates of their own.

        Raises:
            TargetUnusable: `target` is no http or https URL.
            PlanInvalid: `api_key` cannot stand in a header.
        """
        address = parse_target(target)
        self._dialect = dialect
        self._deadlines = deadlines or Deadlines()
        self._connections = Connections(address, connect_s=self._deadlines.connect_s, tls=tls)
        self._head = _head(address.path + dialect.path, host=address.host_header, api_key=api_key)
        self._num_resent = 0

    @property
    def num_connections(self) -> int:
        """Opened so far."""
        return self._connections.num_opened

    @property
    def num_resent(self) -> int:
        """Requests that met a connection which the server was just closing, and were sent once more."""
        return self._num_resent

    async def send(self, call: Call) -> RequestRecord:
        """Send at once and read to the end. What the server does wrong is the record's fault."""
        exchange = Exchange(call, self._dialect.read, self._deadlines)
        head = self._head + b"%d\r\n\r\n" % len(call.body)
        try:
            connection = await self._connections.take()
            if isinstance(connection, Fault):
                exchange.fail(connection)
                return exchange.record()
            exchange.start(connection, head)
            await exchange.done
            record = exchange.record()
            if connection.num_asked > 1 and _met_a_closing_line(record):
                return await self._resend(call, head=head, first=record)
            return record
        finally:
            exchange.release()

    async def _resend(self, call: Call, *, head: bytes, first: RequestRecord) -> RequestRecord:
        """Once, on a new connection; the first sending stays the one that counts.

        Source: RFC 9112 section 9.3.1: a request without any answer on a reused line may be repeated.
        """
        self._num_resent += 1
        exchange = Exchange(call, self._dialect.read, self._deadlines)
        exchange.sent_at = first.sent_at
        try:
            connection = await self._connections.take(fresh=True)
            if isinstance(connection, Fault):
                exchange.fail(connection)
                return exchange.record()
            exchange.start(connection, head)
            await exchange.done
            return exchange.record()
        finally:
            exchange.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Every connection is closed; requests on their way end with a `cut`."""
        self._connections.close()


def _met_a_closing_line(record: RequestRecord) -> bool:
    return record.fault is not None and record.fault.kind == "cut" and record.num_bytes == 0


def _head(path: str, *, host: str, api_key: str | None) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {host}",
        "User-Agent: tidegate-loadtest",
        "Accept: text/event-stream",
        "Accept-Encoding: identity",
        "Content-Type: application/json",
    ]
    if api_key is not None:
        if not api_key or not api_key.isascii() or not api_key.isprintable():
            raise PlanInvalid("--api-key is empty or has characters that a header cannot hold")
        lines.append(f"Authorization: Bearer {api_key}")
    return "\r\n".join([*lines, "Content-Length: "]).encode()
