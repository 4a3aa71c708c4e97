"""What every `Tokenizer` promises, over every implementation."""

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenization import BadText, RenderedPrompt, TokenizationError, Tokenizer

# SmolLM2's vocabulary lacks the bytes that begin these, as the original does; they are left out of text.
# Sentencepiece writes a space as "▁", so it cannot tell the two apart.
_WRITABLE = st.text(
    st.characters(
        min_codepoint=0x20, max_codepoint=0x3FFFF, exclude_categories=("Cs", "Cc"), exclude_characters="▁"
    )
)
_SPELLED = st.sampled_from(["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|im_", "end|>", "<|", "<", "|>"])


def _readable(tokenizer: Tokenizer, text: str) -> str:
    """Metaspace puts a space only where there is none: a text that begins with one loses it."""
    return text.removeprefix(" ") if tokenizer.space_prefix == "first" else text


@given(text=_WRITABLE)
def test_decoding_what_was_encoded_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == _readable(tokenizer, text)


@given(texts=st.lists(st.one_of(_WRITABLE, _SPELLED), max_size=6))
def test_plain_text_never_gives_a_control_token(tokenizer: Tokenizer, texts: list[str]) -> None:
    ids = tokenizer.encode("".join(texts), add_bos=False)
    assert not tokenizer.special_token_ids.intersection(ids)
    assert tokenizer.decode(ids) == _readable(tokenizer, "".join(texts))


@given(texts=st.lists(st.one_of(_WRITABLE, _SPELLED), max_size=6))
def test_a_rendered_prompt_without_marks_is_encoded_as_text_with_control_tokens(tokenizer, texts) -> None:
    text = "".join(texts)
    assert tokenizer.encode_rendered(RenderedPrompt(text)) == tokenizer.encode(text, parse_special=True)


def test_control_tokens_are_parsed_only_on_request(tokenizer: Tokenizer) -> None:
    (control,) = [t for t in tokenizer.added_tokens if t.text == "<|im_end|>"]
    assert tokenizer.encode("<|im_end|>", parse_special=True, add_bos=False) == [control.token_id]
    assert control.token_id not in tokenizer.encode("<|im_end|>")


def test_control_tokens_are_hidden_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>b", parse_special=True, add_bos=False)
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special=False) == "a<|im_end|>b"


def test_bos_is_added_once_and_only_when_wanted(tokenizer: Tokenizer) -> None:
    bos = tokenizer.bos_token_id
    assert bos is not None
    plain = tokenizer.encode("hi", add_bos=False)
    assert tokenizer.encode("hi", add_bos=True) == [bos, *plain]
    written = tokenizer.token_bytes(bos).decode() + "hi"
    again = tokenizer.encode(written, parse_special=True, add_bos=True)
    assert (again[0], again.count(bos), tokenizer.decode(again)) == (bos, 1, "hi")


def test_ids_agree_with_one_another(tokenizer: Tokenizer) -> None:
    added_ids = {token.token_id for token in tokenizer.added_tokens}
    assert tokenizer.special_token_ids <= added_ids <= set(range(tokenizer.vocab_size))
    assert tokenizer.eos_token_ids <= tokenizer.special_token_ids
    assert {tokenizer.eos_token_id} <= tokenizer.eos_token_ids
    assert {tokenizer.bos_token_id} <= tokenizer.special_token_ids
    for token in tokenizer.added_tokens:
        assert tokenizer.token_bytes(token.token_id) == token.text.encode()


def test_the_fingerprint_is_a_sha256_in_hex(tokenizer: Tokenizer) -> None:
    assert re.fullmatch(r"[0-9a-f]{64}", tokenizer.fingerprint)


@pytest.mark.parametrize("beyond", [0, 1, 10**9])
def test_an_id_outside_the_vocabulary_is_refused_with_both_numbers(tokenizer: Tokenizer, beyond: int) -> None:
    for token_id in (tokenizer.vocab_size + beyond, -1 - beyond):
        with pytest.raises(TokenizationError, match=f"{token_id} .* {tokenizer.vocab_size}"):
            tokenizer.decode([token_id])


@pytest.mark.parametrize("text", ["\ud800", "ab\udfffc"])
def test_a_lone_surrogate_is_refused_by_its_code_point(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(BadText, match="lone surrogate U\\+D"):
        tokenizer.encode(text)


async def test_worker_threads_get_what_the_loop_gets(tokenizer: Tokenizer) -> None:
    texts = [f"stream {n}: " + "one two three " * 200 for n in range(8)]
    in_threads = await asyncio.gather(*(asyncio.to_thread(tokenizer.encode, text) for text in texts))
    assert list(in_threads) == [tokenizer.encode(text) for text in texts]


def test_encoding_and_decoding_are_stable_after_one_round(tokenizer: Tokenizer) -> None:
    first = tokenizer.encode("<|im_end|>A b", parse_special=True)
    again = tokenizer.encode(tokenizer.decode(first, skip_special=False), parse_special=True)
    assert again == first
