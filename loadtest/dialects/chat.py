"""OpenAI's Chat Completions, and what other servers add to its deltas."""

from typing import Any

import msgspec

from loadtest.dialects import Ask, Dialect, Reading
from loadtest.openai_shapes import TimingsShape, UsageShape, ask_fields, read_error, read_usage


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct, gc=False):
    function: _Function | None = None


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The newer name; a server that sends both says the same twice."""
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: UsageShape | None = None
    timings: TimingsShape | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class _Chat:
    name = "chat"
    path = "/v1/chat/completions"

    def body(self, ask: Ask) -> dict[str, Any]:
        messages = [{"role": message.role, "content": message.text} for message in ask.messages]
        return ask_fields(ask, {"messages": messages})

    def read(self, data: bytes) -> Reading:
        """
        Raises:
            msgspec.DecodeError: no chat chunk.
        """
        chunk = _decode(data)
        text = reasoning = tool_text = ""
        finish_reason = None
        for choice in chunk.choices or ():
            finish_reason = choice.finish_reason or finish_reason
            delta = choice.delta
            if delta is None:
                continue
            text += delta.content or delta.refusal or ""
            reasoning += delta.reasoning_content or delta.reasoning or ""
            if delta.tool_calls:
                tool_text += _tool_text(delta.tool_calls)
        return Reading(
            text=text,
            reasoning=reasoning,
            tool_text=tool_text,
            finish_reason=finish_reason,
            usage=read_usage(chunk.usage, chunk.timings),
            error=read_error(chunk.error),
        )


def _tool_text(calls: list[_ToolCall]) -> str:
    functions = [call.function for call in calls if call.function is not None]
    return "".join((function.name or "") + (function.arguments or "") for function in functions)


DIALECT: Dialect = _Chat()
