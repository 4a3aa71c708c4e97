"""Tries as regular expressions find what looking at every place would find."""

from hypothesis import given
from hypothesis import strategies as st

from tokenization.added_tokens import AddedToken, AddedTokens
from tokenization.gguf_vocab import MAX_ADDED_TOKEN_CHARS
from tokenization.literals import continuation, forged_start, longest_match
from tokenization.vocabulary import byte_alphabet, byte_level_bytes

_TEXT = st.text("ab<|\n", max_size=12)
_LITERALS = st.sets(st.text("ab<|\n", min_size=1, max_size=5), max_size=6)


@given(text=_TEXT, literals=_LITERALS)
def test_the_longest_literal_at_the_leftmost_place_is_matched(text: str, literals: set[str]) -> None:
    found = []
    at = 0
    while at < len(text):
        here = [literal for literal in literals if text.startswith(literal, at)]
        if here:
            found.append((at, max(here, key=len)))
        at += len(max(here, key=len)) if here else 1
    assert [(m.start(), m[0]) for m in longest_match(literals).finditer(text)] == found


@given(text=_TEXT, literals=_LITERALS)
def test_every_place_where_a_literal_stands_or_is_left_open_is_found(text: str, literals: set[str]) -> None:
    places = [
        at
        for at in range(len(text))
        if any(text.startswith(x, at) or x.startswith(text[at:]) for x in literals)
    ]
    assert [m.start() for m in forged_start(literals).finditer(text)] == places


@given(text=_TEXT, literals=_LITERALS)
def test_a_text_that_could_go_on_with_a_literal_is_found(text: str, literals: set[str]) -> None:
    tails = [literal[start:] for literal in literals for start in range(1, len(literal))]
    expected = any(text.startswith(tail) or tail.startswith(text) for tail in tails)
    assert bool(continuation(literals).match(text)) == expected


def test_white_space_beside_a_token_goes_to_it_where_it_says_so() -> None:
    added = AddedTokens(
        [AddedToken("<a>", 1, special=True, lstrip=True), AddedToken("<b>", 2, special=True, rstrip=True)]
    )
    assert added.split("x \n<a> y<b>\t z", parse_special=True) == ["x", 1, " y", 2, "z"]
    assert added.split("x <a>", parse_special=False) == ["x <a>"]


def test_literals_that_nest_as_deep_as_they_may_still_compile() -> None:
    literals = {"a" * size for size in range(1, MAX_ADDED_TOKEN_CHARS + 1)}
    text = "a" * (MAX_ADDED_TOKEN_CHARS + 3)
    found = [len(m[0]) for m in longest_match(literals).finditer(text)]
    assert found == [MAX_ADDED_TOKEN_CHARS, 3]
    assert len(forged_start(literals).findall(text)) == len(text)
    assert continuation(literals).match(text)


def test_the_byte_alphabet_is_the_librarys_and_is_undone() -> None:
    from tokenizers import pre_tokenizers

    alphabet = byte_alphabet()
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))
    assert byte_level_bytes("Ġhi") == b" hi"
    assert byte_level_bytes("not in it: \u4e00") == "not in it: \u4e00".encode()
