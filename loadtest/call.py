"""What a client is given: a request that is ready to be sent, and how long it may take."""

import msgspec

from loadtest.dialects import Ask, Dialect


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is ready to be sent: everything slow was done before its time."""

    id: str
    session: str
    turn: int
    body: bytes
    """JSON, as `encode_body` gives it."""
    scheduled_at: float
    """On the clock of `time.monotonic()`, as every time of a record."""
    num_planned_prompt_tokens: int = 0
    cancel_after_s: float | None = None
    cancel_after_tokens: int | None = None
    keep_text: bool = False
    """Whether a later request needs the answer."""


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """A request that passes one of them ends with a `timeout` fault (`connect_s`: with a `connect` fault)."""

    connect_s: float = 10.0
    idle_s: float = 300.0
    """Without an event; comments are none, so a server that only keeps the line open is noticed."""
    total_s: float = 3600.0
    """From the first byte sent."""


def encode_body(dialect: Dialect, ask: Ask) -> bytes:
    """The body of a call. Takes a millisecond per megabyte: to be done before the call's time."""
    return msgspec.json.encode(dialect.body(ask))
