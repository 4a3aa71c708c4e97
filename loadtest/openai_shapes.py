"""What OpenAI's streaming endpoints have in common: how to ask for a stream, usage, errors.

Source: the API reference of Chat Completions and Completions; `continuous_usage_stats`, `reasoning` and
`timings` are additions of vLLM, of vLLM and others, and of llama.cpp.
"""

from typing import Any

import msgspec

from loadtest.dialects import Ask, Usage


def ask_fields(ask: Ask, prompt: dict[str, Any]) -> dict[str, Any]:
    """The body around a `prompt` of either endpoint."""
    options = {"include_usage": True}
    if ask.continuous_usage:
        options["continuous_usage_stats"] = True
    body: dict[str, Any] = {
        "model": ask.model,
        **prompt,
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": options,
    }
    if ask.ignore_eos:
        body["ignore_eos"] = True
    if ask.session:
        body["prompt_cache_key"] = ask.session
    body.update(ask.extra)
    return {name: value for name, value in body.items() if value is not None}


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class UsageShape(msgspec.Struct, gc=False):
    """`usage`, as it stands in an event."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    prompt_cache_hit_tokens: int | None = None
    """DeepSeek's name."""


class TimingsShape(msgspec.Struct, gc=False):
    """llama.cpp's `timings`: `prompt_n` leaves the cached tokens out, `cache_n` counts them."""

    cache_n: int | None = None


def read_usage(usage: UsageShape | None, timings: TimingsShape | None) -> Usage | None:
    if usage is None:
        return (
            None if timings is None or timings.cache_n is None else Usage(num_cached_tokens=timings.cache_n)
        )
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details is not None else None
    if cached is None:
        cached = usage.prompt_cache_hit_tokens
    if cached is None and timings is not None:
        cached = timings.cache_n
    return Usage(
        num_prompt_tokens=usage.prompt_tokens,
        num_output_tokens=usage.completion_tokens,
        num_cached_tokens=cached,
    )


def read_error(error: Any) -> str | None:
    """The message of an error object, or the text that some servers put in its place."""
    if error is None:
        return None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"]) or "an error without a message"
    return error if isinstance(error, str) and error else msgspec.json.encode(error).decode()
