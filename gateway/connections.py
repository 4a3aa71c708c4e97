"""A bound on open connections: the ones above it are told so and closed, without reaching a handler."""

import asyncio
from collections.abc import Callable

from aiohttp import web

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


def limit_connections(server: web.Server, *, max_connections: int) -> Callable[[], asyncio.BaseProtocol]:
    """Return a protocol factory for `create_server`."""

    def make_protocol() -> asyncio.BaseProtocol:
        if len(server.connections) >= max_connections:
            return _Refusal()
        return server()

    return make_protocol
