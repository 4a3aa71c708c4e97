"""Every exception the gateway raises for clients' mistakes or bad luck, and what each looks like on the wire.

    GatewayError
    ├── InvalidRequest           a body or field the server cannot honour; `param` is its path
    │   ├── BodyTooLarge
    │   ├── BodyTooSlow
    │   └── UnsupportedMedia     a content type or encoding of the request body
    ├── ModelNotFound
    ├── RouteNotFound
    ├── RequestNotFound          asked about a request that is not known, or another tenant's
    ├── MethodNotAllowed
    ├── Unauthorized             no API key, or a wrong one
    ├── Overloaded               as many requests as the server takes are in it
    │   └── BodiesOverloaded     as many bytes of bodies as it takes are being read
    ├── Draining                 the server is stopping
    ├── NotReady                 the model is still loading
    ├── GenerationFailed         a backend's `Failed` event before the first byte
    └── SlowReader               a client that does not read; its connection is gone

`describe()` turns these and the engine's own errors into an `ErrorReport` through one table.
"""

from http import HTTPStatus
from typing import ClassVar

import msgspec

from core import EngineDraining, EngineError, EngineFailed, RequestTooLong
from gateway.events import Failed
from tokenization import BadText, NoChatTemplate, TemplateError, TokenizationError


class GatewayError(Exception):
    """The root. `code` is stable and meant for machines; `str()` is meant for people."""

    code: ClassVar[str] = "gateway_error"
    param: str | None = None


class InvalidRequest(GatewayError):
    """A request the server cannot honour."""

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.reason = code or self.code


class BodyTooLarge(InvalidRequest):
    code = "body_too_large"

    def __init__(self, *, max_body_bytes: int) -> None:
        super().__init__(f"the request body is larger than {max_body_bytes} bytes")


class BodyTooSlow(InvalidRequest):
    code = "body_too_slow"

    def __init__(self, *, timeout_s: float, is_stalled: bool = False) -> None:
        super().__init__(
            f"nothing of the request body came for {timeout_s:g} s"
            if is_stalled
            else f"the request body did not arrive within {timeout_s:g} s"
        )


class UnsupportedMedia(InvalidRequest):
    code = "unsupported_media"


class ModelNotFound(GatewayError):
    """No backend serves that model; the message lists what is served."""

    code = "model_not_found"
    param = "model"

    def __init__(self, model: str, *, served: tuple[str, ...], aliases: tuple[str, ...] = ()) -> None:
        also = f", also as {', '.join(aliases)}" if aliases else ""
        super().__init__(
            f"the model {model[:128]!r} does not exist here; served: {', '.join(served) or 'none'}{also}; "
            "`tidegate serve --alias NAME` adds a name"
        )


class RouteNotFound(GatewayError):
    code = "route_not_found"


class RequestNotFound(GatewayError):
    """The same words whether it never was, is forgotten or belongs to somebody else."""

    code = "request_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"no request {name[:128]!r} is known here; the newest 1024 are, by answer's id or X-Request-Id"
        )


