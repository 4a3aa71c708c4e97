"""Text -> token ids and back: the contract, and the one assembly every tokeniser is made with."""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Protocol

from tokenization.added_tokens import AddedToken, AddedTokens
from tokenization.errors import BadText
from tokenization.prompt import RenderedPrompt
from tokenization.segment_memory import SegmentMemory
from tokenization.space_prefix import PieceReader, SpacePrefix
from tokenization.vocabulary import Vocabulary


class Tokenizer(Protocol):
    """One vocabulary. Every method may be called from any thread and depends on its arguments alone.

    Long texts are encoded with the GIL released, so call `encode` from a worker thread.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None:
        """The one the checkpoint itself names; templates write it."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends the model's turn."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Control tokens: never decoded to text, never made from user text."""

    @property
    def added_tokens(self) -> tuple[AddedToken, ...]:
        """Literals that are one token; the special ones among them are the control tokens."""

    @property
    def added_token_ids(self) -> frozenset[int]: ...

    @property
    def space_prefix(self) -> SpacePrefix:
        """Where encoding puts a space that decoding takes away again."""

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of everything that decides what `encode` and `decode` return."""

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Encode plain text.

        Args:
            parse_special: let control tokens in `text` count. Never for text a user wrote.
            add_bos: whether to begin with the BOS token; None does as the checkpoint says.

        Raises:
            BadText: `text` holds a lone surrogate.
        """

    def encode_rendered(self, prompt: RenderedPrompt, *, scope: str = "") -> list[int]:
        """Encode a chat prompt: the template's control tokens count, the user's are plain text.

        There is exactly one BOS where the checkpoint wants one: the template's or ours. What a scope's
        earlier prompts had encoded already is remembered for a while.

        Args:
            scope: whose prompt it is, such as a tenant. Nothing of one scope shows in another.
        """

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Bytes that are not UTF-8 become U+FFFD."""

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to the output; control tokens give their literal."""


class SegmentedTokenizer:
    """A `Tokenizer` made of added tokens, a vocabulary and a function that encodes plain segments.

    `memory` is its only state, and it changes no result.
    """

    def __init__(
        self,
        encode_segments: Callable[[Sequence[str]], Iterable[list[int]]],
        *,
        added_tokens: AddedTokens,
        vocabulary: Vocabulary,
        bos_token_id: int | None,
        eos_token_id: int | None,
        eos_token_ids: frozenset[int],
        adds_bos: bool,
        fingerprint: str,
        encode_start: Callable[[Sequence[str]], Iterable[list[int]]] | None = None,
        space_prefix: SpacePrefix = "none",
    ) -> None:
        """
        Args:
            encode_start: encodes the segment that begins a text, where that differs from the others.
        """
        assert not adds_bos or bos_token_id is not None
        self._encode_segments = encode_segments
        self._encode_start = encode_start or encode_segments
        self.memory = SegmentMemory(encode_segments)
        self.space_prefix: SpacePrefix = space_prefix
        self._added = added_tokens
        self._vocabulary = vocabulary
        self._adds_bos = adds_bos
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.eos_token_ids = eos_token_ids
        self.special_token_ids = frozenset(t.token_id for t in added_tokens.tokens if t.special)
        self.fingerprint = fingerprint

    @property
    def vocab_size(self) -> int:
        return self._vocabulary.size

    @property
    def added_tokens(self) -> tuple[AddedToken, ...]:
        return self._added.tokens

    @cached_property
    def added_token_ids(self) -> frozenset[int]:
        return frozenset(token.token_id for token in self._added.tokens)

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool | None = None) -> list[int]:
        refuse_surrogates(text, "text")
        ids = self._encode_pieces(self._added.split(text, parse_special=parse_special), self._encode_segments)
        if self._adds_bos if add_bos is None else add_bos:
            ids = self._begin_with_bos(ids)
        return ids

    def encode_rendered(self, prompt: RenderedPrompt, *, scope: str = "") -> list[int]:
        pieces = self._added.split(prompt.marked_text, parse_special=True)
        remembering = partial(self.memory.encode_segments, scope=scope)
        unmarked = [prompt.unmark(p) if isinstance(p, str) else p for p in pieces]
        ids = self._encode_pieces(unmarked, remembering)
        return self._begin_with_bos(ids) if self._adds_bos else ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        reader = PieceReader(self, skip_special=skip_special)
        raw = b"".join([reader.piece(token_id) for token_id in ids])
        return raw.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._vocabulary.token_bytes(token_id)

    def _encode_pieces(
        self, pieces: Sequence[str | int], encode: Callable[[Sequence[str]], Iterable[Sequence[int]]]
    ) -> list[int]:
        first = pieces[0] if pieces else 0
        ids: list[int] = []
        if isinstance(first, str):
            ids.extend(next(iter(self._encode_start([first]))))
            pieces = pieces[1:]
        encoded = iter(encode([piece for piece in pieces if isinstance(piece, str)]))
        for piece in pieces:
            if isinstance(piece, str):
                ids.extend(next(encoded))
            else:
                ids.append(piece)
        return ids

    def _begin_with_bos(self, ids: list[int]) -> list[int]:
        if self.bos_token_id is None or ids[:1] == [self.bos_token_id]:
            return ids
        return [self.bos_token_id, *ids]


def refuse_surrogates(text: str, path: str) -> None:
    """Half of a surrogate pair is not text: it has no UTF-8.

    Raises:
        BadText: naming `path` and the place.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code_point = f"U+{ord(text[error.start]):04X}"
        raise BadText(path, f"lone surrogate {code_point} at character {error.start}") from None
