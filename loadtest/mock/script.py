"""What the mock server answers, and exactly when: options, and the steps of one answer."""

from typing import Literal

import msgspec

FailKind = Literal["none", "status", "error event", "cut", "no done", "hang", "garbage"]
"""A status that is not 200; an error event inside the stream; the socket closed in the middle; a whole
answer without `[DONE]`; silence on an open socket; bytes that are not an event."""

CacheKind = Literal["honest", "off", "warm", "silent"]
"""A real prefix memory; always 0; everything but the last token, whoever asks; no such field."""

UsageKind = Literal["final", "continuous", "never"]
"""`continuous`: where the client asks for it, as it must for `final`."""


class MockOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the mock behaves. A token is a word: whitespace parts text."""

    ttft_s: float = 0.1
    """From the request's last byte to its first content."""
    itl_s: float = 0.02
    """Between tokens. An event of k tokens comes k times as late."""
    prefill_s_per_token: float = 0.0
    """Added to `ttft_s` for each prompt token that the memory does not hold."""
    tokens_per_event: int = 1
    num_reasoning_tokens: int = 0
    """So many of the first tokens are reasoning."""
    role_chunk: bool = True
    """A first chunk at once that holds the role alone."""
    num_empty_deltas: int = 0
    """Chunks with empty content, spread over the time before the first token."""
    keepalive_s: float | None = None
    """A comment so often, before the first token too."""
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
    """Each event is cut into writes of so many bytes."""
    line_end: Literal["\n", "\r\n", "\r"] = "\n"
    model: str = "mock"
    api_key: str | None = None
    """Who does not bring it gets a 401."""
