"""Bounds on a JSON body's shape, checked before anything is built from it.

Nested brackets cost recursion and every string costs an object, so eight megabytes of text may
become gigabytes. Both checks run in C over the raw bytes and stop early.
"""

import json
import re
from itertools import accumulate

from gateway.errors import InvalidRequest

MAX_STRINGS = 100_000
"""Strings and keys in one body. A conversation of 20,000 messages stays below."""
MAX_CONTAINERS = 100_000
"""Objects and arrays in one body."""
MAX_COMMAS = 200_000
"""Commas outside strings: a bound on all values together, numbers among them."""

_HIGH_OR_LOW_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MAX_SEARCHED_BYTES = 1 << 20
_MAX_PATH_CHARS = 128  # of a key: with whole ones, one long key above many values costs their product
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def check_json_shape(body: bytes, *, max_depth: int) -> None:
    """Refuse a body that is nested too deep or holds too many values. Says nothing about its syntax.

    Raises:
        InvalidRequest: naming the bound.
    """
    num_openings = body.count(b"{") + body.count(b"[")
    few_values = body.count(b'"') <= 2 * MAX_STRINGS and body.count(b",") <= MAX_COMMAS
    if num_openings <= max_depth and few_values:
        return  # cannot break a bound, whatever stands inside strings
    # Backslashes stand in strings alone, or the decoder stops at the first that does not.
    quotes = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if quotes.count(b'"') > 2 * MAX_STRINGS:
        raise InvalidRequest(f"the body holds more than {MAX_STRINGS} strings", code="body_too_complex")
    bare = b"".join(quotes.split(b'"')[::2])
    if bare.count(b",") > MAX_COMMAS:
        raise InvalidRequest(f"the body holds more than {MAX_COMMAS} values", code="body_too_complex")
    brackets = bare.translate(None, _NOT_BRACKETS)
    if len(brackets) > 2 * MAX_CONTAINERS:
        raise InvalidRequest(
            f"the body holds more than {MAX_CONTAINERS} objects and arrays", code="body_too_complex"
        )
    if max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > max_depth:
        raise InvalidRequest(f"the body is nested deeper than {max_depth} levels", code="body_too_deep")


def find_lone_surrogate(raw: bytes) -> str | None:
    """Return the path (`messages[1].content`) of a string with half a surrogate pair, if there is one.

    Only called for JSON that the real decoder refused, which names no field. Large bodies are not searched.
    """
    if len(raw) > _MAX_SEARCHED_BYTES or not _HIGH_OR_LOW_SURROGATE.search(raw):
        return None
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    pending: list[tuple[str, object]] = [("", value)]
    while pending:
        path, value = pending.pop()
        match value:
            case str() if any("\ud800" <= char <= "\udfff" for char in value):
                return path or "body"
            case dict():
                pending += [
                    (f"{path}.{key[:_MAX_PATH_CHARS]}".lstrip("."), each) for key, each in value.items()
                ]
                if any("\ud800" <= char <= "\udfff" for key in value for char in key):
                    return path or "body"
            case list():
                pending += [(f"{path}[{i}]", each) for i, each in enumerate(value)]
            case _:
                pass
    return None
