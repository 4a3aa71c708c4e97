"""OpenAI's legacy Completions API: prompts that no template touches, as text or as token ids.

Every field of the API is honoured, or accepted because it changes no answer, or refused by name.

Source: https://platform.openai.com/docs/api-reference/completions; the types of the `openai` package.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from gateway.dialects import AnswerWriter
from gateway.errors import ErrorReport
from gateway.events import AnswerToken, ChoiceEnded, Event, Failed, Finished, Started, TextDelta
from gateway.identity_fields import IDENTITY_FIELDS, read_identity
from gateway.json_fields import decoded_fields, read_object, refuse_unbuilt, unsupported
from gateway.openai_shapes import error_object, usage_object
from gateway.prompt_fields import read_prompts
from gateway.request import MAX_CHOICES, GenerateRequest
from gateway.sampling_fields import MAX_TOKENS, MAX_TOP_LOGPROBS, SAMPLING_FIELDS, read_sampling

DEFAULT_MAX_TOKENS = 16

_REFUSED: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    # Extensions that other local servers have.
    "priority": (None, 0),
}
"""Fields that are known and not built: each with the values that change nothing, which are accepted."""


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[str, Meta(min_length=1, max_length=256)]
    prompt: Raw
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None


_BODY_FIELDS = frozenset(_Body.__struct_fields__)
_HONOURED = _BODY_FIELDS | SAMPLING_FIELDS | IDENTITY_FIELDS

_body = msgspec.json.Decoder(_Body)
_encode = msgspec.json.Encoder().encode


def _read(fields: dict[str, Raw]) -> GenerateRequest:
    refuse_unbuilt(fields, honoured=_HONOURED, refused=_REFUSED)
    body = decoded_fields(_body, fields, names=_BODY_FIELDS)
    prompts = read_prompts(body.prompt, at="prompt")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = read_sampling(fields, max_tokens=max_tokens, num_prompts=len(prompts))
    if body.best_of is not None and body.best_of != sampling.get("n", 1):
        raise unsupported("best_of")
    return GenerateRequest(
        model=body.model,
        prompts=prompts,
        num_logprobs=body.logprobs,
        echo=bool(body.echo),
        **sampling,
        **read_identity(fields),
    )


def _name(token: bytes) -> str:
    """A token as a string that tells it from all others: one that is no text shows its bytes."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _logprobs(tokens: Iterable[AnswerToken]) -> dict[str, object]:
    """Four lists of one entry per token. The first token of a prompt has null for its chances."""
    tokens = list(tokens)
    return {
        "tokens": [_name(each.token) for each in tokens],
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": [
            None if each.logprob is None else {_name(token): logprob for token, logprob in each.top}
            for each in tokens
        ],
        "text_offset": [each.offset for each in tokens],
    }


class CompletionWriter:
    """Writes one completion. Streamed or whole, a choice has the same shape."""

    def __init__(self, request: GenerateRequest, head: dict[str, object]) -> None:
        self._num_choices = request.num_choices
        self._include_usage = request.include_usage
        self._has_logprobs = request.num_logprobs is not None
        self._head = head
        shared = _encode(head)[:-1]
        self._before = b"data: " + shared + b',"choices":['
        self._after = b"]" + (b',"usage":null' if request.include_usage else b"") + b"}\n\n"

    def chunk(self, event: Event) -> bytes:
        match event:
            case TextDelta(text, index, tokens):
                return self._chunk(self._choice(index, text=text, tokens=tokens, reason=None))
            case Started():
                return b""
            case ChoiceEnded():
                return self._chunk(self._choice(event.index, text="", tokens=(), reason=event.reason.value))
            case Finished():
                last = self._choice(event.index, text="", tokens=(), reason=event.reason.value)
                return self._chunk(last) + self._end_of_answer(event)
            case Failed():
                raise AssertionError("a failed stream ends with error()")

    def _chunk(self, choice: dict[str, object]) -> bytes:
        return self._before + _encode(choice) + self._after

    def _end_of_answer(self, event: Finished) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self._include_usage:
            return done
        return (
            b"data: "
            + _encode({**self._head, "choices": [], "usage": usage_object(event.usage)})
            + b"\n\n"
            + done
        )

    def error(self, report: ErrorReport) -> bytes:
        """No `[DONE]` follows: the stream is broken, and clients must not take it for whole."""
        return b"data: " + _encode(error_object(report)) + b"\n\n"

    def whole(self, events: Sequence[Event]) -> bytes:
        last = events[-1]
        assert isinstance(last, Finished), "only a finished answer has a body"
        choices = [self._whole_choice(index, events) for index in range(self._num_choices)]
        return _encode({**self._head, "choices": choices, "usage": usage_object(last.usage)})

    def _whole_choice(self, index: int, events: Sequence[Event]) -> dict[str, object]:
        deltas = [event for event in events if isinstance(event, TextDelta) and event.index == index]
        [reason] = [e.reason for e in events if isinstance(e, ChoiceEnded | Finished) and e.index == index]
        return self._choice(
            index,
            text="".join(delta.text for delta in deltas),
            tokens=[token for delta in deltas for token in delta.tokens],
            reason=reason.value,
        )

    def _choice(
        self, index: int, *, text: str, tokens: Sequence[AnswerToken], reason: str | None
    ) -> dict[str, object]:
        logprobs = _logprobs(tokens) if self._has_logprobs else None
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}


class OpenAICompletions:
    path = "/v1/completions"

    def example(self, *, model: str, stream: bool) -> bytes:
        return _encode({"model": model, "prompt": "Hi", "stream": stream})

    def parse(self, body: bytes, *, max_depth: int) -> GenerateRequest:
        return read_object(body, max_depth=max_depth, read=_read)

    def writer(
        self, request: GenerateRequest, *, request_id: str, created: int, model: str, fingerprint: str
    ) -> AnswerWriter:
        head: dict[str, object] = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        return CompletionWriter(request, head)

    def error(self, report: ErrorReport) -> bytes:
        return _encode(error_object(report))


DIALECT = OpenAICompletions()
