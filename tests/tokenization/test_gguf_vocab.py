"""Tokenisers out of GGUF metadata: known encodings, the families' words, and files that lie."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from tests.tokenization.vocabularies import CONTROL, load, qwen2_subset, tiny_metadata
from tokenization import BadVocabulary, Tokenizer, UnsupportedTokenizer, tokenizer_from_gguf
from tokenization.bpe import ByteLevelBPE, cut_at_words
from tokenization.gguf_vocab import MAX_ADDED_TOKEN_CHARS
from tokenization.pre_tokenizers import PRE_TOKENIZATIONS

P = "tokenizer.ggml."


@pytest.fixture(scope="module")
def original(smollm_metadata) -> RustTokenizer:
    """SmolLM2's tokeniser as its own tokenizer.json builds it, from ready-made parts of the library."""
    tokens = smollm_metadata[P + "tokens"]
    merges = [tuple(line.split(" ")) for line in smollm_metadata[P + "merges"]]
    rust = RustTokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:17]])
    return rust


_PIECES = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["<|im_end|>", "<|im_start|>", " it's", "\n\n", "   ", "12345", "½Ⅷ٣", "\r\n", "\t"]),
)


@given(pieces=st.lists(_PIECES, max_size=12))
def test_smollm2_encodes_and_decodes_as_its_own_tokeniser(smollm: Tokenizer, original, pieces) -> None:
    text = "".join(pieces)
    expected = original.encode(text, add_special_tokens=False).ids
    assert smollm.encode(text, parse_special=True) == expected
    assert smollm.decode(expected) == original.decode(expected)
    assert smollm.decode(expected, skip_special=False) == original.decode(expected, skip_special_tokens=False)


@given(ids=st.lists(st.integers(0, 49151), max_size=40))
def test_smollm2_decodes_any_ids_as_its_own_tokeniser(smollm: Tokenizer, original, ids) -> None:
    assert smollm.decode(ids) == original.decode(ids)


def test_smollm2_knows_both_tokens_that_end_a_turn(smollm: Tokenizer) -> None:
    assert smollm.eos_token_ids == {0, 2}
    assert (smollm.bos_token_id, smollm.eos_token_id, smollm.vocab_size) == (1, 2, 49152)
    assert smollm.special_token_ids == set(range(17))


def test_known_encodings_of_qwen2_come_out() -> None:
    metadata, original_ids, vectors = qwen2_subset()
    qwen2 = tokenizer_from_gguf(metadata)
    assert len(vectors) == 23
    for text, expected in vectors:
        assert [original_ids[token_id] for token_id in qwen2.encode(text)] == expected, text


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "deepseek-v3", "gpt-4o"])
def test_words_are_cut_as_the_published_tokenisers_cut_them(pre: str) -> None:
    known = load("pretoken_words.json")
    cutter = PRE_TOKENIZATIONS[pre].pre_tokenizer()
    for text, expected in zip(known["texts"], known["words"][pre], strict=True):
        assert [text[a:b] for _, (a, b) in cutter.pre_tokenize_str(text)] == expected


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["it", "'s", " 123", " fooBar", "!"]),
        ("smollm", ["it", "'s", " ", "1", "2", "3", " fooBar", "!"]),
        ("llama3", ["it", "'s", " ", "123", " fooBar", "!"]),
        ("qwen2", ["it", "'s", " ", "1", "2", "3", " fooBar", "!"]),
        ("qwen35", ["it", "'s", " ", "1", "2", "3", " fooBar", "!"]),
        ("tekken", ["it", "'s", " ", "1", "2", "3", " foo", "Bar", "!"]),
        ("gpt-4o", ["it's", " ", "123", " foo", "Bar", "!"]),
        ("deepseek-llm", ["it", "'", "s", " ", "1", "2", "3", " fooBar", "!"]),
        ("deepseek-coder", ["it", "'", "s", " ", "1", "2", "3", " fooBar", "!"]),
        ("deepseek-v3", ["it", "'s", " ", "123", " fooBar", "!"]),
    ],
)
def test_each_family_cuts_a_line_its_own_way(pre: str, words: list[str]) -> None:
    text = "it's 123 fooBar!"
    cutter = PRE_TOKENIZATIONS[pre].pre_tokenizer()
    assert [text[a:b] for _, (a, b) in cutter.pre_tokenize_str(text)] == words


