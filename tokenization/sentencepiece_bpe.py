"""Sentencepiece BPE out of a GGUF vocabulary: `tokenizer.ggml.model = "llama"`.

The original merges, of all neighbours that form a token, those with the best score first. Hugging
Face's BPE does the same from a list of merges, so the list is made from the scores: best first, and
for one token every way to cut it in two. Characters without a token become their bytes' tokens.

Source: sentencepiece `bpe_model.cc`; llama.cpp `llama-vocab.cpp` (`llm_tokenizer_spm`).
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer as RustTokenizer

from tokenization.json_tokenizer import SPACE, Refusing

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_token(text: str) -> bytes | None:
    """`<0x0A>` -> b"\\n"; None for other tokens."""
    match = BYTE_TOKEN.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else None


def merges_by_score(mergeable: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every pair of tokens that forms a token, the best score first.

    One token's pairs stand with the shorter left half first: where two overlap, the leftmost one
    is usually that, and sentencepiece takes the leftmost.
    """
    merges: list[tuple[str, str]] = []
    for token in sorted(mergeable, key=lambda text: -mergeable[text]):
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        merges += [(left, right) for left, right in cuts if left in mergeable and right in mergeable]
    return merges


class SentencePieceBPE:
    """Encodes segments that hold no control tokens. Immutable, so any thread may use it."""

    def __init__(
        self,
        tokens: Sequence[str],
        scores: Sequence[float],
        *,
        mergeable: set[int],
        unknown: int | None,
        add_space: bool,
    ) -> None:
        """
        Args:
            mergeable: ids of ordinary tokens; the others are no text's outcome, but for byte tokens.
            unknown: stands for characters without tokens; None leaves them out.
        """
        hidden = {i for i, text in enumerate(tokens) if i not in mergeable and byte_token(text) is None}
        # Control tokens keep their ids under names that nobody can guess.
        names = [
            f"\U0010ffff{secrets.token_hex(16)}" if i in hidden else text for i, text in enumerate(tokens)
        ]
        merges = merges_by_score({tokens[i]: scores[i] for i in mergeable})
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        prepend = {"type": "Prepend", "prepend": SPACE}
        definition: dict[str, object] = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
            "normalizer": {"type": "Sequence", "normalizers": [prepend, spaces] if add_space else [spaces]},
            "pre_tokenizer": None, "post_processor": None, "decoder": None,
            "model": {
                "type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                "unk_token": None if unknown is None else names[unknown], "fuse_unk": True,
                "byte_fallback": any(byte_token(text) is not None for text in tokens), "ignore_merges": False,
                "vocab": {text: i for i, text in enumerate(names)}, "merges": merges,
            },
        }  # fmt: skip
        with Refusing("tokenizer.ggml"):
            self._rust: RustTokenizer = RustTokenizer.from_str(json.dumps(definition))

    def encode_segments(self, segments: Sequence[str]) -> list[list[int]]:
        """The ids of each segment, with the GIL released."""
        with Refusing("the text"):
            encodings = self._rust.encode_batch_fast(list(segments), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]
