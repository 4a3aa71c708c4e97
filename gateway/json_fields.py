"""JSON into typed fields, with the path of whatever is wrong: what all dialects parse with."""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from gateway.errors import InvalidRequest
from gateway.json_shape import check_json_shape, find_lone_surrogate

_MAX_NEUTRAL_BYTES = 256  # a longer value is none of the neutral ones: it need not be decoded to know

_fields = msgspec.json.Decoder(dict[str, Raw])
_any = msgspec.json.Decoder()

_AT = re.compile(r"(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>[^`]*)`)?", re.DOTALL)
_NAMED = re.compile(r"Object (?:contains unknown|missing required) field `(?P<name>.*)`", re.DOTALL)

_T = TypeVar("_T")


def read_object(body: bytes, *, max_depth: int, read: Callable[[dict[str, Raw]], _T]) -> _T:
    """Split a body into its fields, still raw, and give them to `read`.

    Raises:
        InvalidRequest: the body is no JSON object, or too deep or too complex; or `read` says so.
    """
    try:
        check_json_shape(body, max_depth=max_depth)
        return read(decoded(_fields, body, at=""))
    except RecursionError:
        raise InvalidRequest(
            f"the body is nested deeper than {max_depth} levels", code="body_too_deep"
        ) from None


def decoded(decoder: "msgspec.json.Decoder[_T]", raw: bytes | Raw, *, at: str) -> _T:
    """Decode, or raise `InvalidRequest` with the path of the fault below `at`."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        found = _AT.fullmatch(_shortened(str(error)))
        assert found is not None, "the pattern matches any text"
        what, path = found["what"], found["path"] or ""
        if named := _NAMED.fullmatch(what):
            path = f"{path}.{named['name']}" if path else named["name"]
        param = f"{at}.{path}" if at and path and path[0] != "[" else at + path
        raise InvalidRequest(f"{shown(param) or 'the body'}: {what}", param=shown(param) or None) from None
    except msgspec.DecodeError as error:
        if path := find_lone_surrogate(bytes(raw)):
            param = f"{at}.{path}" if at else path
            raise InvalidRequest(f"{shown(param)}: half of a surrogate pair", param=shown(param)) from None
        raise InvalidRequest(f"{at or 'the body'} is not valid JSON: {error}", param=at or None) from None


def decoded_fields(
    decoder: "msgspec.json.Decoder[_T]", fields: Mapping[str, Raw], *, names: Collection[str]
) -> _T:
    """Decode a Struct from those of `fields` that are in `names`.

    The names are the API's own, so quoting them is enough.
    """
    kept = ((name, raw) for name, raw in fields.items() if name in names)
    return decoded(
        decoder,
        b"{" + b",".join(b'"%s":%s' % (name.encode(), bytes(raw)) for name, raw in kept) + b"}",
        at="",
    )


def refuse_unbuilt(
    fields: Mapping[str, Raw], *, honoured: Collection[str], refused: Mapping[str, tuple[Any, ...]]
) -> None:
    """Refuse what is unknown, and what is known and not built unless its value changes nothing.

    Args:
        refused: field -> the values that change nothing, which are accepted.

    Raises:
        InvalidRequest: naming the field.
    """
    for name, raw in fields.items():
        if name in refused:
            if not _is_neutral(raw, refused[name]):
                raise unsupported(name)
        elif name not in honoured:
            raise InvalidRequest(
                f"unknown field {shown(name)!r}", param=shown(name), code="unknown_parameter"
            )


def unsupported(param: str) -> InvalidRequest:
    """What is said of a field that the API has and this server has not."""
    return InvalidRequest(
        f"{param} is known but not supported here yet", param=param, code="unsupported_parameter"
    )


def _shortened(message: str) -> str:
    """Without the middle of a name of megabytes: nobody reads it, and it would cost and be sent back."""
    return message if len(message) <= 1024 else f"{message[:512]}...{message[-512:]}"


def shown(name: str) -> str:
    """A name the client chose, short enough to send back."""
    return name if len(name) <= 128 else name[:125] + "..."


def _is_neutral(raw: Raw, neutral: tuple[Any, ...]) -> bool:
    text = bytes(raw)
    if len(text) > _MAX_NEUTRAL_BYTES:
        return False
    try:
        value = _any.decode(text)
    except msgspec.DecodeError:
        return False
    # True == 1 in Python, not in JSON.
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)