_TEXTS_WITH_WORDS = st.lists(
    st.sampled_from(
        [
            " the",
            "hello",
            " world",
            "  ",
            "\n",
            "é",
            "e\u0301",
            "中文",
            "12",
            "'s",
            " a",
            "Z",
            ".",
            "\r\n ",
            "<|",
        ]
    )
).map("".join)


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZATIONS))
@given(text=_TEXTS_WITH_WORDS)
def test_long_text_encoded_in_parts_gives_the_ids_of_the_whole(pre: str, text: str) -> None:
    rule = PRE_TOKENIZATIONS[pre]
    parts = list(cut_at_words(text, part_chars=4))
    assert "".join(parts) == text
    cutter, normalizer = rule.pre_tokenizer(), rule.normalizer()

    def words(piece: str) -> list[str]:
        normal = normalizer.normalize_str(piece) if normalizer else piece
        return [word for word, _ in cutter.pre_tokenize_str(normal)]

    assert [word for part in parts for word in words(part)] == words(text)


def test_long_text_goes_to_the_library_as_one_batch_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tiny_metadata()
    bpe = ByteLevelBPE(
        {t: i for i, t in enumerate(metadata[P + "tokens"])}, [], rule=PRE_TOKENIZATIONS["gpt-2"]
    )
    rust, batches = bpe._rust, []

    class Recorder:
        """Has the batch methods alone: anything that holds the GIL is an AttributeError."""

        def encode_batch_fast(self, parts: list[str], *, add_special_tokens: bool) -> Any:
            batches.append(parts)
            return rust.encode_batch_fast(parts, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(bpe, "_rust", Recorder())
    text = "hello world " * 20_000
    (ids,) = bpe.encode_segments([text])
    assert len(batches) == 1
    assert len(batches[0]) > 10
    assert max(map(len, batches[0])) < 20_000
    assert ids == rust.encode(text, add_special_tokens=False).ids


def test_user_defined_tokens_count_in_plain_text_as_in_the_original() -> None:
    tokenizer = tokenizer_from_gguf(tiny_metadata(user_defined=("<tool_call>",)))
    assert tokenizer.encode("a<tool_call>b")[1] == len(CONTROL)
    assert len(CONTROL) not in tokenizer.special_token_ids
    assert tokenizer.decode(tokenizer.encode("a<tool_call>b")) == "a<tool_call>b"


def test_the_longest_of_two_control_tokens_at_one_place_wins() -> None:
    tokenizer = tokenizer_from_gguf(tiny_metadata(user_defined=("<think", "<think>")))
    assert tokenizer.encode("<think>") == [len(CONTROL) + 1]
    assert tokenizer.encode("<think ")[0] == len(CONTROL)


def test_harmony_messages_inside_a_turn_do_not_end_it() -> None:
    metadata = tiny_metadata()
    metadata[P + "tokens"][:4] = ["<|return|>", "<|call|>", "<|end|>", "<|pad|>"]
    metadata[P + "eos_token_id"] = 0
    assert tokenizer_from_gguf(metadata).eos_token_ids == {0, 1}


def test_add_bos_in_the_metadata_begins_plain_text_and_prompts() -> None:
    tokenizer = tokenizer_from_gguf(tiny_metadata() | {P + "add_bos_token": True})
    assert tokenizer.encode("hello")[0] == 1
    assert tokenizer.encode("hello", add_bos=False)[0] != 1


def test_equal_metadata_has_an_equal_fingerprint_and_any_change_another() -> None:
    base = tokenizer_from_gguf(tiny_metadata()).fingerprint
    assert tokenizer_from_gguf(tiny_metadata()).fingerprint == base
    changes = [
        {P + "pre": "qwen2"},
        {P + "merges": tiny_metadata()[P + "merges"][:-1]},
        {P + "bos_token_id": 0},
        {P + "eos_token_id": 0},
        {P + "add_bos_token": True},
    ]
    assert (
        len({tokenizer_from_gguf(tiny_metadata() | change).fingerprint for change in changes} - {base}) == 5
    )


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("model", "bert", "gpt2, llama"),
        ("pre", "no-such", "smollm"),
        ("add_space_prefix", True, "False"),
    ],
)
def test_an_unsupported_kind_is_refused_by_a_list_of_what_there_is(key, value, named) -> None:
    with pytest.raises(UnsupportedTokenizer, match=f"{P}{key}: {value!r} is not supported; .*{named}"):
        tokenizer_from_gguf(tiny_metadata() | {P + key: value})


