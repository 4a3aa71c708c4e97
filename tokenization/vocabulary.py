"""Token id -> the bytes it stands for. Grammar masks and the detokeniser read this table."""

from collections.abc import Callable, Sequence
from functools import cached_property

from tokenization.errors import UnknownTokenId


def byte_alphabet() -> dict[str, int]:
    """The 256 printable characters that byte-level BPE writes bytes with, and the byte of each.

    Printable Latin-1 stands for itself; the other 68 bytes take U+0100 onwards, in order.

    Source: the GPT-2 release, `bytes_to_unicode`.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Undo the byte-level alphabet. A token written with other characters is its own UTF-8."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


class Vocabulary:
    """What each token id decodes to. Immutable; the table is made on first use."""

    def __init__(self, size: int, *, bytes_of: Callable[[int], bytes]) -> None:
        self.size = size
        self._bytes_of = bytes_of

    @cached_property
    def table(self) -> Sequence[bytes]:
        """Bytes by token id. Do not change it."""
        return [self._bytes_of(token_id) for token_id in range(self.size)]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token.

        Raises:
            UnknownTokenId: the id is negative or past the end.
        """
        if not 0 <= token_id < self.size:
            raise UnknownTokenId(token_id, vocab_size=self.size)
        return self.table[token_id]
