"""Vocabularies small enough to write down: every byte, a few merges, a few added tokens."""

import json
from pathlib import Path
from typing import Any

from tokenization.vocabulary import byte_alphabet

DATA = Path(__file__).parent / "data"
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
WORDS = (
    "he",
    "ll",
    "hell",
    "hello",
    "Ġw",
    "or",
    "Ġwor",
    "ld",
    "Ġworld",
    "im",
    "end",
    "|>",
    "<|",
    "im_",
    "Ġthe",
)
MERGES = (
    "h e",
    "l l",
    "he ll",
    "hell o",
    "Ġ w",
    "o r",
    "Ġw or",
    "l d",
    "Ġwor ld",
    "| >",
    "< |",
    "i m",
    "im _",
)


def tiny_metadata(pre: str = "gpt-2", *, user_defined: tuple[str, ...] = ()) -> dict[str, Any]:
    """Control tokens come first, then user-defined ones, then bytes, then words."""
    tokens = [*CONTROL, *user_defined, *byte_alphabet(), *WORDS]
    num_ordinary = len(tokens) - len(CONTROL) - len(user_defined)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(CONTROL) + [4] * len(user_defined) + [1] * num_ordinary,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DATA / name).read_text())
    return loaded


def qwen2_subset() -> tuple[dict[str, Any], list[int], list[tuple[str, list[int]]]]:
    """Metadata of a part of Qwen2's vocabulary, its tokens' original ids, and known encodings."""
    known = load("qwen2_vectors.json")
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": known["tokens"],
        "tokenizer.ggml.merges": known["merges"],
    }
    return metadata, known["ids"], known["vectors"]
