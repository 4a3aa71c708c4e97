"""A tokeniser out of GGUF metadata, given as a plain mapping.

Keys are written without their prefix `tokenizer.ggml.` inside this file.

Source: the GGUF specification, section "Tokenizer"; token types as in llama.cpp's `llama_token_type`.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import TypeVar

from tokenization.added_tokens import AddedToken, AddedTokens
from tokenization.bpe import ByteLevelBPE
from tokenization.errors import BadVocabulary, UnsupportedTokenizer
from tokenization.json_tokenizer import SPACE
from tokenization.pre_tokenizers import PRE_TOKENIZATIONS, PreTokenization
from tokenization.sentencepiece_bpe import SentencePieceBPE, byte_token
from tokenization.tokenizer import SegmentedTokenizer, Tokenizer
from tokenization.vocabulary import Vocabulary, byte_level_bytes

_PREFIX = "tokenizer.ggml."
_Item = TypeVar("_Item", str, int)
MAX_ADDED_TOKEN_CHARS = 128
"""Added tokens become nested groups of a regular expression; real ones have at most about 40."""

# Names that end a turn where the metadata names only one of several. Control tokens only.
END_OF_TURN = frozenset(
    {
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<|endofturn|>",
        "<|END_OF_TURN_TOKEN|>",
        "<\uff5cend▁of▁sentence\uff5c>",  # fullwidth bars
    }
)


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """Build the checkpoint's tokeniser.

    Raises:
        UnsupportedTokenizer: a model kind or pre-tokeniser we do not have.
        BadVocabulary: a key is missing, of a wrong type or contradicts another.
    """
    keys = _Keys(metadata)
    kind = keys.text("model")
    if kind not in _BUILDERS:
        raise UnsupportedTokenizer(_PREFIX + "model", kind, supported=_BUILDERS)
    return _BUILDERS[kind](keys)


class _Keys:
    """Typed reads of `tokenizer.ggml.*`; every lie becomes a `BadVocabulary` naming the key."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata

    def text(self, name: str, default: str | None = None) -> str:
        value = self._metadata.get(_PREFIX + name, default)
        if not isinstance(value, str):
            problem = "is missing" if value is None else f"is {type(value).__name__}, not a string"
            raise self.bad(name, problem)
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self._metadata.get(_PREFIX + name, default)
        if not isinstance(value, bool):
            raise self.bad(name, f"is {type(value).__name__}, not a boolean")
        return value

    def texts(self, name: str) -> list[str]:
        return self._list(name, str)

    def integers(self, name: str) -> list[int] | None:
        return self._list(name, int) if _PREFIX + name in self._metadata else None

    def scores(self, *, num_tokens: int) -> list[float]:
        values = self._metadata.get(_PREFIX + "scores")
        if not isinstance(values, list) or len(values) != num_tokens:
            raise self.bad("scores", f"is no list of {num_tokens} numbers")
        if not all(isinstance(value, float) and math.isfinite(value) for value in values):
            raise self.bad("scores", "holds something that is no finite number")
        return values

    def token_id(self, name: str, *, vocab_size: int) -> int | None:
        value = self._metadata.get(_PREFIX + name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.bad(name, f"is {type(value).__name__}, not a token id")
        if not 0 <= value < vocab_size:
            raise self.bad(name, f"{value} is outside the vocabulary of {vocab_size}")
        return value

    def bad(self, name: str, problem: str) -> BadVocabulary:
        return BadVocabulary(_PREFIX + name, problem)

    def _list(self, name: str, kind: type[_Item]) -> list[_Item]:
        values = self._metadata.get(_PREFIX + name)
        if values is None:
            raise self.bad(name, "is missing")
        if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
            raise self.bad(name, f"is {type(values).__name__}, not a list")
        for index, value in enumerate(values):
            if not isinstance(value, kind) or isinstance(value, bool):
                raise self.bad(name, f"item {index} is {type(value).__name__}, not {kind.__name__}")
        return list(values)


def _byte_level_bpe(keys: _Keys) -> Tokenizer:
    pre_name = keys.text("pre", default="default")
    rule = PRE_TOKENIZATIONS.get(pre_name)
    if rule is None:
        raise UnsupportedTokenizer(_PREFIX + "pre", pre_name, supported=PRE_TOKENIZATIONS)
    if keys.flag("add_space_prefix"):
        raise UnsupportedTokenizer(_PREFIX + "add_space_prefix", True, supported=("False",))
    if keys.flag("add_eos_token"):
        raise UnsupportedTokenizer(_PREFIX + "add_eos_token", True, supported=("False",))
    tokens = _tokens(keys)
    types = _token_types(keys, num_tokens=len(tokens))
    bos = keys.token_id("bos_token_id", vocab_size=len(tokens))
    eos = keys.token_id("eos_token_id", vocab_size=len(tokens))
    eos_ids = _end_of_turn_ids(keys, tokens=tokens, types=types)
    for name in ("unknown_token_id", "padding_token_id"):
        keys.token_id(name, vocab_size=len(tokens))
    adds_bos = keys.flag("add_bos_token")
    if adds_bos and bos is None:
        raise keys.bad("add_bos_token", "is true but there is no bos_token_id")
    added = _added_tokens(keys, tokens=tokens, types=types, always_special={bos, *eos_ids})
    special = {token.token_id for token in added if token.special}
    merges = _merges(keys, tokens=tokens, special=special)
    vocab = {token: token_id for token_id, token in enumerate(tokens) if token_id not in special}
    raw_ids = {token.token_id for token in added}  # written as they are, not in the byte alphabet
    return SegmentedTokenizer(
        ByteLevelBPE(vocab, merges, rule=rule).encode_segments,
        added_tokens=AddedTokens(added),
        vocabulary=Vocabulary(
            len(tokens),
            bytes_of=lambda i: tokens[i].encode() if i in raw_ids else byte_level_bytes(tokens[i]),
        ),
        bos_token_id=bos,
        eos_token_id=eos,
        eos_token_ids=eos_ids,
        adds_bos=adds_bos,
        fingerprint=_fingerprint(rule, tokens, types, merges, bos, eos, sorted(eos_ids), adds_bos),
    )


def _sentencepiece_bpe(keys: _Keys) -> Tokenizer:
    if keys.flag("add_eos_token"):
        raise UnsupportedTokenizer(_PREFIX + "add_eos_token", True, supported=("False",))
    tokens = _tokens(keys)
    types = _token_types(keys, num_tokens=len(tokens))
    scores = keys.scores(num_tokens=len(tokens))
    bos, eos, unknown = (
        keys.token_id(f"{name}_token_id", vocab_size=len(tokens)) for name in ("bos", "eos", "unknown")
    )
    eos_ids = _end_of_turn_ids(keys, tokens=tokens, types=types)
    adds_bos = keys.flag("add_bos_token", default=bos is not None)
    if adds_bos and bos is None:
        raise keys.bad("add_bos_token", "is true but there is no bos_token_id")
    add_space = keys.flag("add_space_prefix", default=True)
    added = _added_tokens(keys, tokens=tokens, types=types, always_special={bos, *eos_ids})
    literal = {token.token_id: tokens[token.token_id].encode() for token in added}
    byte_ids = {i for i, token_type in enumerate(types) if token_type == TokenType.BYTE}
    for token_id in byte_ids:
        if (byte := byte_token(tokens[token_id])) is None:
            raise keys.bad("tokens", f"byte token {token_id} is {tokens[token_id]!r:.40}, not like <0x0A>")
        literal[token_id] = byte
    bpe = SentencePieceBPE(
        tokens, scores,
        mergeable={i for i, kind in enumerate(types) if kind == TokenType.NORMAL} - literal.keys(),
        unknown=unknown, add_space=add_space,
    )  # fmt: skip
    return SegmentedTokenizer(
        bpe.encode_segments,
        space_prefix="each" if add_space else "none",
        added_tokens=AddedTokens(added),
        vocabulary=Vocabulary(
            len(tokens),
            bytes_of=lambda i: literal[i] if i in literal else tokens[i].replace(SPACE, " ").encode(),
        ),
        bos_token_id=bos,
        eos_token_id=eos,
        eos_token_ids=eos_ids,
        adds_bos=adds_bos,
        fingerprint=hashlib.sha256(
            json.dumps(
                ["llama", tokens, types, scores, bos, eos, sorted(eos_ids), unknown, adds_bos, add_space]
            ).encode()
        ).hexdigest(),
    )


_BUILDERS: Mapping[str, Callable[[_Keys], Tokenizer]] = MappingProxyType(
    {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
)


def _tokens(keys: _Keys) -> list[str]:
    tokens = keys.texts("tokens")
    if not tokens:
        raise keys.bad("tokens", "is empty")
    if len(set(tokens)) != len(tokens):
        first: dict[str, int] = {}
        for token_id, token in enumerate(tokens):
            if (earlier := first.setdefault(token, token_id)) != token_id:
                raise keys.bad("tokens", f"{token!r} is there twice, at {earlier} and {token_id}")
    try:
        "".join(tokens).encode()
    except UnicodeEncodeError:
        raise keys.bad("tokens", "a token holds a lone surrogate") from None
    return tokens


def _token_types(keys: _Keys, *, num_tokens: int) -> list[int]:
    types = keys.integers("token_type")
    if types is None:
        return [TokenType.NORMAL] * num_tokens
    if len(types) != num_tokens:
        raise keys.bad("token_type", f"has {len(types)} items for {num_tokens} tokens")
    known = frozenset(TokenType)
    for token_id, token_type in enumerate(types):
        if token_type not in known:
            raise keys.bad("token_type", f"item {token_id} is {token_type}, not 1 to {max(known):d}")
    return types


def _end_of_turn_ids(keys: _Keys, *, tokens: Sequence[str], types: Sequence[int]) -> frozenset[int]:
    named = {
        keys.token_id(name, vocab_size=len(tokens))
        for name in ("eos_token_id", "eot_token_id", "eom_token_id")
    }
    by_name = {
        token: token_id
        for token_id, token in enumerate(tokens)
        if types[token_id] == TokenType.CONTROL and token in END_OF_TURN
    }
    if {"<|return|>", "<|call|>"} <= by_name.keys():
        by_name.pop("<|end|>", None)  # harmony: it ends one message of a turn that goes on
    return frozenset(token_id for token_id in named if token_id is not None) | set(by_name.values())


def _added_tokens(
    keys: _Keys, *, tokens: Sequence[str], types: Sequence[int], always_special: Iterable[int | None]
) -> list[AddedToken]:
    """GGUF says nothing of `lstrip` and `rstrip`; both are false in the byte-level families here."""
    control = (TokenType.CONTROL, TokenType.UNKNOWN)
    special = {i for i, token_type in enumerate(types) if token_type in control}
    special.update(token_id for token_id in always_special if token_id is not None)
    added = special | {i for i, token_type in enumerate(types) if token_type == TokenType.USER_DEFINED}
    for token_id in sorted(added):
        length = len(tokens[token_id])
        # One character cannot be told from the same character in a text: nothing fits inside it.
        if not (2 if token_id in special else 1) <= length <= MAX_ADDED_TOKEN_CHARS:
            raise keys.bad("tokens", f"added token {token_id} has {length} characters")
    return [AddedToken(tokens[i], i, special=i in special) for i in sorted(added)]


def _merges(keys: _Keys, *, tokens: Sequence[str], special: set[int]) -> list[tuple[str, str]]:
    """Check here what the Rust constructor would refuse without naming the key."""
    plain = {token for token_id, token in enumerate(tokens) if token_id not in special}
    merges: list[tuple[str, str]] = []
    for index, line in enumerate(keys.texts("merges")):
        left, space, right = line.partition(" ")
        if not (left and space and right) or " " in right:
            raise keys.bad("merges", f"item {index}, {line!r}, is not two tokens and a space")
        for part in (left, right, left + right):
            if part not in plain:
                raise keys.bad("merges", f"item {index} needs {part!r}, which is not an ordinary token")
        merges.append((left, right))
    return merges


def _fingerprint(rule: PreTokenization, *parts: object) -> str:
    definition = json.dumps(["gpt2", rule.patterns, rule.ignore_merges, rule.nfc, *parts])
    return hashlib.sha256(definition.encode()).hexdigest()
