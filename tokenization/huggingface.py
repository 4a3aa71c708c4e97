"""The text side of a Hugging Face model folder: tokeniser, control tokens, end tokens, chat template.

    tokenizer.json           the algorithm and its vocabulary
    tokenizer_config.json    which tokens begin and end a text; an older place of the chat template
    generation_config.json   more tokens that end a turn
    chat_template.jinja      the chat template
    config.json              how many logits the model gives, and its own end tokens

No Python of the folder is ever looked at.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from tokenization.added_tokens import AddedToken, AddedTokens
from tokenization.errors import BadVocabulary, UnsupportedTokenizer
from tokenization.gguf_vocab import END_OF_TURN
from tokenization.json_tokenizer import MOST_TOKENS, BPEDefinition, Refusing, understand
from tokenization.tokenizer import SegmentedTokenizer, Tokenizer
from tokenization.vocabulary import Vocabulary

MOST_FILE_BYTES = 128 << 20
CHAT_TEMPLATE_KEY = "tokenizer.chat_template"


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """Build the folder's tokeniser.

    Raises:
        UnsupportedTokenizer: a kind we do not have; names it and lists those there are.
        BadVocabulary: a file is missing, unreadable or contradicts another.
    """
    return _Folder(folder).tokenizer()


def read_chat_template(folder: Path) -> dict[str, object]:
    """The folder's chat template, under the key `ChatTemplate.from_gguf` reads; empty where there is none.

    Raises:
        BadVocabulary, UnsupportedTokenizer: it is no text, or several without a default.
    """
    source = folder / "chat_template.jinja"
    if source.exists():
        return {CHAT_TEMPLATE_KEY: _read(source)}
    template = _json(folder / "tokenizer_config.json", required=False).get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        if "default" not in named:
            names = sorted(str(name) for name in named)
            raise UnsupportedTokenizer("tokenizer_config.json chat_template", names, supported=("default",))
        template = named["default"]
    return {} if template is None else {CHAT_TEMPLATE_KEY: template}


class _Folder:
    def __init__(self, folder: Path) -> None:
        document = _json(folder / "tokenizer.json")
        self._config = _json(folder / "tokenizer_config.json", required=False)
        self._generation = _json(folder / "generation_config.json", required=False)
        self._model = _json(folder / "config.json", required=False)
        self._definition: BPEDefinition = understand(document)
        self._ids = dict(self._definition.vocab) | {t.text: t.token_id for t in self._definition.added}
        self._texts = {token_id: text for text, token_id in self._ids.items()}

    def tokenizer(self) -> Tokenizer:
        definition = self._definition
        if self._config.get("add_eos_token"):
            raise UnsupportedTokenizer("tokenizer_config.json add_eos_token", True, supported=("false",))
        bos = self._bos()
        eos = self._named("eos_token")
        eos_ids = self._eos_ids(eos)
        if eos is None and eos_ids:
            eos = min(eos_ids)
        added = self._added(always_special={bos, *eos_ids} - {None})
        special = {token.text: token.token_id for token in added if token.special}
        adds_bos = self._config.get("add_bos_token")
        if not isinstance(adds_bos, bool):
            adds_bos = definition.template_bos is not None
        if adds_bos and bos is None:
            raise BadVocabulary("tokenizer_config.json add_bos_token", "is true but there is no bos_token")
        literal = {token.token_id: token.text.encode() for token in added}
        start = _Segments(definition.rust(hidden=special, at_start=True))
        rest = _Segments(definition.rust(hidden=special, at_start=False))
        return SegmentedTokenizer(
            rest.encode,
            encode_start=start.encode if definition.space_prefix == "first" else None,
            space_prefix=definition.space_prefix,
            added_tokens=AddedTokens(added),
            vocabulary=Vocabulary(
                self._vocab_size(),
                bytes_of=lambda i: literal[i] if i in literal else self._ordinary_bytes(i),
            ),
            bos_token_id=bos,
            eos_token_id=eos,
            eos_token_ids=eos_ids,
            adds_bos=adds_bos,
            fingerprint=self._fingerprint(bos, eos, sorted(eos_ids), adds_bos, self._vocab_size()),
        )

    def _ordinary_bytes(self, token_id: int) -> bytes:
        """Ids that no token has (models round their vocabulary up) stand for nothing."""
        text = self._texts.get(token_id)
        return b"" if text is None else self._definition.bytes_of(text)

    def _vocab_size(self) -> int:
        """As many as the model has logits for: each of them may be sampled."""
        needed = max(self._texts) + 1
        declared = self._model.get("vocab_size", needed)
        if not isinstance(declared, int) or not needed <= declared <= MOST_TOKENS:
            raise BadVocabulary("config.json vocab_size", f"is {declared!r:.40}; the tokens need {needed}")
        return declared

    def _bos(self) -> int | None:
        bos = self._named("bos_token")
        if self._definition.template_bos is None:
            return bos
        written = self._id_of(self._definition.template_bos, "tokenizer.json post_processor")
        if bos is not None and bos != written:
            raise BadVocabulary(
                "tokenizer_config.json bos_token", f"is {bos}; tokenizer.json writes {written}"
            )
        return written

    def _named(self, key: str) -> int | None:
        value = self._config.get(key)
        text = value.get("content") if isinstance(value, Mapping) else value
        return None if text is None else self._id_of(text, f"tokenizer_config.json {key}")

    def _id_of(self, text: object, key: str) -> int:
        token_id = self._ids.get(text) if isinstance(text, str) else None
        if token_id is None:
            raise BadVocabulary(key, f"{text!r:.80} is no token")
        return token_id

    def _eos_ids(self, eos: int | None) -> frozenset[int]:
        ids = set() if eos is None else {eos}
        for name, source in (("generation_config.json", self._generation), ("config.json", self._model)):
            value = source.get("eos_token_id")
            for token_id in value if isinstance(value, list) else [] if value is None else [value]:
                if not isinstance(token_id, int) or token_id not in self._texts:
                    raise BadVocabulary(f"{name} eos_token_id", f"{token_id!r:.40} is no token's id")
                ids.add(token_id)
        by_name = {t.text: t.token_id for t in self._definition.added if t.special and t.text in END_OF_TURN}
        if {"<|return|>", "<|call|>"} <= by_name.keys():
            by_name.pop("<|end|>", None)  # harmony: it ends one message of a turn that goes on
        return frozenset(ids | set(by_name.values()))

    def _added(self, *, always_special: set[int | None]) -> list[AddedToken]:
        added = {token.token_id: token for token in self._definition.added}
        for token_id in always_special:
            assert token_id is not None
            known = added.get(token_id)
            added[token_id] = AddedToken(
                self._texts[token_id], token_id, special=True,
                lstrip=known is not None and known.lstrip, rstrip=known is not None and known.rstrip,
            )  # fmt: skip
        return [added[token_id] for token_id in sorted(added)]

    def _fingerprint(self, *parts: object) -> str:
        document = {key: value for key, value in self._definition.document.items() if key != "version"}
        definition = json.dumps(["tokenizer.json", document, *parts], sort_keys=True)
        return hashlib.sha256(definition.encode(errors="surrogatepass")).hexdigest()


class _Segments:
    """Encodes plain segments with the GIL released. Immutable, so any thread may use it."""

    def __init__(self, rust: RustTokenizer) -> None:
        self._rust = rust

    def encode(self, segments: Sequence[str]) -> list[list[int]]:
        with Refusing("the text"):
            encodings = self._rust.encode_batch_fast(list(segments), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MOST_FILE_BYTES:
                raise BadVocabulary(path.name, f"has {size} bytes; at most {MOST_FILE_BYTES} are read")
            return file.read(size).decode()
    except FileNotFoundError:
        raise BadVocabulary(path.name, f"is missing from {path.parent}") from None
    except OSError as error:
        raise BadVocabulary(path.name, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadVocabulary(path.name, f"is not UTF-8 at byte {error.start}") from None


def _json(path: Path, *, required: bool = True) -> dict[str, Any]:
    if not required and not path.exists():
        return {}
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise BadVocabulary(path.name, f"is not JSON: {error!s:.200}") from None
    if not isinstance(value, dict):
        raise BadVocabulary(path.name, f"holds {type(value).__name__}, not an object")
    return value
