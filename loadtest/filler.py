"""Text for planned segments: the same id gives the same words on every server.

Words are short, common and one token each (with the space before it) in nearly all vocabularies, so
that a plan's tokens are the server's tokens within a few per cent, whatever its tokenizer. The nonce
stands in every word's choice: another nonce is another text from the first word on, which no cache
of an earlier run has seen.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import groupby

from loadtest.dialects import Message
from loadtest.errors import PlanInvalid
from loadtest.plan import PlannedRequest, Segment
from loadtest.words import WORDS

MIN_WORDS = 64
"""Fewer make different segments begin alike by chance, which a prefix cache would find."""


MAX_KEPT = 64 << 20
"""Characters."""


class Filler:
    """Words and a nonce. `text` depends on both and its arguments alone; what it made it may keep."""

    def __init__(self, words: Sequence[str] = WORDS, *, nonce: str = "") -> None:
        """Raises PlanInvalid for words that are too few or not different."""
        if len(set(words)) < MIN_WORDS or len(set(words)) < len(words):
            raise PlanInvalid(
                f"there are {len(set(words))} different words; {MIN_WORDS} or more must be, none twice"
            )
        self._words = tuple(f" {word}" for word in words)
        self._nonce = nonce
        self._texts: dict[tuple[str, int], str] = {}
        self._num_kept = 0

    @property
    def nonce(self) -> str:
        return self._nonce

    def text(self, segment_id: str, num_tokens: int) -> str:
        """So many words, each with a space before it. A shorter text is the beginning of a longer one."""
        kept = self._texts.get((segment_id, num_tokens))
        if kept is not None:
            return kept
        key = f"{len(self._nonce)}:{self._nonce}:{segment_id}".encode()
        # An extendable-output hash: asking for more bytes leaves the first ones as they were.
        stream = hashlib.shake_128(key).digest(4 * num_tokens)
        words, number = self._words, len(self._words)
        text = "".join([words[value % number] for value in memoryview(stream).cast("I")])
        self._keep(segment_id, num_tokens, text)
        return text

    def _keep(self, segment_id: str, num_tokens: int, text: str) -> None:
        """A history is asked for again with every turn: making it anew would hold up the client's loop."""
        self._num_kept += len(text)
        if self._num_kept > MAX_KEPT:
            self._texts.clear()
            self._num_kept = len(text)
        self._texts[segment_id, num_tokens] = text


def messages(
    request: PlannedRequest, filler: Filler, history: Mapping[str, str] | None = None
) -> tuple[Message, ...]:
    """The request's prompt: neighbours of one role are one message.

    Args:
        history: live answers by segment id (`plan.answer_segments` tells whose they are); they stand in
            place of the recorded ones. An empty answer leaves its message out.
    """
    live = history or {}

    def text(segment: Segment) -> str:
        if segment.role == "assistant" and segment.segment_id in live:
            return live[segment.segment_id]
        return filler.text(segment.segment_id, segment.num_tokens)

    parts = ((segment.role, text(segment)) for segment in request.segments)
    told = [(role, words) for role, words in parts if words]
    return tuple(
        Message(role, "".join(words for _, words in group))
        for role, group in groupby(told, key=lambda part: part[0])
    )
