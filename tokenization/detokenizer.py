"""Token ids -> text, as they come. Never half a character."""

import codecs
from array import array
from bisect import bisect_left
from collections.abc import Iterable

from tokenization.space_prefix import PieceReader
from tokenization.tokenizer import Tokenizer


class Detokenizer:
    """Owned by one generation. The pieces joined equal `tokenizer.decode` of all the ids.

    Invariant: `_held` is an incomplete but so far valid UTF-8 sequence of at most 3 bytes.
    Work per token does not grow with the number of tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, continues_text: bool = False) -> None:
        """
        Args:
            continues_text: the tokens go on after a plain prompt, so a leading space is a real one.
        """
        self._reader = PieceReader(tokenizer, skip_special=True, continues_text=continues_text)
        self._held = b""
        self._num_chars = 0
        self._first_chars = array("L")  # per token: index of the character its first byte belongs to
        self._finished = False

    @property
    def num_tokens(self) -> int:
        return len(self._first_chars)

    @property
    def num_chars(self) -> int:
        """Characters returned so far."""
        return self._num_chars

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens; returns the characters they complete. Control tokens add nothing.

        Raises:
            UnknownTokenId: an id is outside the vocabulary; the tokens before it were added.
        """
        assert not self._finished, "push after finish"
        pieces: list[str] = []
        for token_id in ids:
            piece = self._reader.piece(token_id)
            self._first_chars.append(self._num_chars + self._held_before(piece))
            text, self._held = _whole_characters(self._held + piece)
            self._num_chars += len(text)
            pieces.append(text)
        return "".join(pieces)

    def finish(self) -> str:
        """End the output: a character cut off in the middle becomes one U+FFFD."""
        assert not self._finished, "finish twice"
        self._finished = True
        text = self._held.decode(errors="replace")
        self._held = b""
        self._num_chars += len(text)
        return text

    def num_tokens_before(self, offset: int) -> int:
        """How many tokens lie wholly or partly before character `offset` of the text.

        A token without text counts as standing where it was generated.
        """
        return bisect_left(self._first_chars, offset)

    def first_char(self, token_index: int) -> int:
        """The character of the text in which that token begins, or before which it stands without text."""
        return self._first_chars[token_index]

    def check(self) -> None:
        """Assert the invariant. Tests call this after every operation."""
        assert len(self._held) <= 3
        assert not self._finished or not self._held
        held = self._held.decode(errors="replace")
        assert held in ("", "\ufffd")
        assert list(self._first_chars) == sorted(self._first_chars)
        assert not self._first_chars or self._first_chars[-1] <= self._num_chars

    def _held_before(self, piece: bytes) -> int:
        """How many characters `_held` turns into if `piece` does not continue it.

        A sequence that is continued is one character with the first byte of `piece`; one that is
        broken off has become U+FFFD and the byte begins another.
        """
        if not self._held or not piece:
            return 0
        return len((self._held + piece[:1]).decode(errors="replace")) - 1


def _whole_characters(raw: bytes) -> tuple[str, bytes]:
    """The characters that are complete, and the bytes that may yet become one."""
    text, consumed = codecs.utf_8_decode(raw, "replace", False)
    held = raw[consumed:]
    if held[:1] == b"\xed" and held[1:2] >= b"\xa0":
        # CPython waits for the third byte of an encoded surrogate, which never makes a character.
        return text + held.decode(errors="replace"), b""
    return text, held
