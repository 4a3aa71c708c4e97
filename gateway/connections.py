"""Connections: how many may be open, how slow and how full one may be, and what is said to broken HTTP.

Connections above the bound are told so and closed, without reaching a handler. aiohttp's own
protocol is refined where it would wait for ever, stop listening to a client that leaves, or speak
in another shape than ours.
"""

import asyncio
import uuid
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import structlog
from aiohttp import HttpVersion11, web

from gateway.errors import INTERNAL, ErrorReport
from gateway.middleware.errors import plain_body

KEEP_ALIVE_TIMEOUT_S = 75.0
HEADER_TIMEOUT_S = 15.0
"""From a connection's opening to its first request; from the first byte of a later one to its last header."""
MAX_HEADERS = 128
MAX_HEADER_BYTES = 8190
"""Of the request line and of each header; a connection that sends more is closed, with 400."""
MAX_PIPELINED = 16
"""Requests that may wait behind the one being answered. They are answered in order, one at a time."""

_MAX_DISCARDED_BYTES = 1 << 20
_MAX_LINGERING = 64
_LINGER_S = 1.0

_log = structlog.get_logger("gateway.connections")

_BAD_HTTP = ErrorReport(
    status=HTTPStatus.BAD_REQUEST,
    type="invalid_request_error",
    code="bad_http",
    message="this is not a request that HTTP allows, or its headers are too large",
)
_BAD_EXPECTATION = ErrorReport(
    status=HTTPStatus.EXPECTATION_FAILED,
    type="invalid_request_error",
    code="expectation_failed",
    message="of the header Expect only 100-continue is known",
)
_SLOW_HEADERS = ErrorReport(
    status=HTTPStatus.REQUEST_TIMEOUT,
    type="invalid_request_error",
    code="headers_too_slow",
    message="the headers of the request did not arrive in time",
)
_TOO_MANY = ErrorReport(
    status=HTTPStatus.SERVICE_UNAVAILABLE,
    type="rate_limit_error",
    code="too_many_connections",
    message="too many open connections",
    retry_after_s=1,
)


def _raw(report: ErrorReport) -> bytes:
    """A whole response, where no request was read that could be answered."""
    body = plain_body(report)
    retry = "" if report.retry_after_s is None else f"Retry-After: {report.retry_after_s}\r\n"
    head = (
        f"HTTP/1.1 {report.status} {HTTPStatus(report.status).phrase}\r\nContent-Type: application/json\r\n"
        f"Server: tidegate\r\nX-Request-Id: {uuid.uuid4().hex}\r\n{retry}"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Refusal(asyncio.Protocol):
    """Says no and listens a moment longer: closed on unread bytes, TCP takes back what was said."""

    def __init__(self, lingering: "set[_Refusal]") -> None:
        self._lingering = lingering
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connection = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        connection.write(_raw(_TOO_MANY))
        if len(self._lingering) >= _MAX_LINGERING:
            connection.close()
            return
        self._lingering.add(self)
        connection.write_eof()
        self._timer = asyncio.get_running_loop().call_later(_LINGER_S, connection.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lingering.discard(self)
        if self._timer is not None:
            self._timer.cancel()


class _Connection(web.RequestHandler):
    """aiohttp's own, with a deadline for headers, an ear for who leaves, and our words."""

    __slots__ = ("_deadline", "_has_begun", "_num_discarded")

    def __init__(self, server: web.Server, **options: Any) -> None:
        super().__init__(server, **options)
        self._deadline: asyncio.TimerHandle | None = None
        """Runs while headers are awaited."""
        self._has_begun = False
        """Bytes of those headers have come."""
        self._num_discarded = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._close:
            self._discard(len(data))
            return
        super().data_received(data)
        if self._messages:
            self._disarm()
        elif data and (self._waiter is not None or self._deadline is not None):
            self._has_begun = True
            if self._deadline is None:
                self._arm()
        # In each case aiohttp has stopped reading, or soon would, and would not see a client leave.
        num_behind = self._num_behind()
        if num_behind > MAX_PIPELINED or self._buffer_paused or (num_behind and self._reading_paused):
            self._stop_taking_requests()

    def _num_behind(self) -> int:
        """Requests read that wait for another one's answer."""
        is_next_for_handler = self._waiter is not None or self._request_count == len(self._messages)
        return max(0, len(self._messages) - is_next_for_handler)

    def _stop_taking_requests(self) -> None:
        """Close after the answer on its way; until then read and drop, so that leaving is noticed."""
        _log.info("pipelined_too_much", num_waiting=len(self._messages))
        self.close()
        self._message_tail = b""
        self._buffer_paused = self._reading_paused = False
        self._resume_transport_reading()

    def _discard(self, num_bytes: int) -> None:
        self._num_discarded += num_bytes
        if self._num_discarded > _MAX_DISCARDED_BYTES and self.transport is not None:
            self.transport.abort()

    def _arm(self) -> None:
        self._deadline = self._loop.call_later(HEADER_TIMEOUT_S, self._give_up)

    def _disarm(self) -> None:
        self._has_begun = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        """Who sent nothing at all is not spoken to: its next request could take it for the answer."""
        self._deadline = None
        if self._has_begun and self.transport is not None:
            self.transport.write(_raw(_SLOW_HEADERS))
        self.force_close()

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
        if status < HTTPStatus.INTERNAL_SERVER_ERROR:
            return _answer(request, _BAD_HTTP)
        _log.error("request_failed", exc_info=exc)  # outside the middleware that catches everything
        return _answer(request, INTERNAL)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Refusals of aiohttp that come before any middleware get our shape."""
        if isinstance(resp, web.HTTPExpectationFailed):
            resp = _answer(request, _BAD_EXPECTATION)
        return await super().finish_response(request, resp, start_time)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """A body that breaks off after its answer is a client's matter: a line, no traceback."""
        error = kw.get("exc_info")
        if isinstance(error, web.RequestPayloadError | ConnectionError):
            _log.debug("body_broke_off", error=type(error).__name__)
        else:
            super().log_exception(*args, **kw)


def _answer(request: web.BaseRequest, report: ErrorReport) -> web.Response:
    request_id = uuid.uuid4().hex
    _log.info("request_refused", request_id=request_id, status=int(report.status), code=report.code)
    request._version = HttpVersion11  # noqa: SLF001  # aiohttp takes what it could not read for 1.0
    response = web.Response(
        status=report.status,
        body=plain_body(report),
        content_type="application/json",
        headers={"Server": "tidegate", "X-Request-Id": request_id},
    )
    response.force_close()
    return response


def limit_connections(server: web.Server, *, max_connections: int) -> Callable[[], asyncio.BaseProtocol]:
    """Return a protocol factory for `create_server`."""
    loop = asyncio.get_running_loop()
    lingering: set[_Refusal] = set()

    def make_protocol() -> asyncio.BaseProtocol:
        if len(server.connections) >= max_connections:
            return _Refusal(lingering)
        return _Connection(
            server,
            loop=loop,
            access_log=None,  # aiohttp's way of having none; ours is a middleware
            keepalive_timeout=KEEP_ALIVE_TIMEOUT_S,
            auto_decompress=False,  # compressed bodies are refused, not unpacked
            max_headers=MAX_HEADERS,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
        )

    return make_protocol
