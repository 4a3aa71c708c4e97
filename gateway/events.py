"""What a generation tells its reader, in order: `Started`, some `TextDelta`s, then one terminal event.

A terminal event is `Finished` or `Failed`; nothing follows it.
"""

from enum import StrEnum

import msgspec


class EndReason(StrEnum):
    """Why an answer is complete. Dialects translate these."""

    STOP = "stop"
    LENGTH = "length"


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one generation. `num_cached_tokens` of the prompt were not computed again."""

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """The backend took the request; from here on it fails by `Failed` only."""

    num_prompt_tokens: int


class TextDelta(msgspec.Struct, frozen=True):
    """More of the answer: whole characters, never empty."""

    text: str


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The answer is complete. `stop_string` is the one that ended it, if one did."""

    reason: EndReason
    usage: Usage
    stop_string: str | None = None


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """The answer breaks off. `code` is a stable code of `gateway.errors`; `message` is for people.

    `detail` is for the log alone: clients are told nothing of the inside.
    """

    code: str
    message: str
    usage: Usage
    detail: str = ""


Event = Started | TextDelta | Finished | Failed
