"""Every exception this package raises for other people's mistakes.

    TokenizationError
    ├── BadVocabulary            tokeniser metadata that is missing, of a wrong type or contradicts itself
    │   └── UnsupportedTokenizer a sound vocabulary of a kind we do not have; the message lists what there is
    ├── NoChatTemplate           the checkpoint has no chat template
    ├── BadText                  a string that is not Unicode text, or values no template may be given
    │   └── NoMarkerLeft         the input uses every noncharacter we could mark control tokens with
    ├── TemplateError            the chat template refused, failed or ran away; quotes its own message
    └── UnknownTokenId           an id outside the vocabulary

Each carries a stable `code` and the numbers involved. Broken promises of our own are `assert`.
"""

from collections.abc import Iterable
from typing import ClassVar


class TokenizationError(Exception):
    """The root. `code` is stable and meant for machines; `str()` is meant for people."""

    code: ClassVar[str] = "tokenization_error"


class BadVocabulary(TokenizationError):
    """Tokeniser metadata cannot be used. The message names the key and what is wrong with it."""

    code = "bad_vocabulary"

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key
        self.problem = problem


class UnsupportedTokenizer(BadVocabulary):
    """The vocabulary is sound but of a kind this version does not have."""

    code = "unsupported_tokenizer"

    def __init__(self, key: str, value: object, *, supported: Iterable[str]) -> None:
        self.supported = tuple(sorted(supported))
        super().__init__(key, f"{value!r} is not supported; there is: {', '.join(self.supported)}")


class NoChatTemplate(TokenizationError):
    """The checkpoint carries no chat template, so messages cannot be rendered for it."""

    code = "no_chat_template"

    def __init__(self) -> None:
        super().__init__(
            "the checkpoint has no chat template (tokenizer.chat_template); send a plain prompt instead"
        )


class BadText(TokenizationError):
    """A value in the messages cannot be given to a template. `path` says where it is."""

    code = "bad_text"

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class NoMarkerLeft(BadText):
    """The input spells a control token and also uses every noncharacter that could mark it as text."""

    code = "no_marker_left"


class TemplateError(TokenizationError):
    """The chat template did not render. `str()` quotes the template's own message."""

    code = "template_error"


class UnknownTokenId(TokenizationError):
    """A token id outside the vocabulary."""

    code = "unknown_token_id"

    def __init__(self, token_id: int, *, vocab_size: int) -> None:
        super().__init__(f"token id {token_id} is outside the vocabulary of {vocab_size}")
        self.token_id = token_id
        self.vocab_size = vocab_size
