"""Where the time of a request went: of one that is named, and of all that are in the server now."""

from collections.abc import Mapping

import msgspec
from aiohttp import web

from gateway.errors import RequestNotFound
from gateway.keys import BACKENDS, KNOWN_REQUESTS, RECORD


async def explain(http: web.Request) -> web.Response:
    """One request, choice by choice. Times in seconds.

    Raises:
        RequestNotFound: it is not among the newest, or another tenant's.
    """
    name, tenant = http.match_info["request_id"], http[RECORD].tenant
    request_id = http.app[KNOWN_REQUESTS].find(name, tenant=tenant)
    if request_id is None:
        raise RequestNotFound(name)
    choices = [each for backend in http.app[BACKENDS].all() for each in backend.explain(request_id)]
    if not choices:
        raise RequestNotFound(name)
    return _json({"id": request_id, "object": "explanation", "choices": choices})


async def list_live(http: web.Request) -> web.Response:
    """The tenant's requests that are waiting or running, oldest first."""
    known, tenant = http.app[KNOWN_REQUESTS], http[RECORD].tenant
    live = [
        each
        for backend in http.app[BACKENDS].all()
        for each in backend.live_requests()
        if known.belongs(str(each["request_id"]), tenant=tenant)
    ]
    return _json({"object": "list", "data": live})


def _json(value: Mapping[str, object]) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
