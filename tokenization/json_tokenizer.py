"""`tokenizer.json` as data: what this version understands of it, checked before Rust sees it.

Source: Hugging Face `tokenizers` 0.23, the serialised form of its `Tokenizer`.
"""

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple

from tokenizers import Tokenizer as RustTokenizer

from tokenization.added_tokens import AddedToken
from tokenization.errors import BadVocabulary, UnsupportedTokenizer
from tokenization.space_prefix import SpacePrefix
from tokenization.vocabulary import byte_level_bytes

SPACE = "▁"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
MOST_TOKENS = 1 << 24
MOST_ADDED_CHARS = 128
"""Added tokens become nested groups of a regular expression; real ones have at most about 40."""


class Refusing:
    """Names the file when Rust refuses it: `tokenizers` raises plain `Exception`, and panics as itself."""

    def __init__(self, key: str) -> None:
        self._key = key

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is Exception or (kind is not None and kind.__name__ in {"PanicException", "ValueError"}):
            raise BadVocabulary(self._key, f"cannot be used: {error!s:.200}") from None


class BPEDefinition(NamedTuple):
    """A `tokenizer.json` that has been understood."""

    document: dict[str, Any]
    vocab: dict[str, int]
    added: list[AddedToken]
    space_prefix: SpacePrefix
    byte_level: bool
    byte_fallback: bool
    template_bos: str | None
    """The token that the post-processor puts before a text."""

    def bytes_of(self, token: str) -> bytes:
        if self.byte_level:
            return byte_level_bytes(token)
        if self.byte_fallback and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(SPACE, " ").encode()

    def rust(self, *, hidden: Mapping[str, int], at_start: bool) -> RustTokenizer:
        """The algorithm alone, without added tokens: those are found before it is asked.

        Args:
            hidden: control tokens, which plain text must never spell. Each keeps its id under a name
                that nobody can guess.
            at_start: for a text's beginning, where "first" puts its space.
        """
        model = dict(self.document["model"])
        names = {text: f"\U0010ffff{secrets.token_hex(16)}" for text in hidden if text in self.vocab}
        model["vocab"] = {names.get(text, text): token_id for text, token_id in self.vocab.items()}
        model["merges"] = [
            pair for pair in merge_pairs(model["merges"]) if not names.keys() & {*pair, pair[0] + pair[1]}
        ]
        unk = str(model.get("unk_token"))
        # A byte-level vocabulary that lacks a byte leaves it out, rather than write a control token.
        model["unk_token"] = (
            None if unk in names and self.byte_level else names.get(unk, model.get("unk_token"))
        )
        pre_tokenizer = self.document.get("pre_tokenizer")
        definition: dict[str, Any] = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
            "normalizer": self.document.get("normalizer"),
            "pre_tokenizer": pre_tokenizer if at_start else _never_first(pre_tokenizer),
            "post_processor": None, "decoder": None, "model": model,
        }  # fmt: skip
        with Refusing("tokenizer.json"):
            rust: RustTokenizer = RustTokenizer.from_str(json.dumps(definition))
        return rust


def understand(document: dict[str, Any]) -> BPEDefinition:
    """Check a `tokenizer.json`.

    Raises:
        UnsupportedTokenizer: a model or part that this version does not have; names it.
        BadVocabulary: it contradicts itself.
    """
    model = _object(document, "model")
    if model.get("type", "BPE" if "merges" in model else None) != "BPE":
        raise UnsupportedTokenizer("tokenizer.json model.type", model.get("type"), supported=("BPE",))
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise UnsupportedTokenizer(f"tokenizer.json model.{key}", model[key], supported=("null",))
    vocab = _object(model, "vocab")
    for text, token_id in vocab.items():
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < MOST_TOKENS:
            raise BadVocabulary("tokenizer.json model.vocab", f"{text!r:.80} has id {token_id!r:.40}")
    if len(set(vocab.values())) != len(vocab):
        raise BadVocabulary("tokenizer.json model.vocab", "two tokens have one id")
    decoders = [str(part.get("type")) for part in parts(document.get("decoder"), "decoders")]
    byte_level = "ByteLevel" in decoders
    if not byte_level and not {"Metaspace", "Replace"} & set(decoders):
        raise UnsupportedTokenizer(
            "tokenizer.json decoder", decoders, supported=("ByteLevel", "Metaspace", "Replace")
        )
    return BPEDefinition(
        document, vocab, _added_tokens(document, vocab), _space_prefix(document), byte_level,
        "ByteFallback" in decoders or bool(model.get("byte_fallback")), _template_bos(document),
    )  # fmt: skip


def merge_pairs(merges: object) -> list[list[str]]:
    """Both written forms, "a b" and ["a", "b"], as the second."""
    pairs: list[list[str]] = []
    for index, merge in enumerate(merges if isinstance(merges, list) else [None]):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(half, str) for half in pair):
            raise BadVocabulary(
                "tokenizer.json model.merges", f"item {index} is {merge!r:.80}, not two tokens"
            )
        pairs.append(pair)
    return pairs


