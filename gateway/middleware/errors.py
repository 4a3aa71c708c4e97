"""Turns every exception into what a client may see of it: a status, or a stream's last event."""

from http import HTTPStatus

import msgspec
import structlog
from aiohttp import web

from gateway.errors import (
    INTERNAL,
    BodyTooLarge,
    ErrorReport,
    InvalidRequest,
    MethodNotAllowed,
    RouteNotFound,
    describe,
)
from gateway.keys import CONFIG, DIALECT, RECORD, STREAM
from gateway.middleware import Handler
from gateway.sse import EventStream

_log = structlog.get_logger("gateway.errors")


@web.middleware
async def errors_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The one place of the gateway where any exception is caught. Cancellation passes."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _respond(request, describe(_named(request, error)))
    except Exception as error:
        stream: EventStream | None = request.get(STREAM)
        if request.transport is None or request.transport.is_closing():
            request[RECORD].fields.setdefault("outcome", "client_gone")
            # Nobody reads this: aiohttp tries to write it, finds no connection and stops.
            return web.Response(status=499) if stream is None else stream.response
        report = describe(error)
        request[RECORD].fields.setdefault("outcome", report.code)
        if report is INTERNAL:
            _log.exception("request_failed", request_id=request[RECORD].request_id, path=request.path[:256])
        if stream is None or not stream.started:
            return _respond(request, report)
        await stream.fail(report)
        return stream.response


def _named(http: web.Request, error: web.HTTPException) -> Exception:
    """aiohttp's own refusals, as ours."""
    match error:
        case web.HTTPRequestEntityTooLarge():
            return BodyTooLarge(max_body_bytes=http.app[CONFIG].max_body_bytes)
        case web.HTTPNotFound():
            return RouteNotFound(
                f"there is no route {http.path[:128]!r}; the API is under /v1, as /v1/models and "
                "/v1/chat/completions, and the probes are /livez and /readyz"
            )
        case web.HTTPMethodNotAllowed():
            allowed = tuple(sorted(error.allowed_methods))
            return MethodNotAllowed(
                f"{http.path[:128]} takes {', '.join(allowed)}, not {http.method}", allowed=allowed
            )
        case _:
            return InvalidRequest(error.reason)


def _respond(http: web.Request, report: ErrorReport) -> web.Response:
    headers = {}
    if report.retry_after_s is not None:
        headers["Retry-After"] = str(report.retry_after_s)
    if report.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = 'Bearer realm="tidegate"'
    if report.allowed:
        headers["Allow"] = ", ".join(report.allowed)
    dialect = http.get(DIALECT)
    return web.Response(
        status=report.status,
        body=plain_body(report) if dialect is None else dialect.error(report),
        content_type="application/json",
        headers=headers,
    )


def plain_body(report: ErrorReport) -> bytes:
    """For routes of no dialect: the shape that most clients know."""
    return msgspec.json.encode(
        {
            "error": {
                "message": report.message,
                "type": report.type,
                "param": report.param,
                "code": report.code,
            }
        }
    )
