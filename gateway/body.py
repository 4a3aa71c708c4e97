"""The body of a request: bounded in bytes and in time, plain JSON, never unpacked."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from gateway.admission import Reading
from gateway.errors import BodyTooLarge, BodyTooSlow, InvalidRequest, UnsupportedMedia
from gateway.keys import CONFIG

INLINE_BYTES = 48 * 1024
"""Bodies up to this size are parsed on the loop, at 10 ms a megabyte."""
BODY_TIMEOUT_S = 60.0
STALL_TIMEOUT_S = 10.0
"""How long a body may make no progress."""

_T = TypeVar("_T")


async def read_body(http: web.Request, reading: Reading) -> bytes:
    """Read it whole, taking room in `reading` for what comes.

    Raises:
        InvalidRequest: too large, too slow, compressed, of another kind than JSON, or badly framed.
        BodiesOverloaded: others' bodies take all the room.
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
            return await _read_pieces(http, reading, max_bytes=config.max_body_bytes)
    except TimeoutError:
        raise BodyTooSlow(timeout_s=BODY_TIMEOUT_S) from None
    except web.RequestPayloadError:
        raise InvalidRequest("the request body is cut off or not framed as HTTP says") from None


async def parsed(body: bytes, parse: Callable[[bytes], _T]) -> _T:
    """What `parse` makes of a body; away from the loop where that would hold it up for half a millisecond."""
    return parse(body) if len(body) <= INLINE_BYTES else await asyncio.to_thread(parse, body)


async def _read_pieces(http: web.Request, reading: Reading, *, max_bytes: int) -> bytes:
    body = bytearray()
    while True:
        try:
            async with asyncio.timeout(STALL_TIMEOUT_S):
                piece = await http.content.readany()
        except TimeoutError:
            raise BodyTooSlow(timeout_s=STALL_TIMEOUT_S, is_stalled=True) from None
        if not piece:
            return bytes(body)
        if len(body) + len(piece) > max_bytes:
            raise BodyTooLarge(max_body_bytes=max_bytes)
        reading.grow(len(piece))
        body += piece
