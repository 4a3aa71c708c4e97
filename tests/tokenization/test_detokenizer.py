"""Text comes out as ids go in: whole characters, and the same however the ids are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenization import Detokenizer, Tokenizer, byte_tokenizer
from tokenization.space_prefix import PieceReader

BYTES = byte_tokenizer()


def _stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> tuple[list[str], Detokenizer]:
    """Push `ids` in runs of the given lengths; returns the pieces, the last being what finish gave."""
    detokenizer = Detokenizer(tokenizer)
    pieces, at = [], 0
    for size in [*cuts, len(ids)]:
        pieces.append(detokenizer.push(ids[at : at + size]))
        detokenizer.check()
        at += size
    pieces.append(detokenizer.finish())
    detokenizer.check()
    return pieces, detokenizer


_CUTS = st.lists(st.integers(0, 5), max_size=30)


@given(data=st.data(), cuts=_CUTS)
def test_joined_pieces_equal_the_whole_decode_for_any_ids_and_any_cut(
    tokenizer: Tokenizer, data, cuts
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    pieces, _ = _stream(tokenizer, ids, cuts)
    assert "".join(pieces) == tokenizer.decode(ids)


@given(raw=st.binary(max_size=30), cuts=_CUTS)
def test_bytes_that_are_not_utf8_are_replaced_as_in_the_whole_decode(raw: bytes, cuts: list[int]) -> None:
    pieces, _ = _stream(BYTES, list(raw), cuts)
    assert "".join(pieces) == raw.decode(errors="replace")


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")))
def test_half_a_character_is_never_emitted(text: str) -> None:
    ids = list(text.encode())
    pieces, _ = _stream(BYTES, ids, [1] * len(ids))
    assert "\ufffd" not in "".join(pieces)
    assert [piece for piece in pieces if piece] == list(text)


@pytest.mark.parametrize(("raw", "text"), [(b"a\xf0\x9f", "a\ufffd"), (b"\xe4", "\ufffd"), (b"ok", "ok")])
def test_a_cut_tail_becomes_one_replacement_character_at_the_end(raw: bytes, text: str) -> None:
    pieces, _ = _stream(BYTES, list(raw), [1] * len(raw))
    assert "".join(pieces) == text


def test_an_emoji_in_two_tokens_comes_out_whole(smollm: Tokenizer) -> None:
    ids = smollm.encode("\U0001fae0 \U0001f979 龜 ", add_bos=False)
    pieces, _ = _stream(smollm, ids, [1] * len(ids))
    assert len(ids) > len("\U0001fae0 \U0001f979 龜 ")
    assert "".join(pieces) == "\U0001fae0 \U0001f979 龜 "


def test_a_leading_space_is_kept(smollm: Tokenizer) -> None:
    pieces, _ = _stream(smollm, smollm.encode(" leading x"), [1, 1, 1])
    assert pieces[0] == " leading"


def test_control_tokens_inside_a_character_do_not_break_it() -> None:
    first, *rest = "é".encode()
    pieces, _ = _stream(BYTES, [first, 258, *rest], [1, 1, 1])
    assert "".join(pieces) == "é"


@given(data=st.data(), cuts=_CUTS)
def test_a_character_offset_maps_to_the_tokens_wholly_or_partly_before_it(tokenizer, data, cuts) -> None:
    text = data.draw(
        st.text(
            st.characters(max_codepoint=0x3FFFF, exclude_categories=("Cs", "Cc"), exclude_characters="▁"),
            max_size=20,
        )
    )
    ids = tokenizer.encode(text, add_bos=False)
    _, detokenizer = _stream(tokenizer, ids, cuts)
    for offset in range(len(text) + 2):
        before = len(text[:offset].encode())
        starts, at, reader = [], 0, PieceReader(tokenizer, skip_special=True)
        for token_id in ids:
            starts.append(at)
            at += len(reader.piece(token_id))
        assert detokenizer.num_tokens_before(offset) == sum(start < before for start in starts)
    assert detokenizer.num_tokens == len(ids)
    assert detokenizer.num_chars == len(text)


def test_a_token_after_a_broken_character_belongs_to_the_next_one() -> None:
    _, detokenizer = _stream(BYTES, [0xE4, ord("a"), ord("b")], [1, 1, 1])
    assert [detokenizer.num_tokens_before(offset) for offset in range(4)] == [0, 1, 2, 3]


@given(raw=st.binary(max_size=12))
def test_offsets_map_to_tokens_in_broken_utf8_too(raw: bytes) -> None:
    _, detokenizer = _stream(BYTES, list(raw), [1] * len(raw))
    text = raw.decode(errors="replace")
    for offset in range(len(text) + 1):
        # a byte lies before the offset if with it the text gets no longer than the offset allows
        before = sum(len(raw[: n + 1].decode(errors="replace")) <= offset for n in range(len(raw)))
        assert detokenizer.num_tokens_before(offset) == before


def test_an_encoded_surrogate_is_two_broken_characters_at_once() -> None:
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.push([byte]) for byte in b"\xed\xa0x"] == ["", "\ufffd\ufffd", "x"]
    detokenizer.check()
    assert [detokenizer.num_tokens_before(offset) for offset in range(4)] == [0, 1, 2, 3]


def test_a_hundred_thousand_tokens_one_by_one_give_the_whole_text(smollm: Tokenizer) -> None:
    ids = [(n * 7919) % smollm.vocab_size for n in range(100_000)]
    detokenizer = Detokenizer(smollm)
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join(pieces) + detokenizer.finish() == smollm.decode(ids)
    assert len(detokenizer._held) <= 3  # what is kept between tokens does not grow
