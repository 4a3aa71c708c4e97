"""The space that sentencepiece-style vocabularies put before a text, and its removal on the way back.

Such a vocabulary writes words with their leading space, so that "Hello" is encoded as " Hello".
Decoding drops that one space again, at the same places, or each round would add one.
"""

from collections.abc import Set as AbstractSet
from typing import Literal, Protocol

SpacePrefix = Literal["none", "first", "each"]
"""Where `encode` puts a space: nowhere, before a text, or before each piece between added tokens."""


class Pieces(Protocol):
    """What `PieceReader` needs of a tokeniser."""

    @property
    def space_prefix(self) -> SpacePrefix: ...
    @property
    def special_token_ids(self) -> frozenset[int]: ...
    @property
    def added_token_ids(self) -> AbstractSet[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...


class PieceReader:
    """Turns the tokens of one text into its bytes, one after the other."""

    def __init__(self, tokenizer: Pieces, *, skip_special: bool, continues_text: bool = False) -> None:
        """
        Args:
            continues_text: the tokens go on after other text, so a leading space is a real one.
        """
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids if skip_special else frozenset()
        self._added = tokenizer.added_token_ids
        self._each = tokenizer.space_prefix == "each"
        self._drops = tokenizer.space_prefix != "none" and not continues_text

    def piece(self, token_id: int) -> bytes:
        """What the token adds to the text.

        Raises:
            UnknownTokenId: the id is outside the vocabulary.
        """
        if token_id in self._added:
            hidden = token_id in self._hidden
            self._drops = self._each or (self._drops and hidden)
            return b"" if hidden else self._tokenizer.token_bytes(token_id)
        raw = self._tokenizer.token_bytes(token_id)
        if self._drops and raw:
            self._drops = False
            return raw.removeprefix(b" ")
        return raw
