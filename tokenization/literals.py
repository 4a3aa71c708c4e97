"""Regular expressions over a set of literal strings, built as tries.

A plain `a|b|c` tries every literal at every `<`; vocabularies have hundreds of control tokens that
all begin with `<|`. A trie walks one path, so a scan costs the same for 2 literals and for 2,000.
"""

import re
from collections.abc import Iterable
from typing import TypeAlias

_Trie: TypeAlias = dict[str, "_Trie"]

_END = ""  # the key that says "a literal ends here"
_MAX_GUARD = 24
"""Characters of a literal that the guard looks at. Shorter is stricter: more text is marked."""


def longest_match(literals: Iterable[str]) -> re.Pattern[str]:
    """A pattern matching any of the literals, the longest one where several begin at one place."""
    trie = _trie_of(literals)
    return re.compile(_longest(trie) if trie else r"(?!)", re.DOTALL)


def forged_start(literals: Iterable[str]) -> re.Pattern[str]:
    """A pattern matching the first character of every place where a literal could begin.

    That is where a literal stands, also overlapped by others, and where the string ends inside one,
    so that text put after it could complete it.
    """
    trie = _trie_of(literal[:_MAX_GUARD] for literal in literals)
    # The first character is consumed and the rest looked at: then `re` can search for it quickly.
    branches = [f"{re.escape(first)}(?={_rest_or_end(child)})" for first, child in sorted(trie.items())]
    return re.compile("|".join(branches) or r"(?!)", re.DOTALL)


def continuation(literals: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches at 0 if text before the string could make it part of a literal."""
    tails = {literal[start : start + _MAX_GUARD] for literal in literals for start in range(1, len(literal))}
    return re.compile(_rest_or_end(_trie_of(tails)) if tails else r"(?!)", re.DOTALL)


def _trie_of(literals: Iterable[str]) -> _Trie:
    root: _Trie = {}
    for literal in literals:
        assert literal, "an empty literal matches everywhere"
        node = root
        for char in literal:
            node = node.setdefault(char, {})
        node[_END] = {}
    return root


def _longest(node: _Trie) -> str:
    run = ""
    while len(node) == 1 and _END not in node:  # a chain: no group, so depth grows with branches only
        ((char, node),) = node.items()
        run += re.escape(char)
    branches = [re.escape(char) + _longest(child) for char, child in sorted(node.items()) if char != _END]
    if not branches:
        return run
    return f"{run}(?:{'|'.join(branches)})" + ("?" if _END in node else "")


def _rest_or_end(node: _Trie) -> str:
    if _END in node:
        return ""
    branches = [re.escape(char) + _rest_or_end(child) for char, child in sorted(node.items())]
    return rf"(?:\Z|{'|'.join(branches)})"
