"""Gives each request an id of our own and tells it to the client."""

import re
import uuid

from aiohttp import web

from gateway.keys import RECORD
from gateway.middleware import Handler
from gateway.telemetry.request_record import RequestRecord

HEADER = "X-Request-Id"
_SAFE = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")


@web.middleware
async def request_id_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Start the request's record. The client's id is kept only if it is safe to log and to send back."""
    theirs = request.headers.get(HEADER, "")
    request[RECORD] = RequestRecord(
        request_id=uuid.uuid4().hex, client_request_id=theirs if _SAFE.fullmatch(theirs) else None
    )
    return await handler(request)


async def add_standard_headers(http: web.Request, response: web.StreamResponse) -> None:
    """Called when a response's headers are about to leave, so that streams have the id too."""
    response.headers["Server"] = "tidegate"  # and not the versions beneath it
    if record := http.get(RECORD):
        response.headers[HEADER] = record.client_request_id or record.request_id
