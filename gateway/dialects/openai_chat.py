"""OpenAI's Chat Completions API.

Every field of the API is honoured, or accepted because it changes no answer, or refused by name.

Source: https://platform.openai.com/docs/api-reference/chat; the types of the `openai` package.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Raw

from gateway.dialects import AnswerWriter
from gateway.errors import ErrorReport, InvalidRequest
from gateway.events import Event, Failed, Finished, Started, TextDelta, Usage
from gateway.json_shape import check_json_shape, find_lone_surrogate
from gateway.request import GenerateRequest, Message

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 512
MAX_TOKENS = 2**31 - 1

_TokenCount = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
_Text = Annotated[str, Meta(max_length=512)]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_REFUSED_ROLES = ("tool", "function")

_REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "n": (None, 1),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    # Extensions that other local servers have.
    "cache_salt": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "min_p": (None, 0),
    "priority": (None, 0),
    "repetition_penalty": (None, 1),
    "session_id": (None,),
    "top_k": (None, 0, -1),
}
"""Fields that are known and not built: each with the values that change nothing, which are accepted."""

_MAX_NEUTRAL_BYTES = 256  # a longer value is none of the neutral ones: it need not be decoded to know


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that are honoured, then those that change no answer."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    messages: Annotated[list[Raw], Meta(min_length=1)]
    max_tokens: _TokenCount | None = None
    max_completion_tokens: _TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: _Text | None = None
    prompt_cache_options: dict[str, str] | None = None
    prompt_cache_retention: _Text | None = None
    safety_identifier: _Text | None = None
    service_tier: _Text | None = None
    store: bool | None = None
    user: _Text | None = None


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
_HONOURED = frozenset(_Body.__struct_fields__)


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


_fields = msgspec.json.Decoder(dict[str, Raw])
_body = msgspec.json.Decoder(_Body)
_message = msgspec.json.Decoder(_Message)
_part = msgspec.json.Decoder(_Part)
_neutral = msgspec.json.Decoder()
_encode = msgspec.json.Encoder().encode

_AT = re.compile(r"(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>[^`]*)`)?", re.DOTALL)
_NAMED = re.compile(r"Object (?:contains unknown|missing required) field `(?P<name>.*)`", re.DOTALL)

_T = TypeVar("_T")


def _decoded(decoder: "msgspec.json.Decoder[_T]", raw: bytes | Raw, *, at: str) -> _T:
    """Decode, or raise `InvalidRequest` with the path of the fault below `at`."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        found = _AT.fullmatch(str(error))
        assert found is not None, "the pattern matches any text"
        what, path = found["what"], found["path"] or ""
        if named := _NAMED.fullmatch(what):
            path = f"{path}.{named['name']}" if path else named["name"]
        param = f"{at}.{path}" if at and path and path[0] != "[" else at + path
        raise InvalidRequest(f"{_shown(param) or 'the body'}: {what}", param=_shown(param) or None) from None
    except msgspec.DecodeError as error:
        if path := find_lone_surrogate(bytes(raw)):
            param = f"{at}.{path}" if at else path
            raise InvalidRequest(f"{_shown(param)}: half of a surrogate pair", param=_shown(param)) from None
        raise InvalidRequest(f"{at or 'the body'} is not valid JSON: {error}", param=at or None) from None


def _shown(name: str) -> str:
    """A name the client chose, short enough to send back."""
    return name if len(name) <= 128 else name[:125] + "..."


def _parse_body(body: bytes, *, max_depth: int) -> GenerateRequest:
    try:
        check_json_shape(body, max_depth=max_depth)
        fields = _decoded(_fields, body, at="")
        _refuse_what_is_not_built(fields)
        kept = ((name, raw) for name, raw in fields.items() if name not in _REFUSED)
        # The names are the API's own by now, so quoting them is enough.
        parsed = _decoded(
            _body,
            b"{" + b",".join(b'"%s":%s' % (name.encode(), bytes(raw)) for name, raw in kept) + b"}",
            at="",
        )
        messages = tuple(_read_message(raw, at=f"messages[{i}]") for i, raw in enumerate(parsed.messages))
    except RecursionError:
        raise InvalidRequest(
            f"the body is nested deeper than {max_depth} levels", code="body_too_deep"
        ) from None
    return GenerateRequest(
        model=parsed.model,
        messages=messages,
        max_tokens=_max_tokens(parsed),
        temperature=1.0 if parsed.temperature is None else parsed.temperature,
        top_p=1.0 if parsed.top_p is None else parsed.top_p,
        seed=parsed.seed,
        stop=_stop_strings(parsed.stop),
        stream=bool(parsed.stream),
        include_usage=_include_usage(parsed),
    )


def _refuse_what_is_not_built(fields: Mapping[str, Raw]) -> None:
    for name, raw in fields.items():
        if name in _REFUSED:
            if not _is_neutral(raw, _REFUSED[name]):
                raise InvalidRequest(
                    f"{name} is known but not supported here yet", param=name, code="unsupported_parameter"
                )
        elif name not in _HONOURED:
            raise InvalidRequest(
                f"unknown field {_shown(name)!r}", param=_shown(name), code="unknown_parameter"
            )


