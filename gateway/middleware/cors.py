"""Lets web pages of named origins use the server. Off unless an origin was named."""

from aiohttp import web

from gateway.keys import CONFIG
from gateway.middleware import Handler

_METHODS = "GET, POST"
_HEADERS = "Authorization, Content-Type, X-Api-Key, X-Request-Id"
_EXPOSED = "X-Request-Id, Retry-After"
_PREFLIGHT_MAX_AGE_S = 600


@web.middleware
async def cors_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a preflight of an allowed origin: it never carries a key. All else passes."""
    is_preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
    if is_preflight and _allowed(request) is not None:
        return web.Response(
            status=204,
            headers={
                "Access-Control-Allow-Methods": _METHODS,
                "Access-Control-Allow-Headers": _HEADERS,
                "Access-Control-Max-Age": str(_PREFLIGHT_MAX_AGE_S),
            },
        )
    return await handler(request)


async def add_cors_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Called when a response's headers are about to leave, so that streams and errors have them too.

    Never `Access-Control-Allow-Credentials`: keys come in headers that pages set themselves, and a
    cookie of somebody's proxy must not be lent to a page.
    """
    if not request.app[CONFIG].cors_origins:
        return
    response.headers.add("Vary", "Origin")
    if (allowed := _allowed(request)) is not None:
        response.headers["Access-Control-Allow-Origin"] = allowed
        response.headers["Access-Control-Expose-Headers"] = _EXPOSED


def _allowed(request: web.Request) -> str | None:
    """The origin to name in the answer, if the request's own may read it. Compared whole, never by parts."""
    origins = request.app[CONFIG].cors_origins
    origin = request.headers.get("Origin")
    if origin is None:
        return None
    if "*" in origins:
        return "*"
    return origin if origin in origins else None
