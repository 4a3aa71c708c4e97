"""Keeps control tokens out of what users write, before a chat template mixes it with its own text.

Every user string is searched for places where a control token stands, could be completed by text
put after it, or (where the template leaves one open) could complete one begun before it. There a
marker is inserted: a noncharacter found nowhere in the input. Rendering carries it along, the
tokeniser finds no control token across it, and it is dropped before plain text is encoded.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from tokenization.errors import BadText, NoMarkerLeft
from tokenization.literals import continuation, forged_start
from tokenization.prompt import marker_escape
from tokenization.tokenizer import refuse_surrogates

Plain: TypeAlias = "str | int | float | bool | list[Plain] | dict[str, Plain] | None"

MAX_DEPTH = 64
_MAX_KEY_CHARS = 128
"""Of a key in a path: with whole ones, one long key above many values costs their product."""
MARKERS = tuple(chr(code_point) for code_point in range(0xFDD0, 0xFDF0))
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
"""Some templates build control tokens around a role on purpose, so a role may continue one."""


def plain_copy(value: object, path: str, *, depth: int = 0) -> Plain:
    """A copy made of JSON types alone, so that a template can reach no method of anything else.

    Raises:
        BadText: a lone surrogate, another type, or more than `MAX_DEPTH` levels.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        refuse_surrogates(value, path)
        return str(value)
    if isinstance(value, (int, float)):
        return value
    if depth >= MAX_DEPTH:
        raise BadText(path, f"is nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        copy: dict[str, Plain] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise BadText(path, f"has a key of type {type(key).__name__}")
            refuse_surrogates(key, f"{path} (a key)")
            copy[key] = plain_copy(item, f"{path}.{key[:_MAX_KEY_CHARS]}", depth=depth + 1)
        return copy
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [plain_copy(item, f"{path}[{n}]", depth=depth + 1) for n, item in enumerate(value)]
    raise BadText(path, f"is {type(value).__name__}, which is not JSON")


class UserText:
    """Marks control tokens in user strings, for one set of literals and one template."""

    def __init__(
        self, literals: Iterable[str], *, template_texts: Sequence[str], template_names: Iterable[str] = ()
    ) -> None:
        """
        Args:
            template_texts: every string the template itself may write.
            template_names: the attributes it reads. A template compares and looks up its own words, so
                these and its texts never get a marker put before them.
        """
        literals = tuple(literals)
        self._own_words = ROLES.union(template_texts, template_names)
        self._start = forged_start(literals)
        unfinished = [literal for literal in literals if _left_open(literal, template_texts)]
        self._continues = continuation(unfinished) if unfinished else None

    def needs_marks(self, value: Plain) -> bool:
        return any(self._start.search(text) or self._starts_inside(text) for text in strings_in(value))

    def mark(self, value: Plain, marker: str) -> Plain:
        """A copy with the marker after the first character of every literal that could be read."""
        return map_strings(value, lambda text: self._mark_text(text, marker))

    def _mark_text(self, text: str, marker: str) -> str:
        marked = self._start.sub(rf"\g<0>{marker}", text)
        return marker + marked if self._starts_inside(text) else marked

    def _starts_inside(self, text: str) -> bool:
        if self._continues is None or not text or text in self._own_words:
            return False
        return self._continues.match(text) is not None


def choose_marker(values: Sequence[Plain], *, path: str) -> str:
    """The first noncharacter that no string of the input holds, neither itself nor as JSON escape.

    Raises:
        NoMarkerLeft: there is none.
    """
    texts = [text for value in values for text in strings_in(value)]
    for marker in MARKERS:
        escape = marker_escape(marker)
        if not any(marker in text or escape in text for text in texts):
            return marker
    raise NoMarkerLeft(path, f"spells a control token and uses all {len(MARKERS)} noncharacters")


def strings_in(value: Plain) -> Iterator[str]:
    """Every string of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings_in(item)


def map_strings(value: Plain, change: Callable[[str], str]) -> Plain:
    """A copy of a JSON value with every string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): map_strings(item, change) for key, item in value.items()}
    return value


def _left_open(literal: str, template_texts: Sequence[str]) -> bool:
    """Whether a string of the template ends inside the literal, so that user text could go on with it."""
    prefixes = tuple(literal[:end] for end in range(1, len(literal)))
    return any(text.endswith(prefixes) for text in template_texts)
