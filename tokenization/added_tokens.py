"""Tokens that are looked for in the text before the model's own algorithm sees it.

Source: Hugging Face `tokenizers`, `added_vocabulary`: leftmost-longest matching, then `lstrip` and
`rstrip` take the neighbouring white space into the token.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tokenization.literals import longest_match


@dataclass(slots=True, frozen=True)
class AddedToken:
    """A literal that is one token. `special`: it controls the model and no user may write it."""

    text: str
    token_id: int
    special: bool
    lstrip: bool = False
    rstrip: bool = False


class AddedTokens:
    """Cuts text at added tokens. Immutable, so any thread may use it."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self.tokens = tuple(tokens)
        self._by_text = {token.text: token for token in self.tokens}
        assert len(self._by_text) == len(self.tokens), "two added tokens with one text"
        self._any = longest_match(self._by_text)
        self._ordinary = longest_match(token.text for token in self.tokens if not token.special)

    def split(self, text: str, *, parse_special: bool) -> list[str | int]:
        """Cut into plain strings (never empty) and the ids of added tokens.

        Args:
            parse_special: whether control tokens count; tokens that are not special always do.
        """
        pieces: list[str | int] = []
        done = 0
        for match in (self._any if parse_special else self._ordinary).finditer(text):
            token = self._by_text[match[0]]
            start, end = match.span()
            if start < done:
                continue  # inside the white space that the token before it took
            if token.lstrip:
                start = done + len(text[done:start].rstrip())
            if token.rstrip:
                end = _skip_space(text, end)
            if start > done:
                pieces.append(text[done:start])
            pieces.append(token.token_id)
            done = end
        if done < len(text):
            pieces.append(text[done:])
        return pieces


_SPACE = re.compile(r"\s*")


def _skip_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    assert match is not None
    return match.end()
