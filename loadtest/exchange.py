"""One request and its stream: what came, when, and what it comes to.

The clock of a record starts with content only: a role, an empty delta, a comment or a keep-alive is
none. Everything here runs once per event for thousands of streams, so it does little.
"""

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise

import msgspec

from loadtest.call import Call, Deadlines
from loadtest.dialects import Reading, Usage
from loadtest.event_stream import DONE, EventStream, EventTooLong
from loadtest.record import Fault, RequestRecord, TokenSource
from loadtest.transport import Connection

MAX_ERROR_BYTES = 64 << 10
MAX_MESSAGE_CHARS = 300
MIN_TIMER_S = 0.001


class Exchange:
    """A `Sink` that becomes a `RequestRecord`. `done` is set when nothing more will be read."""

    __slots__ = (
        "_call", "_connection", "_deadlines", "_events", "_fault", "_finish_reason", "_first_visible_at",
        "_is_cancelled", "_last_event_at", "_lengths", "_num_events", "_read", "_refusal", "_status",
        "_texts", "_timer", "_times", "_totals", "_usage", "done", "ended_at", "num_bytes", "sent_at",
    )  # fmt: skip

    def __init__(self, call: Call, read: Callable[[bytes], Reading], deadlines: Deadlines) -> None:
        self._call = call
        self._read = read
        self._deadlines = deadlines
        self._connection: Connection | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._events = EventStream()
        self._status = 0
        self._refusal: bytearray | None = None
        """The body, where it is not a stream of events."""
        self._times: list[float] = []
        self._lengths: list[int] = []
        self._totals: list[int | None] = []
        """Output tokens so far, as usage said with each event with content."""
        self._texts: list[str] = []
        self._usage = Usage()
        self._finish_reason: str | None = None
        self._first_visible_at: float | None = None
        self._last_event_at = 0.0
        self._num_events = 0
        self._fault: Fault | None = None
        self._is_cancelled = False
        self.num_bytes = 0
        self.sent_at: float | None = None
        self.ended_at: float | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, connection: Connection, head: bytes) -> None:
        """Ask. Asked again on a second connection, the first sending stays the one that counts."""
        self._connection = connection
        at = connection.ask(head, self._call.body, self)
        self._last_event_at = at
        if self.sent_at is None:
            self.sent_at = at
        self._watch()

    def fail(self, fault: Fault, at: float | None = None) -> None:
        self._fault = fault
        self._stop(time.monotonic() if at is None else at)

    def release(self) -> None:
        """Nobody waits for this answer any more: its line and its timer go."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._connection is not None:
            self._connection.leave()
            self._connection = None

    # What the connection calls.

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status = status
        kind = headers.get(b"content-type", b"text/event-stream")
        encoding = headers.get(b"content-encoding", b"identity").lower()
        if status != 200 or not kind.lower().startswith(b"text/event-stream"):
            self._refusal = bytearray()
        elif encoding != b"identity":
            text = encoding.decode("latin-1")
            self.fail(
                Fault(kind="protocol", message=f"the stream is encoded as {text}, unasked", status=status)
            )

    def body(self, data: bytes, at: float) -> None:
        if self._refusal is not None:
            if len(self._refusal) < MAX_ERROR_BYTES:
                self._refusal += data
            return
        try:
            events = self._events.feed(data)
        except EventTooLong as error:
            self.fail(Fault(kind="protocol", message=str(error), status=self._status), at)
            return
        for name, payload in events:
            self._take(name, payload, at)
            if self.ended_at is not None:
                return

    def end(self, at: float) -> None:
        if self.ended_at is not None:
            return
        self._connection = None  # given back already
        if self._refusal is not None:
            self.fail(_refused(self._status, bytes(self._refusal)), at)
        elif self._events.says_done():
            self._stop(at)
        else:
            num = self._num_events
            self.fail(Fault(kind="cut", message=f"the stream ended without [DONE] after {num} events"), at)

    def lost(self, at: float, fault: Fault) -> None:
        if self.ended_at is not None:
            return
        self._connection = None
        if fault.kind == "cut" and self._num_events:
            fault = Fault(kind="cut", message=f"{fault.message}, after {self._num_events} events")
        self.fail(fault, at)

    # One event.

    def _take(self, name: bytes, payload: bytes, at: float) -> None:
        if payload == DONE:
            self._leave_line()
            self._stop(at)
            return
        try:
            reading = self._read(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            self.fail(_not_understood(name, payload, error), at)
            return
        self._num_events += 1
        self._last_event_at = at
        if reading.usage is not None:
            self._usage = _merged(self._usage, reading.usage)
        if reading.finish_reason is not None:
            self._finish_reason = reading.finish_reason
        if reading.text or reading.reasoning or reading.tool_text:
            self._take_content(reading, at)
        if reading.error is not None or name == b"error":
            message = reading.error or payload.decode(errors="replace")
            self.fail(Fault(kind="stream", message=message[:MAX_MESSAGE_CHARS], status=self._status), at)
        elif self._has_had_enough():
            self._is_cancelled = True
            self._stop(time.monotonic())

    def _take_content(self, reading: Reading, at: float) -> None:
        self._times.append(at)
        self._lengths.append(len(reading.text) + len(reading.reasoning) + len(reading.tool_text))
        self._totals.append(reading.usage.num_output_tokens if reading.usage is not None else None)
        if self._first_visible_at is None and (reading.text or reading.tool_text):
            self._first_visible_at = at
        if self._call.keep_text and reading.text:
            self._texts.append(reading.text)

    def _has_had_enough(self) -> bool:
        """Before the end nothing says how many tokens an event holds, unless usage comes with each."""
        limit = self._call.cancel_after_tokens
        if limit is None or not self._times:
            return False
        return (self._totals[-1] or len(self._times)) >= limit

    # The end.

    def _leave_line(self) -> None:
        if self._connection is not None:
            self._connection.detach()
            self._connection = None

    def _stop(self, at: float) -> None:
        if self.ended_at is not None:
            return
        self.ended_at = at
        self.release()
        if not self.done.done():
            self.done.set_result(None)

    def _watch(self) -> None:
        """One timer for all deadlines, set anew only when it fires: not once per event."""
        now = time.monotonic()
        assert self.sent_at is not None, "watched before it was sent"
        leave_at = self.sent_at + (
            self._call.cancel_after_s if self._call.cancel_after_s is not None else 1e9
        )
        total_at = self.sent_at + self._deadlines.total_s
        idle_at = self._last_event_at + self._deadlines.idle_s
        if now >= leave_at:
            self._is_cancelled = True
            self._stop(now)
        elif now >= total_at:
            self.fail(Fault(kind="timeout", message=f"not over within {self._deadlines.total_s:g} s"), now)
        elif now >= idle_at:
            what = f"no event for {self._deadlines.idle_s:g} s, after {self._num_events} events"
            self.fail(Fault(kind="timeout", message=what), now)
        else:
            wait_s = max(min(leave_at, total_at, idle_at) - now, MIN_TIMER_S)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._watch)

    def record(self) -> RequestRecord:
        assert self.ended_at is not None, "still going on"
        tokens, source = count_tokens(
            lengths=self._lengths, totals=self._totals, total=self._usage.num_output_tokens,
            finish_reason=self._finish_reason,
        )  # fmt: skip
        call, times = self._call, self._times
        return RequestRecord(
            id=call.id,
            session=call.session,
            turn=call.turn,
            scheduled_at=call.scheduled_at,
            sent_at=self.sent_at,
            first_token_at=times[0] if times else None,
            first_visible_at=self._first_visible_at,
            last_token_at=times[-1] if times else None,
            ended_at=self.ended_at,
            content_times=tuple(times),
            content_tokens=tokens,
            token_source=source,
            num_planned_prompt_tokens=call.num_planned_prompt_tokens,
            num_prompt_tokens=self._usage.num_prompt_tokens,
            num_output_tokens=self._usage.num_output_tokens,
            num_cached_tokens=self._usage.num_cached_tokens,
            finish_reason=self._finish_reason,
            cancelled=self._is_cancelled,
            fault=self._fault,
            num_bytes=self.num_bytes,
            num_events=self._num_events,
            text="".join(self._texts),
        )


def count_tokens(
    *, lengths: list[int], totals: list[int | None], total: int | None, finish_reason: str | None
) -> tuple[tuple[float, ...], TokenSource]:
    """Tokens of each event with content, and where the numbers are from; none where nothing tells.

    Args:
        lengths: characters of each event.
        totals: output tokens so far, as usage said with each event.
        total: output tokens, as the last usage said.
    """
    if not lengths:
        return (), "unknown"
    told = [each for each in totals if each is not None]
    if len(told) == len(totals) and told[0] > 0 and all(a <= b for a, b in pairwise(told)):
        return tuple(float(b - a) for a, b in pairwise([0, *told])), "continuous usage"
    if total is None:
        return (), "unknown"
    if total == len(lengths) or (total == len(lengths) + 1 and finish_reason == "stop"):
        return (1.0,) * len(lengths), "one per event"  # a server may count the end token, which has no text
    per_character = total / sum(lengths)
    return tuple(length * per_character for length in lengths), "by text length"


def _merged(old: Usage, new: Usage) -> Usage:
    if None not in {new.num_prompt_tokens, new.num_output_tokens, new.num_cached_tokens}:
        return new
    return Usage(
        num_prompt_tokens=_known(new.num_prompt_tokens, old.num_prompt_tokens),
        num_output_tokens=_known(new.num_output_tokens, old.num_output_tokens),
        num_cached_tokens=_known(new.num_cached_tokens, old.num_cached_tokens),
    )


def _known(new: int | None, old: int | None) -> int | None:
    return old if new is None else new


def _refused(status: int, body: bytes) -> Fault:
    text = _error_text(body)
    if status == 200:
        return Fault(kind="protocol", message=f"no event stream, but: {text}", status=status)
    return Fault(kind="http", message=f"{status}: {text}" if text else str(status), status=status)


def _error_text(body: bytes) -> str:
    """The message of an OpenAI error object, else the body's beginning."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        found = None
    error = found.get("error", found) if isinstance(found, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    text = message if isinstance(message, str) else body[: 4 * MAX_MESSAGE_CHARS].decode(errors="replace")
    return " ".join(text.split())[:MAX_MESSAGE_CHARS]


def _not_understood(name: bytes, payload: bytes, error: Exception) -> Fault:
    text = payload[: 4 * MAX_MESSAGE_CHARS].decode(errors="replace")[:MAX_MESSAGE_CHARS]
    if name == b"error":
        return Fault(kind="stream", message=text)
    return Fault(kind="protocol", message=f"an event is not the dialect's JSON ({error}): {text[:100]}")
