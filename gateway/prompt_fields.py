"""Prompts that are no conversation: a string, strings, token ids, or lists of these."""

from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from gateway.errors import InvalidRequest
from gateway.json_fields import decoded
from gateway.request import MAX_CHOICES, Prompt
from gateway.sampling_fields import TokenId

_string = msgspec.json.Decoder(str)
_list = msgspec.json.Decoder(list[Raw])
_token_ids = msgspec.json.Decoder(Annotated[list[TokenId], Meta(min_length=1)])


def read_prompts(raw: Raw, *, at: str, max_prompts: int = MAX_CHOICES) -> tuple[Prompt, ...]:
    """Read one or more prompts. An empty string is left to whoever knows whether a BOS makes it a prompt.

    Raises:
        InvalidRequest: with the path below `at`.
    """
    match _kind(raw):
        case "string":
            return (decoded(_string, raw, at=at),)
        case "list":
            raws = decoded(_list, raw, at=at)
        case _:
            raise InvalidRequest(f"{at} must be a string, a list of strings, or token ids", param=at)
    if not raws:
        raise InvalidRequest(f"{at} is empty", param=at)
    if _kind(raws[0]) == "other":
        return (_read_ids(raw, at=at),)
    if len(raws) > max_prompts:
        raise InvalidRequest(f"{at} holds {len(raws)} prompts; at most {max_prompts}", param=at)
    return tuple(_read_one(each, at=f"{at}[{i}]") for i, each in enumerate(raws))


def _read_one(raw: Raw, *, at: str) -> Prompt:
    match _kind(raw):
        case "string":
            return decoded(_string, raw, at=at)
        case "list":
            return _read_ids(raw, at=at)
        case _:
            raise InvalidRequest(f"{at} must be a string or a list of token ids", param=at)


def _read_ids(raw: Raw, *, at: str) -> tuple[int, ...]:
    token_ids: list[int] = decoded(_token_ids, raw, at=at)
    return tuple(token_ids)


def _kind(raw: Raw) -> str:
    return {b'"': "string", b"[": "list"}.get(bytes(memoryview(raw)[:1]), "other")
