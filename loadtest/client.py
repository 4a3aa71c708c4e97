"""Sends one request, reads its stream and writes down what happened and when."""

import ssl

import msgspec

from loadtest.dialects import Dialect
from loadtest.record import RequestRecord


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is ready to be sent: everything slow was done before its time."""

    id: str
    session: str
    turn: int
    body: bytes
    """JSON, as `encode_body(dialect, ask)` gives it."""
    scheduled_at: float
    """On the clock of `time.monotonic()`, as every time of a record."""
    num_planned_prompt_tokens: int = 0
    cancel_after_s: float | None = None
    cancel_after_tokens: int | None = None
    keep_text: bool = False
    """Whether a later request needs the answer."""


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """A request that passes one of them ends with a `timeout` (`connect`: with a `connect`) fault."""

    connect_s: float = 10.0
    idle_s: float = 300.0
    """Without an event; comments are none, so a server that only keeps the line open is noticed."""
    total_s: float = 3600.0
    """From the first byte sent."""


class Client:
    """One target's connections. Belongs to one event loop. Use as `async with Client(...) as client`."""

    def __init__(
        self,
        target: str,
        dialect: Dialect,
        *,
        api_key: str | None = None,
        deadlines: Deadlines | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        raise NotImplementedError

    async def send(self, call: Call) -> RequestRecord:
        """Send at once, and read to the end. Never raises for what the server does: see `Fault`."""
        raise NotImplementedError

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close every connection."""
