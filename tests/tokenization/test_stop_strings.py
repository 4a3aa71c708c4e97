"""Stop strings end the text at the same place however it arrives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenization import StopMatcher

_SMALL = st.text("abc", max_size=30)
_STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


def _whole(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the stop string complete first wins, and of those the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def _stream(text: str, stops: list[str], cuts: list[int]) -> tuple[str, str | None, StopMatcher]:
    matcher = StopMatcher(stops)
    emitted, at = "", 0
    for size in [*cuts, len(text)]:
        piece, stop = matcher.push(text[at : at + size])
        matcher.check()
        emitted += piece
        at += size
        if stop is not None:
            assert matcher.match_offset == len(emitted)
            assert matcher.flush() == ""
            return emitted, stop, matcher
        assert_least_is_withheld(text[:at], emitted, stops)
    emitted += matcher.flush()
    matcher.check()
    return emitted, None, matcher


def assert_least_is_withheld(text: str, emitted: str, stops: list[str]) -> None:
    could_match = [
        n for n in range(1, len(text) + 1) for s in stops if n < len(s) and s.startswith(text[-n:])
    ]
    assert emitted == text[: len(text) - max(could_match, default=0)]


@given(text=_SMALL, stops=_STOPS, cuts=st.lists(st.integers(0, 4), max_size=40))
def test_the_streamed_result_equals_the_whole_for_any_cut(text, stops, cuts) -> None:
    emitted, stop, matcher = _stream(text, stops, cuts)
    assert (emitted, stop) == _whole(text, stops)
    assert matcher.match_offset == (len(emitted) if stop else None)


def test_a_prefix_of_a_stop_string_is_withheld_until_it_is_decided() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    assert matcher.push("ABC DEF") == ("ABC ", None)
    assert matcher.push("G") == ("", None)
    assert matcher.push("HIJK") == ("", "DEFGHIJ")
    assert matcher.match_offset == 4


def test_withheld_text_is_released_when_it_can_no_longer_match() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    assert matcher.push("DEF") == ("", None)
    assert matcher.push("x") == ("DEFx", None)


def test_text_before_the_stop_in_the_same_piece_is_emitted() -> None:
    assert StopMatcher(["\n"]).push("?\nmore") == ("?", "\n")


def test_what_is_withheld_at_the_end_is_ordinary_text() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the EN") == ("the ", None)
    assert matcher.flush() == "EN"


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["ab", "abc"], "xabc", ("x", "ab")),  # complete first
        (["bc", "abc"], "xabc", ("x", "abc")),  # complete together: the longest
        (["abcd", "bc"], "abcd", ("a", "bc")),  # complete first, though it begins later
        (["aab"], "aaab", ("a", "aab")),  # overlaps itself
        (["é…"], "né…", ("n", "é…")),
    ],
)
def test_of_several_stop_strings_the_first_complete_one_wins(stops, text, expected) -> None:
    assert _stream(text, stops, [1] * len(text))[:2] == expected
    assert _stream(text, stops, [])[:2] == expected


def test_without_stop_strings_nothing_is_withheld() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == ("anything", None)
    assert matcher.flush() == ""