class MethodNotAllowed(GatewayError):
    code = "method_not_allowed"

    def __init__(self, message: str, *, allowed: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allowed = allowed


class Unauthorized(GatewayError):
    """Says whether a key was given, and nothing of it."""

    code = "invalid_api_key"

    def __init__(self, *, was_given: bool) -> None:
        super().__init__(
            "the API key is not known here"
            if was_given
            else "an API key is needed: send the header `Authorization: Bearer KEY` or `x-api-key: KEY`"
        )


class Overloaded(GatewayError):
    code = "overloaded"

    def __init__(self, *, num_admitted: int, retry_after_s: int = 1) -> None:
        super().__init__(
            f"the server is busy with {num_admitted} requests, as many as it takes; try again soon"
        )
        self.retry_after_s = retry_after_s


class BodiesOverloaded(Overloaded):
    """Bodies that are being read take all the room there is for them."""

    def __init__(self, *, num_bytes: int) -> None:
        GatewayError.__init__(
            self,
            f"the server is reading large request bodies, {num_bytes} bytes so far and no more at once; "
            "try again soon",
        )
        self.retry_after_s = 1


class Draining(GatewayError):
    code = "draining"

    def __init__(self) -> None:
        super().__init__("the server is shutting down and takes no new requests")


class NotReady(GatewayError):
    code = "not_ready"

    def __init__(self) -> None:
        super().__init__("the model is still loading")


class GenerationFailed(GatewayError):
    """Carries a `Failed` event to the error middleware while a status can still be sent."""

    code = "generation_failed"

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


class SlowReader(GatewayError):
    code = "slow_reader"

    def __init__(self, *, timeout_s: float) -> None:
        super().__init__(f"the client read nothing for {timeout_s:g} s")


class ErrorReport(msgspec.Struct, frozen=True, kw_only=True):
    """An error as a client sees it, before a dialect gives it its shape."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None
    allowed: tuple[str, ...] = ()


class _Row(msgspec.Struct, frozen=True):
    status: HTTPStatus
    type: str
    retry_after_s: int | None = None


_BAD_REQUEST = _Row(HTTPStatus.BAD_REQUEST, "invalid_request_error")
_FAILED = _Row(HTTPStatus.INTERNAL_SERVER_ERROR, "server_error")

TABLE: dict[type[Exception], _Row] = {
    InvalidRequest: _BAD_REQUEST,
    BodyTooLarge: _Row(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "invalid_request_error"),
    BodyTooSlow: _Row(HTTPStatus.REQUEST_TIMEOUT, "invalid_request_error"),
    UnsupportedMedia: _Row(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "invalid_request_error"),
    ModelNotFound: _Row(HTTPStatus.NOT_FOUND, "invalid_request_error"),
    RouteNotFound: _Row(HTTPStatus.NOT_FOUND, "invalid_request_error"),
    RequestNotFound: _Row(HTTPStatus.NOT_FOUND, "invalid_request_error"),
    MethodNotAllowed: _Row(HTTPStatus.METHOD_NOT_ALLOWED, "invalid_request_error"),
    Unauthorized: _Row(HTTPStatus.UNAUTHORIZED, "invalid_request_error"),
    Overloaded: _Row(HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error", 1),
    Draining: _Row(HTTPStatus.SERVICE_UNAVAILABLE, "server_error", 5),
    NotReady: _Row(HTTPStatus.SERVICE_UNAVAILABLE, "server_error", 2),
    GenerationFailed: _FAILED,
    SlowReader: _Row(HTTPStatus.REQUEST_TIMEOUT, "invalid_request_error"),
    RequestTooLong: _BAD_REQUEST,
    EngineDraining: _Row(HTTPStatus.SERVICE_UNAVAILABLE, "server_error", 5),
    EngineFailed: _Row(HTTPStatus.SERVICE_UNAVAILABLE, "server_error"),  # no Retry-After: it stays so
    EngineError: _FAILED,
    BadText: _BAD_REQUEST,
    NoChatTemplate: _BAD_REQUEST,
    TemplateError: _BAD_REQUEST,
}

INTERNAL = ErrorReport(
    status=HTTPStatus.INTERNAL_SERVER_ERROR,
    type="server_error",
    code="internal_error",
    message="the server failed while handling this request; its log says more under the request id",
)

_ENGINE_FAILED = "the engine has failed for good; nothing is served until somebody starts the server anew"
"""What failed is for the log and the probes."""


def describe(error: Exception) -> ErrorReport:
    """Return what a client may know of `error`; for an error of no known type that is `INTERNAL`."""
    if isinstance(error, GenerationFailed):
        return describe_failed(error.failed)
    row = next((TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), None)
    if row is None:
        return INTERNAL
    assert isinstance(error, GatewayError | EngineError | TokenizationError), "the table holds only these"
    return ErrorReport(
        status=row.status,
        type=row.type,
        code=error.reason if isinstance(error, InvalidRequest) else error.code,
        message=_ENGINE_FAILED if isinstance(error, EngineFailed) else str(error),
        param=_param(error),
        retry_after_s=error.retry_after_s if isinstance(error, Overloaded) else row.retry_after_s,
        allowed=error.allowed if isinstance(error, MethodNotAllowed) else (),
    )


def describe_failed(failed: Failed) -> ErrorReport:
    """Return what a client sees of a generation that broke off: the row of its code."""
    row = next((row for kind, row in TABLE.items() if getattr(kind, "code", None) == failed.code), _FAILED)
    return ErrorReport(
        status=row.status,
        type=row.type,
        code=failed.code,
        message=failed.message,
        retry_after_s=row.retry_after_s,
    )


def _param(error: GatewayError | EngineError | TokenizationError) -> str | None:
    match error:
        case GatewayError():
            return error.param
        case BadText():
            return error.path
        case RequestTooLong() | TemplateError():
            return "messages"
        case _:
            return None
