"""Connections: how many may be open, and what is said where HTTP itself is broken.

Connections above the bound are told so and closed, without reaching a handler.
"""

import asyncio
from collections.abc import Callable

import structlog
from aiohttp import web

KEEP_ALIVE_TIMEOUT_S = 75.0
MAX_HEADERS = 128
MAX_HEADER_BYTES = 8190
"""Of the request line and of each header; a connection that sends more is closed, with 400."""

_log = structlog.get_logger("gateway.connections")

_NOT_HTTP = (
    b'{"error":{"message":"this is not a request that HTTP allows, or its headers are too large",'
    b'"type":"invalid_request_error","param":null,"code":"bad_http"}}'
)
_BODY = (
    b'{"error":{"message":"too many open connections","type":"rate_limit_error",'
    b'"param":null,"code":"too_many_connections"}}'
)
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(_BODY)
) + _BODY


class _Refusal(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(_REFUSAL)
        transport.close()


class _Connection(web.RequestHandler):
    """aiohttp's own, but for what it says to those who do not speak HTTP."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """In our shape, without echoing what came, naming versions or filling the log."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already; there is no saying anything else")
        _log.debug("not_http", status=status, error=type(exc).__name__)
        response = web.Response(
            status=status, body=_NOT_HTTP, content_type="application/json", headers={"Server": "tidegate"}
        )
        response.force_close()
        return response


def limit_connections(server: web.Server, *, max_connections: int) -> Callable[[], asyncio.BaseProtocol]:
    """Return a protocol factory for `create_server`."""

    loop = asyncio.get_running_loop()

    def make_protocol() -> asyncio.BaseProtocol:
        if len(server.connections) >= max_connections:
            return _Refusal()
        return _Connection(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # aiohttp's way of having none; ours is a middleware
            keepalive_timeout=KEEP_ALIVE_TIMEOUT_S,
            auto_decompress=False,  # compressed bodies are refused, not unpacked
            max_headers=MAX_HEADERS,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
        )

    return make_protocol
