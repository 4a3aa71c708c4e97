"""Chat messages as OpenAI's APIs write them, for every route that takes a conversation."""

from collections.abc import Sequence

import msgspec
from msgspec import Raw

from gateway.errors import InvalidRequest
from gateway.json_fields import decoded, shown, unsupported
from gateway.request import Message

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_REFUSED_ROLES = ("tool", "function")


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[Raw] | None = None
    audio: Raw = Raw()
    function_call: Raw = Raw()
    name: Raw = Raw()
    reasoning_content: Raw = Raw()
    refusal: Raw = Raw()
    tool_call_id: Raw = Raw()
    tool_calls: Raw = Raw()


_REFUSED_IN_MESSAGE = tuple(name for name in _Message.__struct_fields__ if name not in ("role", "content"))


class _Kind(msgspec.Struct):
    type: str


class _TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    text: str | None = None


_message = msgspec.json.Decoder(_Message)
_kind = msgspec.json.Decoder(_Kind)
_text_part = msgspec.json.Decoder(_TextPart)


def read_messages(raws: Sequence[Raw]) -> tuple[Message, ...]:
    """Read a conversation.

    Raises:
        InvalidRequest: with the path of the message, part or field.
    """
    return tuple(_read_message(raw, at=f"messages[{i}]") for i, raw in enumerate(raws))


def _read_message(raw: Raw, *, at: str) -> Message:
    message = decoded(_message, raw, at=at)
    for name in _REFUSED_IN_MESSAGE:
        value = bytes(getattr(message, name))
        if value not in (b"", b"null", b"[]"):
            raise unsupported(f"{at}.{name}")
    role = _ROLES.get(message.role)
    if role is None:
        known = message.role in _REFUSED_ROLES
        problem = "is known but not supported here yet" if known else f"must be one of {', '.join(_ROLES)}"
        raise InvalidRequest(
            f"{at}.role {shown(message.role)!r} {problem}",
            param=f"{at}.role",
            code="unsupported_parameter" if known else None,
        )
    if message.content is None and role != "assistant":
        raise InvalidRequest(f"{at}.content is missing", param=f"{at}.content")
    return Message(role=role, content=_read_content(message.content, at=f"{at}.content"))


def _read_content(content: str | list[Raw] | None, *, at: str) -> str:
    """Text parts are joined by newlines; None is an assistant turn without text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, raw in enumerate(content):
        kind = decoded(_kind, raw, at=f"{at}[{i}]").type
        if kind != "text":
            raise InvalidRequest(
                f"{at}[{i}]: parts of type {shown(kind)!r} are not supported here yet",
                param=f"{at}[{i}].type",
                code="unsupported_parameter",
            )
        part = decoded(_text_part, raw, at=f"{at}[{i}]")
        if part.text is None:
            raise InvalidRequest(f"{at}[{i}].text is missing", param=f"{at}[{i}].text")
        texts.append(part.text)
    return "\n".join(texts)
