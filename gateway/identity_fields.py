"""The fields that say which conversation a request belongs to, and who may share its cached prompt."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from gateway.errors import InvalidRequest
from gateway.json_fields import decoded_fields

MAX_NAME_CHARS = 512

_Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]


class _Conversation(msgspec.Struct, forbid_unknown_fields=True):
    """The object that the Responses API takes in place of an id."""

    id: _Name


class _Fields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A null, like an empty text, is a field that is not there."""

    cache_salt: _Name | None = None
    conversation: _Name | _Conversation | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: _Name | None = None
    session_id: _Name | None = None


IDENTITY_FIELDS = frozenset(_Fields.__struct_fields__)
_decoder = msgspec.json.Decoder(_Fields)


def read_identity(fields: Mapping[str, Raw]) -> dict[str, Any]:
    """Return `session_id` and `cache_salt` of `GenerateRequest`.

    The session is the first of these that is there: `session_id`, `prompt_cache_key`,
    `metadata.user_id`, `metadata.conversation`, `conversation`. It orders and accounts; it shares nothing
    and opens nothing, so a client that guesses another's name gains nothing by it.

    Raises:
        InvalidRequest: with the path and the bound.
    """
    given = decoded_fields(_decoder, fields, names=IDENTITY_FIELDS)
    metadata = given.metadata or {}
    conversation = given.conversation
    session_id = (
        given.session_id
        or given.prompt_cache_key
        or _name_in(metadata, "user_id")
        or _name_in(metadata, "conversation")
        or (conversation.id if isinstance(conversation, _Conversation) else conversation)
    )
    return {"session_id": session_id or "", "cache_salt": given.cache_salt or ""}


def _name_in(metadata: Mapping[str, str], key: str) -> str:
    name = metadata.get(key, "")
    if len(name) > MAX_NAME_CHARS:
        param = f"metadata.{key}"
        raise InvalidRequest(
            f"{param} has {len(name)} characters; it must have at most {MAX_NAME_CHARS}", param=param
        )
    return name
