"""Server-sent events to one client: a bounded buffer, a deadline for slow readers, comments in silence."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web
from aiohttp.http import StreamWriter

from gateway.dialects import AnswerWriter
from gateway.errors import ErrorReport, SlowReader
from gateway.events import Event

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold the answer back until it is whole
}
COMMENT = b": keep-alive\n\n"


class EventStream:
    """One response on its way to one client.

    At most `buffer_bytes` and one event wait in the process for a reader; then `send()` waits for
    the reader, and after `send_timeout_s` its connection is cut. Nobody else notices.
    """

    def __init__(
        self, http: web.Request, *, answer: AnswerWriter, send_timeout_s: float, buffer_bytes: int
    ) -> None:
        self.response = web.StreamResponse(headers=SSE_HEADERS)
        self._http = http
        self._answer = answer
        self._send_timeout_s = send_timeout_s
        self._buffer_bytes = buffer_bytes
        self._now = asyncio.get_running_loop().time
        self._last_sent_s = self._now()
        assert isinstance(http.writer, StreamWriter), "aiohttp's own writer can write without waiting"
        self._writer = http.writer

    @property
    def started(self) -> bool:
        """Whether the status line is out, so that an error can only be the last event."""
        return self.response.prepared

    @property
    def silent_s(self) -> float:
        """Seconds since anything was sent."""
        return self._now() - self._last_sent_s

    async def start(self) -> None:
        if self._http.transport is not None:
            self._http.transport.set_write_buffer_limits(high=self._buffer_bytes)
        await self.response.prepare(self._http)

    async def send(self, event: Event) -> None:
        """Write one event.

        Raises:
            SlowReader: the client read too little for too long; its connection is gone.
            ConnectionResetError: the client is gone.
        """
        await self._write(self._answer.chunk(event))

    async def fail(self, report: ErrorReport) -> None:
        """End a stream that broke off. A client that is gone by now learns nothing, and nobody else cares."""
        try:
            await self._write(self._answer.error(report))
            await self.finish()
        except (ConnectionError, SlowReader):
            return

    async def _write(self, chunk: bytes) -> None:
        if not chunk:
            return
        self._last_sent_s = self._now()
        await self._writer.write(chunk, drain=False)
        if self._http.protocol.writing_paused:
            await self._wait_for_reader()

    async def send_comment(self) -> None:
        """Say that the server is alive. Never waits: a client that does not read needs no comment."""
        protocol = self._http.protocol
        if self.started and protocol.connected and not protocol.writing_paused:
            self._last_sent_s = self._now()
            await self._writer.write(COMMENT, drain=False)

    async def finish(self) -> None:
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await self.response.write_eof()
        except TimeoutError:
            self._cut()

    async def _wait_for_reader(self) -> None:
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await self._writer.drain()
        except TimeoutError:
            self._cut()

    def _cut(self) -> None:
        if self._http.transport is not None:
            self._http.transport.abort()
        raise SlowReader(timeout_s=self._send_timeout_s) from None


class KeepAlive:
    """Sends a comment on every watched stream that was silent for `every_s`: one timer for all of them."""

    def __init__(self, *, every_s: float) -> None:
        self._every_s = every_s
        self._streams: set[EventStream] = set()

    @contextmanager
    def watching(self, stream: EventStream) -> Iterator[None]:
        self._streams.add(stream)
        try:
            yield
        finally:
            self._streams.discard(stream)

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    async def run(self) -> None:
        """Run for ever. A comment comes at most a quarter of `every_s` late."""
        while True:
            await asyncio.sleep(self._every_s / 4)
            for stream in tuple(self._streams):
                if stream in self._streams and stream.silent_s >= self._every_s:
                    await stream.send_comment()
