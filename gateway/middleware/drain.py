"""While the server drains: connections are not kept, so that clients find another server."""

from aiohttp import web

from gateway.keys import LIFECYCLE
from gateway.lifecycle import Phase
from gateway.middleware import Handler


@web.middleware
async def drain_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Close each connection after its answer. Refusing is admission's work, answers are not touched."""
    response = await handler(request)
    if request.app[LIFECYCLE].phase is Phase.DRAINING and not response.prepared:
        response.force_close()
    return response
