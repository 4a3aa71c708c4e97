"""A server that says exactly the bytes a test gives it: what no well-behaved server would say."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
"""Called with each request, head and body, and where to write."""

EVENT_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
WHOLE = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n'


async def until(condition: Callable[[], object]) -> None:
    """The loop goes round until it holds; the test's own timeout is the bound."""
    while not condition():  # noqa: ASYNC110 - what is waited for sets no event
        await asyncio.sleep(0)


def sized(body: bytes, *, head: bytes = EVENT_HEAD) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def says(*pieces: bytes, closes: bool = False) -> Answer:
    """The same answer to every request, piece by piece."""

    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if closes:
            writer.close()

    return answer


class RawServer:
    def __init__(self) -> None:
        self.url = ""
        self.requests: list[bytes] = []
        self.num_connections = 0


@contextlib.asynccontextmanager
async def raw_server(answer: Answer, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[RawServer]:
    server = RawServer()
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.num_connections += 1
        writers.append(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0] or 0)
                request = head + await reader.readexactly(size)
                server.requests.append(request)
                await answer(request, writer)

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    host, port = listener.sockets[0].getsockname()
    server.url = f"{'https' if tls else 'http'}://{host}:{port}"
    try:
        yield server
    finally:
        listener.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)
