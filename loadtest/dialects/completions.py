"""OpenAI's Completions: the prompt is one text, sent as it stands, without a chat template."""

from typing import Any

import msgspec

from loadtest.dialects import Ask, Dialect, Reading
from loadtest.openai_shapes import TimingsShape, UsageShape, ask_fields, read_error, read_usage


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: UsageShape | None = None
    timings: TimingsShape | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class _Completions:
    name = "completions"
    path = "/v1/completions"

    def body(self, ask: Ask) -> dict[str, Any]:
        return ask_fields(ask, {"prompt": "".join(message.text for message in ask.messages)})

    def read(self, data: bytes) -> Reading:
        """
        Raises:
            msgspec.DecodeError: no completion chunk.
        """
        chunk = _decode(data)
        choices = chunk.choices or ()
        return Reading(
            text="".join(choice.text or "" for choice in choices),
            finish_reason=next((each.finish_reason for each in choices if each.finish_reason), None),
            usage=read_usage(chunk.usage, chunk.timings),
            error=read_error(chunk.error),
        )


DIALECT: Dialect = _Completions()
