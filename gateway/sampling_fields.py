"""The fields that say how an answer is sampled, one table of bounds for every dialect that has them."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from gateway.errors import InvalidRequest
from gateway.json_fields import decoded_fields, shown
from gateway.request import MAX_ANSWER_TOKENS, MAX_CHOICES

MAX_TOKENS = 2**31 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 512
MAX_STOP_TOKENS = 128
MAX_LOGIT_BIASES = 1024
MAX_TOP_LOGPROBS = 20

TokenCount = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Unit = Annotated[float, Meta(ge=0, le=1)]
_OpenUnit = Annotated[float, Meta(gt=0, le=1)]


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Fields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A null is a field that is not there."""

    frequency_penalty: _Penalty | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    min_p: _Unit | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None
    top_p: _OpenUnit | None = None
    typical_p: _OpenUnit | None = None


SAMPLING_FIELDS = frozenset(_Fields.__struct_fields__)
_PLAIN = SAMPLING_FIELDS - {"logit_bias", "stop", "stop_token_ids", "stream_options", "top_k"}
_decoder = msgspec.json.Decoder(_Fields)


def read_sampling(
    fields: Mapping[str, Raw], *, max_tokens: int | None, num_prompts: int = 1
) -> dict[str, Any]:
    """Return the fields of `GenerateRequest` that `fields` speak of; what was left out is left out.

    Raises:
        InvalidRequest: with the path and the bound.
    """
    given = decoded_fields(_decoder, fields, names=SAMPLING_FIELDS)
    values: dict[str, Any] = {name: value for name in _PLAIN if (value := getattr(given, name)) is not None}
    values |= {
        "max_tokens": max_tokens,
        "top_k": max(0, given.top_k or 0),  # 0, -1 and null are one thing: off
        "logit_bias": _logit_bias(given.logit_bias or {}),
        "stop": _stop_strings(given.stop),
        "stop_token_ids": tuple(given.stop_token_ids or ()),
        "include_usage": _include_usage(given),
    }
    if max_tokens is not None and (given.min_tokens or 0) > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {given.min_tokens}; it must be at most max_tokens, {max_tokens}",
            param="min_tokens",
        )
    check_num_choices(n=given.n or 1, num_prompts=num_prompts, max_tokens=max_tokens)
    return values


def check_num_choices(*, n: int, num_prompts: int, max_tokens: int | None) -> None:
    """Refuse more choices, or more tokens in all of them, than one request may ask for.

    Raises:
        InvalidRequest: with both factors.
    """
    num_choices = n * num_prompts
    if num_choices > MAX_CHOICES:
        raise InvalidRequest(
            f"n x prompts is {n} x {num_prompts}; at most {MAX_CHOICES} choices in one request", param="n"
        )
    if num_choices > 1 and max_tokens is not None and num_choices * max_tokens > MAX_ANSWER_TOKENS:
        raise InvalidRequest(
            f"choices x max_tokens is {num_choices} x {max_tokens}; at most {MAX_ANSWER_TOKENS}", param="n"
        )


def _logit_bias(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    if len(given) > MAX_LOGIT_BIASES:
        raise InvalidRequest(
            f"logit_bias has {len(given)} entries; at most {MAX_LOGIT_BIASES}", param="logit_bias"
        )
    biases: dict[int, float] = {}
    for name, bias in given.items():
        # Stricter than int(): " 5", "+5", "5_0" and other scripts' digits are no ids.
        if not (name.isascii() and name.isdigit() and len(name) <= 10 and int(name) <= MAX_TOKENS):
            raise InvalidRequest(
                f"logit_bias: {shown(name)!r} is no token id", param=shown(f"logit_bias.{name}")
            )
        biases[int(name)] = bias
    return tuple(biases.items())


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop holds {len(strings)} strings; at most {MAX_STOP_STRINGS}", param="stop")
    for i, text in enumerate(strings):
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            param = "stop" if isinstance(stop, str) else f"stop[{i}]"
            raise InvalidRequest(
                f"{param} has {len(text)} characters; it must have 1 to {MAX_STOP_CHARS}", param=param
            )
    return strings


def _include_usage(given: _Fields) -> bool:
    options = given.stream_options
    if options is None:
        return False
    if not given.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")
    if options.include_obfuscation:
        raise InvalidRequest(
            "stream_options.include_obfuscation is known but not supported here yet",
            param="stream_options.include_obfuscation",
            code="unsupported_parameter",
        )
    return bool(options.include_usage)
