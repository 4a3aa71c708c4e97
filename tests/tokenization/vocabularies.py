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


SPM_WORDS = ("▁he", "▁hell", "▁hello", "▁w", "▁wor", "▁world", "he", "ll", "or", "ld", "▁a", "▁▁", "▁▁▁▁")
SPM_MERGES = (
    ("▁", "▁"), ("▁▁", "▁▁"), ("h", "e"), ("▁", "he"), ("l", "l"), ("▁he", "ll"), ("▁hell", "o"), ("▁", "w"),
    ("o", "r"), ("▁w", "or"), ("l", "d"), ("▁wor", "ld"), ("▁", "a"),
)  # fmt: skip


def byte_level_json() -> dict[str, Any]:
    """`tiny_metadata` as a `tokenizer.json`."""
    tokens = tiny_metadata()["tokenizer.ggml.tokens"]
    return {
        "version": "1.0",
        "added_tokens": [_added(text, n) for n, text in enumerate(CONTROL)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": False,
            "use_regex": True,
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe({text: n for n, text in enumerate(tokens)}, [merge.split(" ") for merge in MERGES]),
    }


def spm_json(prefix: str) -> dict[str, Any]:
    """A sentencepiece-style `tokenizer.json`; `prefix` is where the space goes: each, first or none."""
    control = ("<unk>", "<s>", "</s>", *CONTROL)
    letters = ["▁", *(chr(code) for code in range(0x21, 0x7F))]
    tokens = [*control, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *SPM_WORDS]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = {"type": "Prepend", "prepend": "▁"}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    return {
        "version": "1.0",
        "added_tokens": [_added(text, n) for n, text in enumerate(control)],
        "normalizer": {
            "each": {"type": "Sequence", "normalizers": [prepend, spaces]}, "first": None, "none": spaces,
        }[prefix],
        "pre_tokenizer": metaspace if prefix == "first" else None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, text],
            "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"}, *([] if prefix == "none" else strip),
            ],
        },
        "model": _bpe(
            {text: n for n, text in enumerate(tokens)}, [list(merge) for merge in SPM_MERGES],
            unk_token="<unk>", fuse_unk=True, byte_fallback=True,
        ),
    }  # fmt: skip


def write_tokenizer(folder: Path, document: dict[str, Any], **config: Any) -> Path:
    """A folder with `tokenizer.json` and `tokenizer_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _added(text: str, token_id: int, **changes: Any) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token_id, "content": text, **plain, **changes}


def _bpe(vocab: dict[str, int], merges: list[list[str]], **changes: Any) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": vocab, "merges": merges, **changes,
    }  # fmt: skip


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
