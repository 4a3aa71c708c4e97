"""OpenAI's Chat Completions API.

Every field of the API is honoured, or accepted because it changes no answer, or refused by name.

Source: https://platform.openai.com/docs/api-reference/chat; the types of the `openai` package.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from gateway.dialects import AnswerWriter
from gateway.errors import ErrorReport, InvalidRequest
from gateway.events import AnswerToken, ChoiceEnded, Event, Failed, Finished, Started, TextDelta
from gateway.identity_fields import IDENTITY_FIELDS, read_identity
from gateway.json_fields import decoded_fields, read_object, refuse_unbuilt
from gateway.message_fields import read_messages
from gateway.openai_shapes import error_object, usage_object
from gateway.request import GenerateRequest
from gateway.sampling_fields import MAX_TOP_LOGPROBS, SAMPLING_FIELDS, TokenCount, read_sampling

_Text = Annotated[str, Meta(max_length=512)]

_REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    # Extensions that other local servers have.
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "priority": (None, 0),
}
"""Fields that are known and not built: each with the values that change nothing, which are accepted."""


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that are honoured beside sampling and identity, then those that change no answer."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    messages: Annotated[list[Raw], Meta(min_length=1)]
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    parallel_tool_calls: bool | None = None
    prompt_cache_options: dict[str, str] | None = None
    prompt_cache_retention: _Text | None = None
    safety_identifier: _Text | None = None
    service_tier: _Text | None = None
    store: bool | None = None
    user: _Text | None = None


_BODY_FIELDS = frozenset(_Body.__struct_fields__)
_HONOURED = _BODY_FIELDS | SAMPLING_FIELDS | IDENTITY_FIELDS

_body = msgspec.json.Decoder(_Body)
_encode = msgspec.json.Encoder().encode


def _read(fields: dict[str, Raw]) -> GenerateRequest:
    refuse_unbuilt(fields, honoured=_HONOURED, refused=_REFUSED)
    body = decoded_fields(_body, fields, names=_BODY_FIELDS)
    return GenerateRequest(
        model=body.model,
        messages=read_messages(body.messages),
        num_logprobs=_num_logprobs(body),
        **read_sampling(fields, max_tokens=_max_tokens(body)),
        **read_identity(fields),
    )


def _num_logprobs(body: _Body) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _max_tokens(body: _Body) -> int | None:
    if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ; give one of them", param="max_completion_tokens"
        )
    return body.max_completion_tokens or body.max_tokens


def _sse(value: object) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def _token(token: bytes, logprob: float | None) -> dict[str, object]:
    return {"token": token.decode(errors="replace"), "logprob": logprob, "bytes": list(token)}


def _logprobs(tokens: Iterable[AnswerToken]) -> dict[str, object]:
    content = [
        {
            **_token(each.token, each.logprob),
            "top_logprobs": [_token(token, logprob) for token, logprob in each.top],
        }
        for each in tokens
    ]
    return {"content": content, "refusal": None}


class ChatWriter:
    """Writes one chat answer. What every chunk shares is encoded once, so a token costs one string."""

    def __init__(self, request: GenerateRequest, head: dict[str, object]) -> None:
        self._head = head
        self._include_usage = request.include_usage
        self._has_logprobs = request.num_logprobs is not None
        # {"id":...,"object":"chat.completion.chunk",...,"choices":[{"index":0,"delta":{"content":TEXT},...
        shared = _encode({**head, "object": "chat.completion.chunk"})[:-1]
        tail = b',"usage":null}\n\n' if request.include_usage else b"}\n\n"
        self._before = [
            b'data: %s,"choices":[{"index":%d,"delta":' % (shared, index)
            for index in range(request.num_choices)
        ]
        self._after = b"]" + tail
        self._after_text = b'},"logprobs":null,"finish_reason":null}' + self._after

    def chunk(self, event: Event) -> bytes:
        match event:
            case TextDelta(text, index) if not self._has_logprobs:
                return self._before[index] + b'{"content":' + _encode(text) + self._after_text
            case TextDelta(text, index, tokens):
                logprobs = _encode(_logprobs(tokens))
                delta = b'{"content":%s},"logprobs":%s,"finish_reason":null}' % (_encode(text), logprobs)
                return self._before[index] + delta + self._after
            case Started():
                role = b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
                return b"".join(before + role + self._after for before in self._before)
            case ChoiceEnded():
                return self._end_of_choice(event)
            case Finished():
                return self._end_of_choice(event) + self._end_of_answer(event)
            case Failed():
                raise AssertionError("a failed stream ends with error()")

    def _end_of_choice(self, event: ChoiceEnded | Finished) -> bytes:
        end = b'{},"logprobs":null,"finish_reason":"%s"}' % event.reason.encode()
        return self._before[event.index] + end + self._after

    def _end_of_answer(self, event: Finished) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self._include_usage:
            return done
        chunk = {
            **self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage_object(event.usage)
        }  # fmt: skip
        return _sse(chunk) + done

    def error(self, report: ErrorReport) -> bytes:
        """No `[DONE]` follows: the stream is broken, and clients must not take it for whole."""
        return _sse(error_object(report))

    def whole(self, events: Sequence[Event]) -> bytes:
        last = events[-1]
        assert isinstance(last, Finished), "only a finished answer has a body"
        choices = [self._choice(index, events) for index in range(len(self._before))]
        return _encode(
            {**self._head, "object": "chat.completion", "choices": choices, "usage": usage_object(last.usage)}
        )

    def _choice(self, index: int, events: Sequence[Event]) -> dict[str, object]:
        deltas = [event for event in events if isinstance(event, TextDelta) and event.index == index]
        [reason] = [e.reason for e in events if isinstance(e, ChoiceEnded | Finished) and e.index == index]
        text = "".join(delta.text for delta in deltas)
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": _logprobs(t for d in deltas for t in d.tokens) if self._has_logprobs else None,
            "finish_reason": reason.value,
        }


class OpenAIChat:
    path = "/v1/chat/completions"

    def example(self, *, model: str, stream: bool) -> bytes:
        return _encode({"model": model, "messages": [{"role": "user", "content": "Hi"}], "stream": stream})

    def parse(self, body: bytes, *, max_depth: int) -> GenerateRequest:
        return read_object(body, max_depth=max_depth, read=_read)

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
        return _encode(error_object(report))


DIALECT = OpenAIChat()
