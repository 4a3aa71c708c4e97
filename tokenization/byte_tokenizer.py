"""One token per byte: no checkpoint, no download, every text. For tests and tiny models."""

import hashlib
import json
from collections.abc import Sequence

from tokenization.added_tokens import AddedToken, AddedTokens
from tokenization.tokenizer import SegmentedTokenizer, Tokenizer
from tokenization.vocabulary import Vocabulary

DEFAULT_CONTROL_TOKENS = ("<|bos|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")


def byte_tokenizer(
    control_tokens: Sequence[str] = DEFAULT_CONTROL_TOKENS,
    *,
    bos: str | None = "<|bos|>",
    eos: Sequence[str] = ("<|im_end|>", "<|endoftext|>"),
    adds_bos: bool = False,
) -> Tokenizer:
    """Ids 0 to 255 are bytes; `control_tokens` follow from 256, in order."""
    id_of = {text: 256 + n for n, text in enumerate(control_tokens)}
    definition = json.dumps([list(control_tokens), bos, list(eos), adds_bos])
    return SegmentedTokenizer(
        lambda segments: [list(segment.encode()) for segment in segments],
        added_tokens=AddedTokens(AddedToken(text, i, special=True) for text, i in id_of.items()),
        vocabulary=Vocabulary(
            256 + len(control_tokens),
            bytes_of=lambda i: bytes([i]) if i < 256 else control_tokens[i - 256].encode(),
        ),
        bos_token_id=None if bos is None else id_of[bos],
        eos_token_id=id_of[eos[0]] if eos else None,
        eos_token_ids=frozenset(id_of[text] for text in eos),
        adds_bos=adds_bos,
        fingerprint=hashlib.sha256(b"bytes\0" + definition.encode()).hexdigest(),
    )
