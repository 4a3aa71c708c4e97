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
        """Send at once and read to the end. What the server does wrong is the record's fault.

        A request that meets a reused line just being closed is sent once more, on a new line; the first
        sending stays the one that counts.
        Source: RFC 9112 section 9.3.1: without any answer on a reused line it may be repeated.
        """
        record, was_reused = await self._attempt(call)
        fault = record.fault
        if was_reused and fault is not None and fault.kind == "cut" and not record.num_bytes:
            self._num_resent += 1
            record, _ = await self._attempt(call, sent_at=record.sent_at)
        return record

    async def _attempt(self, call: Call, *, sent_at: float | None = None) -> tuple[RequestRecord, bool]:
        """The record, and whether its line had served before.

        Args:
            sent_at: of the attempt before, if there was one; then the line is a new one.
        """
        exchange = Exchange(call, self._dialect.read, self._deadlines)
        exchange.sent_at = sent_at
        try:
            connection = await self._connections.take(fresh=sent_at is not None)
            if isinstance(connection, Fault):
                exchange.fail(connection)
                return exchange.record(), False
            was_reused = connection.num_asked > 0
            exchange.start(connection, self._head + b"%d\r\n\r\n" % len(call.body))
            await exchange.done
            return exchange.record(), was_reused
        finally:
            exchange.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Every connection is closed; requests on their way end with a `cut`."""
        self._connections.close()


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
