"""What a generation tells its reader, in order: `Started`, some `TextDelta`s, then one terminal event.

A terminal event is `Finished` or `Failed`; nothing follows it. An answer may have several choices
(`n`, lists of prompts): their deltas interleave, told apart by `index`, and each of them but the
last to end has its own `ChoiceEnded`.
"""

from enum import StrEnum

import msgspec

LEAST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON cannot write."""


class EndReason(StrEnum):
    """Why an answer is complete. Dialects translate these."""

    STOP = "stop"
    LENGTH = "length"


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one answer, all choices together; a prompt counts once, however many share it.

    `num_cached_tokens` of the prompts were not computed again.
    """

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    queue_s: float = 0.0
    """Seconds until the first of them was computed: for the log alone."""


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """The backend took the request; from here on it fails by `Failed` only."""

    num_prompt_tokens: int


class AnswerToken(msgspec.Struct, frozen=True):
    """One token of a text and how likely it was, where that was asked for.

    `logprob` is None for the first token of a prompt, which nothing precedes. `top` holds the most
    likely tokens in its place, each with its own. All are finite: `LEAST_LOGPROB` at the least.
    `offset` is the character of the choice's text where the token begins.
    """

    token: bytes
    logprob: float | None
    top: tuple[tuple[bytes, float], ...]
    offset: int


class TextDelta(msgspec.Struct, frozen=True):
    """More of one choice: whole characters. Never empty but for tokens that have no text of their own."""

    text: str
    index: int = 0
    tokens: tuple[AnswerToken, ...] = ()
    """The tokens that begin in `text`, if log-probabilities were asked for."""


class ChoiceEnded(msgspec.Struct, frozen=True, kw_only=True):
    """One choice is complete and others are not."""

    index: int
    reason: EndReason
    stop_string: str | None = None


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The last choice is complete, and the answer with it. `stop_string` ended that choice, if one did."""

    reason: EndReason
    usage: Usage
    stop_string: str | None = None
    index: int = 0


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """The answer breaks off. `code` is a stable code of `gateway.errors`; `message` is for people.

    `detail` is for the log alone: clients are told nothing of the inside.
    """

    code: str
    message: str
    usage: Usage
    detail: str = ""


Event = Started | TextDelta | ChoiceEnded | Finished | Failed