def _is_neutral(raw: Raw, neutral: tuple[Any, ...]) -> bool:
    text = bytes(raw)
    if len(text) > _MAX_NEUTRAL_BYTES:
        return False
    try:
        value = _neutral.decode(text)
    except msgspec.DecodeError:
        return False
    # True == 1 in Python, not in JSON.
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)


def _read_message(raw: Raw, *, at: str) -> Message:
    message = _decoded(_message, raw, at=at)
    for name in _REFUSED_IN_MESSAGE:
        value = bytes(getattr(message, name))
        if value not in (b"", b"null", b"[]"):
            raise InvalidRequest(
                f"{at}.{name} is known but not supported here yet",
                param=f"{at}.{name}",
                code="unsupported_parameter",
            )
    role = _ROLES.get(message.role)
    if role is None:
        known = message.role in _REFUSED_ROLES
        problem = "is known but not supported here yet" if known else f"must be one of {', '.join(_ROLES)}"
        raise InvalidRequest(
            f"{at}.role {_shown(message.role)!r} {problem}",
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
        part = _decoded(_part, raw, at=f"{at}[{i}]")
        if part.type != "text":
            raise InvalidRequest(
                f"{at}[{i}]: parts of type {_shown(part.type)!r} are not supported here yet",
                param=f"{at}[{i}].type",
                code="unsupported_parameter",
            )
        if part.text is None:
            raise InvalidRequest(f"{at}[{i}].text is missing", param=f"{at}[{i}].text")
        texts.append(part.text)
    return "\n".join(texts)


def _max_tokens(body: _Body) -> int | None:
    if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ; give one of them", param="max_completion_tokens"
        )
    return body.max_completion_tokens or body.max_tokens


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


def _include_usage(body: _Body) -> bool:
    options = body.stream_options
    if options is None:
        return False
    if not body.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")
    if options.include_obfuscation:
        raise InvalidRequest(
            "stream_options.include_obfuscation is known but not supported here yet",
            param="stream_options.include_obfuscation",
            code="unsupported_parameter",
        )
    return bool(options.include_usage)


def _sse(value: object) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


def _error(report: ErrorReport) -> dict[str, object]:
    return {
        "error": {"message": report.message, "type": report.type, "param": report.param, "code": report.code}
    }


class ChatWriter:
    """Writes one chat answer. What every chunk shares is encoded once, so a token costs one string."""

    def __init__(self, request: GenerateRequest, head: dict[str, object]) -> None:
        self._head = head
        self._include_usage = request.include_usage
        # {"id":...,"object":"chat.completion.chunk",...,"choices":[{"index":0,"delta":{"content":TEXT},...
        shared = _encode({**head, "object": "chat.completion.chunk"})[:-1]
        tail = b',"usage":null}\n\n' if request.include_usage else b"}\n\n"
        self._before = b"data: " + shared + b',"choices":[{"index":0,"delta":'
        self._after = b"]" + tail
        self._before_text = self._before + b'{"content":'
        self._after_text = b'},"logprobs":null,"finish_reason":null}' + self._after

    def chunk(self, event: Event) -> bytes:
        match event:
            case TextDelta(text):
                return self._before_text + _encode(text) + self._after_text
            case Started():
                return (
                    self._before
                    + b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
                    + self._after
                )
            case Finished():
                return self._last_chunks(event)
            case Failed():
                raise AssertionError("a failed stream ends with error()")

    def _last_chunks(self, event: Finished) -> bytes:
        last = (
            self._before + b'{},"logprobs":null,"finish_reason":"%s"}' % event.reason.encode() + self._after
        )
        if self._include_usage:
            last += _sse(
                {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": _usage(event.usage)}
            )
        return last + b"data: [DONE]\n\n"

    def error(self, report: ErrorReport) -> bytes:
        """No `[DONE]` follows: the stream is broken, and clients must not take it for whole."""
        return _sse(_error(report))

    def whole(self, events: Sequence[Event]) -> bytes:
        last = events[-1]
        assert isinstance(last, Finished), "only a finished answer has a body"
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": last.reason.value}
        return _encode(
            {**self._head, "object": "chat.completion", "choices": [choice], "usage": _usage(last.usage)}
        )


class OpenAIChat:
    path = "/v1/chat/completions"

    def example(self, *, model: str, stream: bool) -> bytes:
        return _encode({"model": model, "messages": [{"role": "user", "content": "Hi"}], "stream": stream})

    def parse(self, body: bytes, *, max_depth: int) -> GenerateRequest:
        return _parse_body(body, max_depth=max_depth)

    def writer(
        self, request: GenerateRequest, *, request_id: str, created: int, model: str, fingerprint: str
    ) -> AnswerWriter:
        head: dict[str, object] = {
            "id": f"chatcmpl-{request_id}",
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        return ChatWriter(request, head)

    def error(self, report: ErrorReport) -> bytes:
        return _encode(_error(report))


DIALECT = OpenAIChat()
