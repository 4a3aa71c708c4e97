"""One answer of the mock on its way: the script's steps, each written at its time."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from loadtest.mock.connection import STREAM_END, STREAM_HEAD, Connection, Reply
from loadtest.mock.memory import PrefixMemory
from loadtest.mock.script import CREATED, WORD, MockOptions, Prompt, Script, Step
from loadtest.mock.ticker import Ticker

PIECE_GAP_S = 0.001


class Seen(msgspec.Struct, kw_only=True):
    """One request as the mock saw it, on the clock of `time.monotonic()`, which processes share."""

    at: float
    started_at: float | None = None
    """Its turn came, where `max_running` made it wait."""
    ended_at: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_sent_tokens: int = 0
    is_queued: bool = False
    is_cancelled: bool = False
    """The client left before the end."""


class Host(Protocol):
    """The server, as far as a stream knows it."""

    options: MockOptions
    ticker: Ticker
    memory: PrefixMemory

    def due_at(self, started_at: float, offset_s: float) -> float: ...

    def count_event(self) -> None: ...

    def release_turn(self) -> None: ...

    def leave_queue(self, start: Callable[[], None]) -> None: ...


class Stream:
    """From its turn to its end. Either end gives the turn back exactly once."""

    def __init__(
        self, host: Host, connection: Connection, *, prompt: Prompt, seen: Seen, fails: bool, request_id: str
    ) -> None:
        self._host = host
        self._connection = connection
        self._prompt = prompt
        self._seen = seen
        self._fails = fails
        self._request_id = request_id
        self._started_at = 0.0
        self._steps: Iterator[Step] = iter(())
        self._next: Step | None = None
        self._pieces: deque[bytes] = deque()
        self._is_over = False

    def start(self) -> None:
        """Its turn has come."""
        self._started_at = time.monotonic() if self._seen.is_queued else self._seen.at
        self._seen.started_at = self._started_at
        num_cached = self._num_cached()
        self._seen.num_cached_tokens = num_cached
        options, prompt = self._host.options, self._prompt
        script = Script(options, prompt, request_id=self._request_id, num_cached=num_cached)
        if not prompt.streams:
            whole = script.whole_answer()
            self._call_at(whole.offset_s, lambda: self._reply(whole))
            return
        self._connection.write(STREAM_HEAD)
        self._steps = script.steps(fails=self._fails)
        self._set_next()

    def client_left(self) -> None:
        if self._is_over:
            return
        self._seen.is_cancelled = True
        if self._seen.started_at is None:
            self._is_over = True
            self._seen.ended_at = time.monotonic()
            self._host.leave_queue(self.start)
        else:
            self._end()

    def _num_cached(self) -> int:
        match self._host.options.cached:
            case "honest":
                return self._host.memory.num_cached(self._prompt.words)
            case "warm":
                return max(0, len(self._prompt.words) - 1)
        return 0

    def _call_at(self, offset_s: float, call: Callable[[], None]) -> None:
        self._host.ticker.call_at(self._host.due_at(self._started_at, offset_s), call)

    def _set_next(self) -> None:
        self._next = next(self._steps, None)
        if self._next is not None:
            self._call_at(self._next.offset_s, self._write_due)

    def _write_due(self) -> None:
        """One write for all steps of one moment."""
        step = self._next
        if self._is_over or step is None:
            return
        due_s, data = step.offset_s, b""
        while True:
            data += step.data
            if step.num_tokens:
                self._count(step.num_tokens)
            if step.then != "go on":
                break
            following = next(self._steps, None)
            assert following is not None, "a script says how it ends"
            step = following
            if step.offset_s > due_s:
                break
        self._next = step
        is_last = step.then != "go on" and step.offset_s <= due_s
        self._write(data, then=step.then if is_last else "go on")

    def _write(self, data: bytes, *, then: str) -> None:
        if self._host.options.stamp:
            data = data.replace(CREATED, b'"created":%.6f,' % time.monotonic())
        framed = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        if then == "end":
            framed += STREAM_END
        size = self._host.options.piece_bytes
        if size is not None and len(framed) > size:
            self._pieces.extend(framed[start : start + size] for start in range(0, len(framed), size))
            self._write_piece(then)
            return
        if framed:
            self._connection.write(framed)
        self._go_on(then)

    def _write_piece(self, then: str) -> None:
        if self._is_over:
            return
        self._connection.write(self._pieces.popleft())
        if self._pieces:
            self._host.ticker.call_at(time.monotonic() + PIECE_GAP_S, lambda: self._write_piece(then))
        else:
            self._go_on(then)

    def _go_on(self, then: str) -> None:
        match then:
            case "go on":
                assert self._next is not None, "nothing comes next"
                self._call_at(self._next.offset_s, self._write_due)
            case "end":
                self._remember(self._prompt.words + [WORD.strip()] * self._prompt.max_tokens)
                self._end()
                self._connection.finish()
            case "cut":
                self._end()
                self._connection.close()
            case _:
                assert then == "hang", then  # the client ends it, if anybody

    def _reply(self, whole: Step) -> None:
        if self._is_over:
            return
        self._count(whole.num_tokens)
        self._end()
        self._connection.reply(Reply(body=msgspec.Raw(whole.data)))

    def _count(self, num_tokens: int) -> None:
        if not self._seen.num_sent_tokens:
            self._remember(self._prompt.words)  # computed by now, not before
        self._seen.num_sent_tokens += num_tokens
        self._host.count_event()

    def _remember(self, words: list[str]) -> None:
        if self._host.options.cached == "honest":
            self._host.memory.add(words)

    def _end(self) -> None:
        assert not self._is_over, "ended twice"
        self._is_over = True
        self._seen.ended_at = time.monotonic()
        self._host.release_turn()
