"""The routes that generate nothing but need the model or its tokenizer: tokens, templates, embeddings.

They obey the same limits as generations: body, depth, admission, model names, draining.
"""

import base64
from array import array
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import hypot
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta, Raw

from gateway.backends import Backend
from gateway.body import parsed, read_body
from gateway.errors import GenerationFailed, InvalidRequest
from gateway.handler import Handler, send_whole
from gateway.json_fields import decoded_fields, read_object, refuse_unbuilt
from gateway.keys import ADMISSION, BACKENDS, CONFIG, RECORD
from gateway.message_fields import read_messages
from gateway.prompt_fields import read_prompts
from gateway.request import Message, Prompt
from gateway.sampling_fields import TokenId
from gateway.telemetry.request_record import RequestRecord

MAX_EMBEDDING_INPUTS = 256
MAX_TOKEN_IDS = 200_000

_Model = Annotated[str, Meta(min_length=1, max_length=256)]
_Messages = Annotated[list[Raw], Meta(min_length=1)]


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Either `prompt`, plain text, or `messages`."""

    model: _Model
    prompt: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool | None = None
    """Whether `prompt` begins with the BOS token, if the model wants one. Default: it does."""
    add_generation_prompt: bool | None = None
    """Whether `messages` end with the opening of the answer. Default: they do."""


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: _Model
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_IDS)]


class TemplateBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: _Model
    messages: _Messages
    add_generation_prompt: bool | None = None


class EmbeddingsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: _Model
    input: Raw
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None


_B = TypeVar("_B", TokenizeBody, DetokenizeBody, TemplateBody, EmbeddingsBody)

_REFUSED: dict[str, tuple[Any, ...]] = {
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "return_token_strs": (None, False),
    "tools": (None, []),
}
"""Fields that other servers have here: each with the values that change nothing, which are accepted."""


async def _tokenize(body: TokenizeBody, backend: Backend, _record: RequestRecord) -> object:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if body.messages is not None:
        token_ids = await backend.tokenize_chat(
            read_messages(body.messages), add_generation_prompt=body.add_generation_prompt is not False
        )
    else:
        token_ids = await backend.tokenize(
            body.prompt or "", add_special_tokens=body.add_special_tokens is not False
        )
    return {"count": len(token_ids), "tokens": list(token_ids)}


async def _detokenize(body: DetokenizeBody, backend: Backend, _record: RequestRecord) -> object:
    return {"prompt": await backend.detokenize(body.tokens)}


async def _apply_template(body: TemplateBody, backend: Backend, _record: RequestRecord) -> object:
    messages: tuple[Message, ...] = read_messages(body.messages)
    prompt = await backend.apply_template(
        messages, add_generation_prompt=body.add_generation_prompt is not False
    )
    return {"prompt": prompt}


async def _embed(body: EmbeddingsBody, backend: Backend, record: RequestRecord) -> object:
    prompts: tuple[Prompt, ...] = read_prompts(body.input, at="input", max_prompts=MAX_EMBEDDING_INPUTS)
    embeddings = await backend.embed(prompts, request_id=record.request_id, tenant=record.tenant)
    width = len(embeddings.vectors[0])
    if body.dimensions not in (None, width):
        raise InvalidRequest(
            f"dimensions is {body.dimensions}; this model's embeddings have {width} and are not cut",
            param="dimensions",
            code="unsupported_parameter",
        )
    record.fields["num_prompt_tokens"] = embeddings.num_prompt_tokens
    written = _base64 if body.encoding_format == "base64" else list
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": i, "embedding": written(_unit(vector))}
            for i, vector in enumerate(embeddings.vectors)
        ],
        "model": record.fields["model"],
        "usage": {
            "prompt_tokens": embeddings.num_prompt_tokens,
            "total_tokens": embeddings.num_prompt_tokens,
        },
    }


def _unit(values: Sequence[float]) -> list[float]:
    """`values` at length 1. Zeros, which have no direction, stay zeros."""
    length = hypot(*values)
    return [value / length for value in values] if length else list(values)


def _base64(vector: Sequence[float]) -> str:
    """Little-endian float32, as OpenAI's clients read it."""
    floats = array("f", vector)
    if array("H", [1]).tobytes() != b"\1\0":
        floats.byteswap()
    return base64.b64encode(floats.tobytes()).decode()


def text_handler(
    kind: type[_B], answer: Callable[[_B, Backend, RequestRecord], Awaitable[object]]
) -> Handler:
    """Build the aiohttp handler of one such route: a body of `kind` in, JSON out."""
    decoder = msgspec.json.Decoder(kind)
    names = frozenset(field.name for field in msgspec.structs.fields(kind))

    def read(fields: dict[str, Raw]) -> _B:
        refuse_unbuilt(fields, honoured=names, refused=_REFUSED)
        return decoded_fields(decoder, fields, names=names)

    async def handle(http: web.Request) -> web.StreamResponse:
        """Parse, admit, answer. A client that leaves cancels it.

        Raises:
            GatewayError, EngineError, TokenizationError: the error middleware answers.
        """
        app, record = http.app, http[RECORD]
        app[ADMISSION].refuse_if_closed()
        with app[ADMISSION].reading() as reading:
            raw = await read_body(http, reading)
            body = await parsed(raw, partial(read_object, max_depth=app[CONFIG].max_json_depth, read=read))
        backend, model = app[BACKENDS].find(body.model)
        record.fields["model"] = model
        with app[ADMISSION].permit():
            try:
                value = await answer(body, backend, record)
            except GenerationFailed as error:
                record.fields["error"] = error.failed.detail
                raise
        return await send_whole(http, msgspec.json.encode(value))

    return handle


ROUTES: dict[str, Handler] = {
    "/tokenize": text_handler(TokenizeBody, _tokenize),
    "/detokenize": text_handler(DetokenizeBody, _detokenize),
    "/apply-template": text_handler(TemplateBody, _apply_template),
    "/v1/embeddings": text_handler(EmbeddingsBody, _embed),
}
"""All of them, served for POST."""
