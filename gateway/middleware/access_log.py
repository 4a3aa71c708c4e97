"""One log line per request, when it is over."""

import structlog
from aiohttp import web

from gateway.keys import RECORD
from gateway.middleware import Handler

_log = structlog.get_logger("gateway.access")
_QUIET_PATHS = frozenset({"/livez", "/readyz", "/health", "/metrics", "/v1/explain"})


@web.middleware
async def access_log_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Log also what was cancelled because its client left: then there is no status."""
    record = request[RECORD]
    status: int | None = None
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        log = _log.debug if request.path in _QUIET_PATHS else _log.info
        log(
            "request_ended",
            request_id=record.request_id,
            client_request_id=record.client_request_id,
            method=request.method,
            path=request.path[:256],
            status=status,
            duration_s=round(record.age_s, 6),
            **record.fields,
        )
