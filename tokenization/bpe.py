"""Byte-level BPE over plain segments, with the GIL released.

`tokenizers` releases the GIL in `encode_batch` and `encode_batch_fast` and holds it in `encode`:
127k tokens through `encode` stop the event loop for over 200 ms. So everything goes in batches, and
long segments are cut first, where every pre-tokeniser here cuts anyway.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from tokenization.pre_tokenizers import PreTokenization

PART_CHARS = 16_384
"""Parts of about this length: their ids take well under a millisecond to turn into Python integers."""

# Between an ASCII letter and a space before another, every pattern in `pre_tokenizers` ends a word and
# looks no further: words never run across a space, and only white space looks ahead. A property test
# holds every family to it.
_WORD_BORDER = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")


class ByteLevelBPE:
    """Encodes segments that hold no control tokens. Immutable, so any thread may use it."""

    def __init__(
        self, vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], *, rule: PreTokenization
    ) -> None:
        self._rust = RustTokenizer(BPE(dict(vocab), list(merges), ignore_merges=rule.ignore_merges))
        self._rust.pre_tokenizer = rule.pre_tokenizer()
        if (normalizer := rule.normalizer()) is not None:
            self._rust.normalizer = normalizer

    def encode_segments(self, segments: Sequence[str]) -> Iterator[list[int]]:
        """The ids of each segment. Characters the vocabulary has no bytes for are left out, as in HF."""
        parts = [list(cut_at_words(segment)) for segment in segments]
        flat = [part for segment_parts in parts for part in segment_parts]
        encodings = self._rust.encode_batch_fast(flat, add_special_tokens=False)
        encodings.reverse()  # popped one by one: freeing 127k token strings at once would hold the GIL
        for segment_parts in parts:
            ids: list[int] = []
            for _ in segment_parts:
                ids.extend(encodings.pop().ids)
            yield ids


def cut_at_words(text: str, *, part_chars: int = PART_CHARS) -> Iterator[str]:
    """Cut so that the parts encoded one by one give the ids of the whole.

    Parts have at least `part_chars` characters, more where no safe place comes, less at the end.
    """
    start = 0
    while len(text) - start > part_chars:
        border = _WORD_BORDER.search(text, start + part_chars)
        if border is None:
            break
        yield text[start : border.start()]
        start = border.start()
    if start < len(text):
        yield text[start:]
