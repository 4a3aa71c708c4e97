"""What happened to one request of a run. All times in seconds on one monotonic clock."""

from typing import Literal

import msgspec

FaultKind = Literal["connect", "http", "stream", "cut", "timeout", "protocol", "unsent"]
"""No connection; a status that is not 200; an error event inside the stream; the stream ended without
its end; no progress within the deadline; bytes that are not the protocol; never sent, because a
request it waits for failed."""

TokenSource = Literal["continuous usage", "one per event", "by text length", "unknown"]
"""How a chunk's tokens were counted: the server said so with each chunk; the total says that each
event with content was one token; the total was spread over the events by length of text; nothing told."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request failed. For every metric it counts as infinitely slow."""

    kind: FaultKind
    message: str
    status: int | None = None


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the client saw it. None means that it is not known, never that it is zero."""

    id: str
    session: str
    turn: int
    """0 for the first of its session in plan order."""
    scheduled_at: float
    """Intended start: from the schedule, or the end of the answers it waited for plus the delay."""
    sent_at: float | None = None
    """Its first byte was handed to the socket."""
    first_token_at: float | None = None
    """First content that is not empty: text, reasoning or a tool call. Roles and keep-alives are none."""
    first_visible_at: float | None = None
    """First content that is not reasoning."""
    last_token_at: float | None = None
    ended_at: float
    """The stream was over, or given up. Closed loops go on from here."""
    content_times: tuple[float, ...] = ()
    """When each event with content was read from the socket, before anything was parsed."""
    content_tokens: tuple[float, ...] = ()
    """Tokens of each of these events; fractions where they are `by text length`; none where `unknown`."""
    token_source: TokenSource = "unknown"  # noqa: S105 - a token of text, no secret
    num_planned_prompt_tokens: int = 0
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None
    """These three as the server's usage says."""
    finish_reason: str | None = None
    cancelled: bool = False
    """The plan told the client to leave, and it left. Neither a success nor a failure."""
    fault: Fault | None = None
    num_bytes: int = 0
    num_events: int = 0
    text: str = ""
    """The answer, kept only where a later request needs it (live history)."""
