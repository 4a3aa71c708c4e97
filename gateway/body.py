"""The body of a request: bounded in bytes and in time, plain JSON, never unpacked."""

import asyncio

from aiohttp import web

from gateway.errors import BodyTooLarge, BodyTooSlow, InvalidRequest, UnsupportedMedia
from gateway.keys import CONFIG

BODY_TIMEOUT_S = 60.0


def declared_bytes(http: web.Request) -> int:
    """How large the body will be; as large as it may be if it does not say."""
    limit = http.app[CONFIG].max_body_bytes
    return limit if http.content_length is None else min(http.content_length, limit)


async def read_body(http: web.Request) -> bytes:
    """Read it whole.

    Raises:
        InvalidRequest: too large, too slow, compressed, of another kind than JSON, or badly framed.
    """
    config = http.app[CONFIG]
    encoding = http.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        # A small body could unpack to any size.
        raise UnsupportedMedia(f"request bodies with Content-Encoding {encoding[:32]!r} are not accepted")
    kind = http.content_type if "Content-Type" in http.headers else "application/json"
    if kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedMedia(f"the request body must be application/json, not {kind[:64]!r}")
    if (http.content_length or 0) > config.max_body_bytes:
        raise BodyTooLarge(max_body_bytes=config.max_body_bytes)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await http.read()
    except TimeoutError:
        raise BodyTooSlow(timeout_s=BODY_TIMEOUT_S) from None
    except web.RequestPayloadError:
        raise InvalidRequest("the request body is cut off or not framed as HTTP says") from None
