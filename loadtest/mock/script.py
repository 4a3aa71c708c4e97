"""What the mock server answers, and exactly when: options, and the steps of one answer."""

from collections.abc import Iterator
from typing import Literal

import msgspec

from loadtest.errors import PlanInvalid

FailKind = Literal["none", "status", "error event", "cut", "no done", "hang", "garbage"]
"""A status that is not 200; an error event inside the stream; the socket closed in the middle; a whole
answer without `[DONE]`; silence on an open socket; bytes that are not an event."""

CacheKind = Literal["honest", "off", "warm", "silent"]
"""A real prefix memory; always 0; everything but the last token, whoever asks; no such field."""

UsageKind = Literal["final", "continuous", "never"]
"""`continuous`: with each event, where the client asks for it. `final` comes only to who asks, too."""

WORD = " word"
CREATED = b'"created":0,'
"""Where the time of writing goes, if it is asked for."""
COMMENT = b": keep-alive"


class MockOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the mock behaves. A token is a word: whitespace parts text."""

    ttft_s: float = 0.1
    """From the request's last byte to its first content."""
    itl_s: float = 0.02
    """Between tokens. The first event holds one token; an event comes when its last token does."""
    prefill_s_per_token: float = 0.0
    """Added to `ttft_s` for each prompt token that the memory does not hold."""
    tokens_per_event: int = 1
    num_reasoning_tokens: int = 0
    """So many of the first tokens are reasoning (chat only)."""
    role_chunk: bool = True
    """A first chunk at once that holds the role alone (chat only)."""
    num_empty_deltas: int = 0
    """Chunks with empty content, spread over the time before the first token."""
    keepalive_s: float | None = None
    """A comment after so much silence, before the first token too."""
    stall_after_tokens: int | None = None
    """Each stream stops for `stall_s` once it has so many tokens."""
    stall_at_s: float | None = None
    """The whole server sends nothing from here, counted from its first request, for `stall_s`."""
    stall_s: float = 3.0
    max_running: int | None = None
    """More requests than this wait their turn, first come first served."""
    fail: FailKind = "none"
    fail_after_tokens: int = 3
    fail_every: int = 1
    """Each n-th request fails."""
    fail_status: int = 503
    usage: UsageKind = "continuous"
    cached: CacheKind = "honest"
    cache_block_tokens: int = 1
    """Cached tokens come in multiples of this."""
    piece_bytes: int | None = None
    """Each write is cut into pieces of so many bytes, a millisecond apart."""
    line_end: Literal["\n", "\r\n", "\r"] = "\n"
    stamp: bool = False
    """`created` of each event holds the time it was written at: seconds of `time.monotonic()`, which
    processes of one machine share. So a client's error is known apart from the mock's own."""
    model: str = "mock"
    api_key: str | None = None
    """Who does not bring it gets a 401."""


_BOUNDS: dict[str, tuple[float, float]] = {
    "ttft_s": (0, 3600), "itl_s": (0, 3600), "prefill_s_per_token": (0, 60), "tokens_per_event": (1, 4096),
    "num_reasoning_tokens": (0, 1 << 20), "num_empty_deltas": (0, 10_000), "keepalive_s": (0.001, 3600),
    "stall_after_tokens": (0, 1 << 20), "stall_at_s": (0, 86_400), "stall_s": (0, 3600),
    "max_running": (1, 1 << 20), "fail_after_tokens": (0, 1 << 20), "fail_every": (1, 1 << 20),
    "fail_status": (400, 599), "cache_block_tokens": (1, 4096), "piece_bytes": (1, 1 << 20),
}  # fmt: skip


def check_options(options: MockOptions) -> None:
    """
    Raises:
        PlanInvalid: naming the option and its bound.
    """
    for name, (low, high) in _BOUNDS.items():
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            raise PlanInvalid(f"mock option {name} is {value}; it must be {low:g} to {high:g}")


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What the mock understood of a request."""

    is_chat: bool
    words: list[str]
    max_tokens: int
    streams: bool
    include_usage: bool
    continuous_usage: bool


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that are due so long after the answer began. `then` is what follows the last of them."""

    offset_s: float
    data: bytes
    num_tokens: int = 0
    """With content, in these bytes."""
    then: Literal["go on", "end", "cut", "hang"] = "go on"