def parts(value: object, inside: str) -> Iterator[dict[str, Any]]:
    """The parts of a normalizer, pre-tokenizer, decoder or post-processor, sequences unrolled."""
    if value is None:
        return
    if not isinstance(value, dict):
        raise BadVocabulary("tokenizer.json", f"{value!r:.80} stands where an object should")
    if value.get("type") != "Sequence":
        yield value
        return
    inner = value.get(inside)
    for part in inner if isinstance(inner, list) else [inner]:
        yield from parts(part, inside)


def _space_prefix(document: dict[str, Any]) -> SpacePrefix:
    for part in parts(document.get("normalizer"), "normalizers"):
        if part.get("type") == "Prepend":
            if part.get("prepend") != SPACE:
                raise UnsupportedTokenizer("tokenizer.json Prepend", part.get("prepend"), supported=(SPACE,))
            return "each"
    for part in parts(document.get("pre_tokenizer"), "pretokenizers"):
        if part.get("type") == "ByteLevel" and part.get("add_prefix_space"):
            raise UnsupportedTokenizer("tokenizer.json add_prefix_space", True, supported=("false",))
        if part.get("type") == "Metaspace":
            if part.get("replacement", SPACE) != SPACE:
                raise UnsupportedTokenizer(
                    "tokenizer.json Metaspace", part.get("replacement"), supported=(SPACE,)
                )
            older = "always" if part.get("add_prefix_space", True) else "never"
            scheme = part.get("prepend_scheme", older)
            if scheme not in ("always", "first", "never"):
                raise BadVocabulary("tokenizer.json prepend_scheme", f"is {scheme!r:.40}")
            return "each" if scheme == "always" else "first" if scheme == "first" else "none"
    return "none"


def _never_first(pre_tokenizer: Any) -> Any:
    """A copy in which "first" is "never": for text that does not begin the prompt."""
    if not isinstance(pre_tokenizer, dict):
        return pre_tokenizer
    copy = dict(pre_tokenizer)
    if copy.get("prepend_scheme") == "first":
        copy["prepend_scheme"] = "never"
    if isinstance(copy.get("pretokenizers"), list):
        copy["pretokenizers"] = [_never_first(part) for part in copy["pretokenizers"]]
    return copy


def _template_bos(document: dict[str, Any]) -> str | None:
    bos: str | None = None
    for part in parts(document.get("post_processor"), "processors"):
        if part.get("type") == "ByteLevel":
            continue
        if part.get("type") != "TemplateProcessing":
            raise UnsupportedTokenizer(
                "tokenizer.json post_processor",
                part.get("type"),
                supported=("ByteLevel", "TemplateProcessing"),
            )
        single: Any = part.get("single")
        kinds = [next(iter(item), "") if isinstance(item, dict) else "" for item in single or [None]]
        if kinds == ["SpecialToken", "Sequence"]:
            bos = str(single[0]["SpecialToken"].get("id"))
        elif kinds != ["Sequence"]:
            raise UnsupportedTokenizer(
                "tokenizer.json post_processor single", kinds, supported=("a BOS token",)
            )
    return bos


def _added_tokens(document: dict[str, Any], vocab: Mapping[str, int]) -> list[AddedToken]:
    entries = document.get("added_tokens") or []
    if not isinstance(entries, list):
        raise BadVocabulary("tokenizer.json added_tokens", "is not a list")
    found: dict[str, AddedToken] = {}
    text_of = {token_id: text for text, token_id in vocab.items()}
    for entry in entries:
        text, token_id = (entry.get("content"), entry.get("id")) if isinstance(entry, dict) else (None, None)
        if not isinstance(text, str) or not isinstance(token_id, int) or not 0 <= token_id < MOST_TOKENS:
            raise BadVocabulary("tokenizer.json added_tokens", f"{entry!r:.80} has no content and id")
        special = bool(entry.get("special"))
        if not (2 if special else 1) <= len(text) <= MOST_ADDED_CHARS:
            raise BadVocabulary("tokenizer.json added_tokens", f"token {token_id} has {len(text)} characters")
        if text in found or text_of.get(token_id, text) != text:
            raise BadVocabulary(
                "tokenizer.json added_tokens", f"token {token_id}, {text!r:.80}, is there twice"
            )
        if entry.get("single_word"):
            raise UnsupportedTokenizer("tokenizer.json single_word", text, supported=("false",))
        text_of[token_id] = text
        found[text] = AddedToken(
            text, token_id, special, lstrip=bool(entry.get("lstrip")), rstrip=bool(entry.get("rstrip"))
        )
    return list(found.values())


def _object(parent: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = parent.get(key)
    if not isinstance(value, dict):
        raise BadVocabulary(f"tokenizer.json {key}", "is missing" if value is None else "is not an object")
    return value
