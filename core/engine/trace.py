"""Steps and requests as a Chrome trace file, which Perfetto and chrome://tracing open.

    one process, one thread "steps": a slice per turn of the loop, in it schedule, execute and deliver,
    and in execute build, forward and sample
    one async track per request: from submission to end, in it queued, prefill, decode, stalled
    counters: blocks, requests, loop lag

The file is a JSON array with an event per line. Its closing bracket is written at an orderly end only; the
format allows it to be missing, so that what a killed server leaves behind opens too.
Source: "Trace Event Format" of the Chromium project: complete, async and counter events.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import BinaryIO

import msgspec
import structlog

from core.errors import ConfigError

MAX_TRACE_BYTES = 256 << 20
"""Then nothing more is written: some hours of a busy server, and what a browser still opens."""

FLUSH_EVERY_S = 0.5
"""A killed server loses no more than that."""

_STEPS_THREAD = 1
_PROCESS = 1

log = structlog.get_logger()


class Trace:
    """Events in memory until `run` has written them, away from the loop. Touched by the loop alone.

    Times are those of `time.monotonic`; the file's are microseconds since `epoch`.
    """

    def __init__(self, file: BinaryIO, *, epoch: float, max_bytes: int = MAX_TRACE_BYTES) -> None:
        self._file = file
        self._epoch = epoch
        self._max_bytes = max_bytes
        self._num_bytes = 2
        self._lines: list[bytes] = []
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tidegate-trace")  # one: in order
        self._encode = msgspec.json.Encoder().encode
        self.is_full = False
        file.write(b"[\n")
        for name, thread, title in (
            ("process_name", 0, "tidegate engine"),
            ("thread_name", _STEPS_THREAD, "steps"),
        ):
            self._add({"name": name, "ph": "M", "pid": _PROCESS, "tid": thread, "args": {"name": title}})

    def slice(
        self, name: str, began_at: float, *, ended_at: float, args: Mapping[str, object] | None = None
    ) -> None:
        """A slice of the steps' thread. One that lies within another's time is drawn below it."""
        event = self._event(name, "X", began_at)
        begin_us = self._us(began_at)
        event["dur"] = max(0, self._us(ended_at) - begin_us)
        if args is not None:
            event["args"] = args
        self._add(event)

    def begin(self, name: str, at: float, *, track: str, args: Mapping[str, object] | None = None) -> None:
        """Open a slice on a request's track; it lies inside those that are open there."""
        self._add_async(name, "b", at, track=track, args=args)

    def end(self, name: str, at: float, *, track: str, args: Mapping[str, object] | None = None) -> None:
        self._add_async(name, "e", at, track=track, args=args)

    def count(self, name: str, at: float, *, values: Mapping[str, float]) -> None:
        """A point of a counter's curves."""
        self._add({**self._event(name, "C", at), "args": values})

    async def run(self) -> None:
        """Write what has come, for ever."""
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            if lines := self._take():
                self._writer.submit(self._write, lines)

    def close(self) -> None:
        """Write the rest and the end of the array. Waits for the disk."""
        last = self._event("the trace is full" if self.is_full else "the engine has ended", "i", monotonic())
        self._writer.submit(self._write, self._take() + self._encode({**last, "s": "g"}) + b"\n]\n")
        self._writer.shutdown()
        with suppress(OSError):
            self._file.close()

    def _add_async(
        self, name: str, kind: str, at: float, *, track: str, args: Mapping[str, object] | None
    ) -> None:
        event = self._event(name, kind, at)
        event["cat"], event["id"] = "request", track
        if args is not None:
            event["args"] = args
        self._add(event)

    def _event(self, name: str, kind: str, at: float) -> dict[str, object]:
        return {"name": name, "ph": kind, "ts": self._us(at), "pid": _PROCESS, "tid": _STEPS_THREAD}

    def _us(self, at: float) -> int:
        return round((at - self._epoch) * 1e6)

    def _add(self, event: Mapping[str, object]) -> None:
        if self.is_full:
            return
        line = self._encode(event) + b",\n"
        if self._num_bytes + len(line) > self._max_bytes:
            self.is_full = True
            log.warning("trace_full", num_bytes=self._num_bytes)
            return
        self._num_bytes += len(line)
        self._lines.append(line)

    def _take(self) -> bytes:
        lines, self._lines = self._lines, []
        return b"".join(lines)

    def _write(self, lines: bytes) -> None:
        """A disk that is full ends the trace, not the service."""
        try:
            self._file.write(lines)
            self._file.flush()
        except OSError as error:
            if not self.is_full:
                log.warning("trace_not_written", error=str(error))
            self.is_full = True


@asynccontextmanager
async def open_trace(path: str) -> AsyncIterator[Trace | None]:
    """The trace in the file at `path`, which is overwritten; None without a path.

    Raises:
        ConfigError: the file cannot be written.
    """
    if not path:
        yield None
        return
    try:
        file = await asyncio.to_thread(Path(path).open, "wb")
    except OSError as error:
        raise ConfigError(f"trace is {path!r}; it cannot be written: {error.strerror}") from None
    trace = Trace(file, epoch=monotonic())
    try:
        yield trace
    finally:
        await asyncio.to_thread(trace.close)
