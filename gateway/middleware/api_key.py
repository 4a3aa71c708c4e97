"""Lets in who has a key. Deny by default: what is open to everybody is listed here, route by route."""

import re

from aiohttp import web

from gateway.api_keys import ApiKeys
from gateway.errors import Unauthorized
from gateway.keys import API_KEYS, RECORD
from gateway.middleware import Handler

PUBLIC = frozenset({("GET", "/livez"), ("GET", "/readyz"), ("GET", "/health")})
"""Probes. `/metrics` needs a key as well: it tells how busy the server is, and with what."""

_BEARER = re.compile(r"[Bb][Ee][Aa][Rr][Ee][Rr] +(\S+) *")


@web.middleware
async def api_key_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Find the tenant, or refuse before the body is read. Paths without a route are closed too.

    Raises:
        Unauthorized: no key, or a wrong one.
    """
    keys = request.app[API_KEYS]
    if keys is not None and not _is_public(request):
        record = request[RECORD]
        record.tenant = _tenant(request, keys)
        record.fields["tenant"] = record.tenant
    return await handler(request)


def _is_public(request: web.Request) -> bool:
    """By the route that was found, not by the path: a path can be written in many ways."""
    resource = request.match_info.route.resource
    method = "GET" if request.method == "HEAD" else request.method
    return resource is not None and (method, resource.canonical) in PUBLIC


def _tenant(request: web.Request, keys: ApiKeys) -> str:
    key = _presented_key(request)
    if key is None:
        raise Unauthorized(was_given=False)
    tenant = keys.tenant_of(key)
    if tenant is None:
        raise Unauthorized(was_given=True)
    return tenant


def _presented_key(request: web.Request) -> str | None:
    """The key of `Authorization: Bearer KEY`, or else of `x-api-key: KEY`. A header given twice is none."""
    bearers = request.headers.getall("Authorization", [])
    if len(bearers) == 1 and (found := _BEARER.fullmatch(bearers[0])):
        return found[1]
    others = request.headers.getall("X-Api-Key", [])
    return others[0].strip() if len(others) == 1 else None