class Script:
    """One answer of the mock as steps in order of time."""

    def __init__(self, options: MockOptions, prompt: Prompt, *, request_id: str, num_cached: int) -> None:
        self._options = options
        self._prompt = prompt
        self._num_cached = num_cached
        self._line_end = options.line_end.encode()
        kind = "chat.completion.chunk" if prompt.is_chat else "text_completion"
        model = msgspec.json.encode(options.model).decode()
        self._envelope = (
            f'data: {{"id":"{request_id}","object":"{kind}","created":0,"model":{model},"choices":['
        )
        self._opening = self._envelope + '{"index":0,'

    @property
    def first_token_s(self) -> float:
        num_new = len(self._prompt.words) - self._num_cached
        return self._options.ttft_s + num_new * self._options.prefill_s_per_token

    def token_s(self, index: int) -> float:
        """When token `index` exists, from the answer's beginning."""
        stall_after = self._options.stall_after_tokens
        stall_s = self._options.stall_s if stall_after is not None and index >= stall_after else 0.0
        return self.first_token_s + index * self._options.itl_s + stall_s

    def steps(self, *, fails: bool) -> Iterator[Step]:
        """With comments in the silences, where asked for."""
        steps = self._failing() if fails else self._whole()
        silence_s = self._options.keepalive_s
        if silence_s is None:
            yield from steps
            return
        last_s = 0.0
        for step in steps:
            while step.offset_s - last_s > silence_s:
                last_s += silence_s
                yield Step(offset_s=last_s, data=COMMENT + self._line_end * 2)
            last_s = step.offset_s
            yield step

    def whole_answer(self) -> Step:
        """For a client that does not stream."""
        text = WORD * self._prompt.max_tokens
        message = (
            {"message": {"role": "assistant", "content": text}} if self._prompt.is_chat else {"text": text}
        )
        body = {
            "object": "chat.completion" if self._prompt.is_chat else "text_completion",
            "model": self._options.model,
            "choices": [{"index": 0, **message, "finish_reason": "length"}],
            "usage": self._usage(self._prompt.max_tokens),
        }
        offset_s = self.token_s(self._prompt.max_tokens - 1)
        return Step(offset_s=offset_s, data=msgspec.json.encode(body), num_tokens=self._prompt.max_tokens)

    def _before_content(self) -> Iterator[Step]:
        if self._prompt.is_chat and self._options.role_chunk:
            yield Step(
                offset_s=0.0, data=self._event('"delta":{"role":"assistant","content":""}', num_output=0)
            )
        num_empty = self._options.num_empty_deltas
        for index in range(num_empty):
            offset_s = self.first_token_s * (index + 1) / (num_empty + 1)
            yield Step(offset_s=offset_s, data=self._content("", num_output=0))

    def _groups(self, num_tokens: int) -> Iterator[tuple[int, int]]:
        """First and past-the-last token of each event: one token, then `tokens_per_event` each."""
        start = 0
        while start < num_tokens:
            end = min(num_tokens, start + (self._options.tokens_per_event if start else 1))
            yield start, end
            start = end

    def _content_steps(self, num_tokens: int) -> Iterator[Step]:
        for start, end in self._groups(num_tokens):
            num_thought = min(max(self._options.num_reasoning_tokens - start, 0), end - start)
            data = b""
            if num_thought:
                data += self._content(WORD * num_thought, num_output=start + num_thought, is_reasoning=True)
            if end - start > num_thought:
                data += self._content(WORD * (end - start - num_thought), num_output=end)
            yield Step(offset_s=self.token_s(end - 1), data=data, num_tokens=end - start)

    def _whole(self) -> Iterator[Step]:
        yield from self._before_content()
        yield from self._content_steps(self._prompt.max_tokens)
        last_s = self.token_s(self._prompt.max_tokens - 1)
        yield Step(offset_s=last_s, data=self._closing() + b"data: [DONE]" + self._line_end * 2, then="end")

    def _failing(self) -> Iterator[Step]:
        kind = self._options.fail
        if kind == "no done":
            yield from self._before_content()
            yield from self._content_steps(self._prompt.max_tokens)
            last_s = self.token_s(self._prompt.max_tokens - 1)
            yield Step(offset_s=last_s, data=self._closing(), then="end")
            return
        yield from self._before_content()
        num_tokens = min(self._options.fail_after_tokens, self._prompt.max_tokens)
        yield from self._content_steps(num_tokens)
        last_s = self.token_s(num_tokens - 1) if num_tokens else self.first_token_s
        if kind == "error event":
            error = (
                b'data: {"error":{"message":"the mock was told to fail","type":"server_error","code":null}}'
            )
            yield Step(offset_s=last_s, data=error + self._line_end * 2, then="end")
        elif kind == "garbage":
            yield Step(offset_s=last_s, data=b"data: {this is no JSON" + self._line_end * 2, then="end")
        else:
            assert kind in {"cut", "hang"}, f"{kind} is no failure of a stream"
            yield Step(offset_s=last_s, data=b"", then="cut" if kind == "cut" else "hang")

    def _content(self, text: str, *, num_output: int, is_reasoning: bool = False) -> bytes:
        if not self._prompt.is_chat:
            return self._event(f'"text":"{text}"', num_output=num_output)
        field = "reasoning_content" if is_reasoning else "content"
        return self._event(f'"delta":{{"{field}":"{text}"}}', num_output=num_output)

    def _event(self, choice: str, *, num_output: int, finish_reason: str = "null") -> bytes:
        """`choice` and this file's other texts hold nothing that JSON would escape."""
        usage = ""
        if self._prompt.include_usage and self._options.usage != "never":
            usage = ',"usage":null'
            if self._options.usage == "continuous" and self._prompt.continuous_usage:
                usage = f',"usage":{self._usage_text(num_output)}'
        text = f'{self._opening}{choice},"logprobs":null,"finish_reason":{finish_reason}}}]{usage}}}'
        return text.encode() + self._line_end * 2

    def _closing(self) -> bytes:
        """The finish reason, and usage for who wants it."""
        num_output = self._prompt.max_tokens
        choice = '"delta":{}' if self._prompt.is_chat else '"text":""'
        data = self._event(choice, num_output=num_output, finish_reason='"length"')
        if self._prompt.include_usage and self._options.usage != "never":
            text = f'{self._envelope}],"usage":{self._usage_text(num_output)}}}'
            data += text.encode() + self._line_end * 2
        return data

    def _usage_text(self, num_output: int) -> str:
        num_prompt = len(self._prompt.words)
        details = ""
        if self._options.cached != "silent":
            details = f',"prompt_tokens_details":{{"cached_tokens":{self._num_cached}}}'
        return (
            f'{{"prompt_tokens":{num_prompt},"completion_tokens":{num_output},'
            f'"total_tokens":{num_prompt + num_output}{details}}}'
        )

    def _usage(self, num_output: int) -> msgspec.Raw:
        return msgspec.Raw(self._usage_text(num_output).encode())