def _changed(key: str, index: int, value: object) -> dict[str, Any]:
    metadata = tiny_metadata()
    metadata[P + key] = [*metadata[P + key]]
    metadata[P + key][index] = value
    return {P + key: metadata[P + key]}


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({P + "model": None}, "model: is missing"),
    "model is a number": ({P + "model": 3}, "model: is int"),
    "no tokens": ({P + "tokens": None}, "tokens: is missing"),
    "tokens are a string": ({P + "tokens": "abc"}, "tokens: is str"),
    "tokens are empty": ({P + "tokens": []}, "tokens: is empty"),
    "a token is a number": (_changed("tokens", 7, 7), "item 7 is int"),
    "a token twice": (_changed("tokens", 9, CONTROL[0]), "is there twice, at 0 and 9"),
    "a token is no text": (_changed("tokens", 9, "\ud800"), "lone surrogate"),
    "an empty control token": (_changed("tokens", 3, ""), "added token 3 has 0 characters"),
    "a control token of one letter": (_changed("tokens", 3, "Ω"), "added token 3 has 1 char"),
    "an endless control token": (_changed("tokens", 3, "x" * (MAX_ADDED_TOKEN_CHARS + 1)), "added token 3"),
    "types too short": ({P + "token_type": [1, 1]}, "token_type: has 2 items for"),
    "an unknown type": (_changed("token_type", 5, 9), "item 5 is 9"),
    "a type is a string": (_changed("token_type", 5, "normal"), "item 5 is str"),
    "a merge without a space": (_changed("merges", 2, "hell"), "item 2, 'hell', is not two tokens"),
    "a merge of three": (_changed("merges", 2, "h e ll"), "item 2"),
    "a merge of unknown tokens": (_changed("merges", 2, "zz yy"), "item 2 needs 'zz'"),
    "a merge whose result is unknown": (_changed("merges", 2, "z y"), "item 2 needs 'zy'"),
    "a merge of a control token": (_changed("merges", 2, f"{CONTROL[0]} a"), "item 2 needs '<|endoftext|>'"),
    "no merges": ({P + "merges": None}, "merges: is missing"),
    "bos out of range": ({P + "bos_token_id": 10**6}, "bos_token_id: 1000000 is outside"),
    "eos negative": ({P + "eos_token_id": -1}, "eos_token_id: -1 is outside"),
    "eot is a string": ({P + "eot_token_id": "x"}, "eot_token_id: is str"),
    "padding out of range": ({P + "padding_token_id": 10**6}, "padding_token_id: 1000000"),
    "add_bos is a number": ({P + "add_bos_token": 1}, "add_bos_token: is int"),
    "add_bos without bos": (
        {P + "add_bos_token": True, P + "bos_token_id": None},
        "there is no bos_token_id",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_lies_is_refused_by_its_key(lie: str) -> None:
    change, named = LIES[lie]
    metadata = {key: value for key, value in (tiny_metadata() | change).items() if value is not None}
    with pytest.raises(BadVocabulary, match=named.replace("|", "\\|")):
        tokenizer_from_gguf(metadata)


_JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 400),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(-2, 9), st.text(max_size=4)), max_size=6),
)


@given(changes=st.dictionaries(st.sampled_from(sorted(tiny_metadata())), _JUNK, min_size=1))
def test_no_metadata_makes_anything_but_a_tokeniser_or_a_named_error(changes) -> None:
    try:
        tokenizer = tokenizer_from_gguf(tiny_metadata() | changes)
    except BadVocabulary as error:
        assert error.key.startswith(P)
    else:
        assert isinstance(tokenizer.encode("hello world"), list)
