"""`tokenizer.ggml.model = "llama"` against `sentencepiece` itself, on models trained here."""

import io
import random
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from tokenization import BadVocabulary, Detokenizer, Tokenizer, tokenizer_from_gguf

SENTENCES = (
    "the quick brown fox jumps over the lazy dog", "hello world, hello again", "over and over and over again",
    "a streaming gateway for long running agents", "    indented    text  with   spaces", "1234 5678 910",
    "die Straße führt über die Brücke", "if x == 10: return x + 1", "dog dogs dogged dogma", "aaaa aaa aa a",
)  # fmt: skip


def trained(
    *, vocab_size: int = 400, byte_fallback: bool = True, add_space: bool = True
) -> SentencePieceProcessor:
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 20), model_writer=model, model_type="bpe", vocab_size=vocab_size,
        byte_fallback=byte_fallback, add_dummy_prefix=add_space, normalization_rule_name="identity",
        remove_extra_whitespaces=False, hard_vocab_limit=False, minloglevel=2, character_coverage=1.0,
    )  # fmt: skip
    return SentencePieceProcessor(model_proto=model.getvalue())


def metadata_of(model: SentencePieceProcessor, **changes: Any) -> dict[str, Any]:
    """What a converter to GGUF writes."""
    ids = range(model.get_piece_size())
    types = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in ids
    ]
    entries = {
        "model": "llama", "tokens": [model.id_to_piece(i) for i in ids],
        "scores": [model.get_score(i) for i in ids],
        "token_type": types, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **changes,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in entries.items() if value is not None}


@pytest.fixture(scope="module")
def model() -> SentencePieceProcessor:
    return trained()


@pytest.fixture(scope="module")
def ours(model: SentencePieceProcessor) -> Tokenizer:
    return tokenizer_from_gguf(metadata_of(model))


def texts(count: int) -> list[str]:
    rng = random.Random(11)
    words = [*" ".join(SENTENCES).split(" "), "", "  ", "水", "\U0001fae0", "\n", "zzz", "overover", "thedog"]
    return ["", " ", *SENTENCES, *(" ".join(rng.choices(words, k=rng.randint(1, 12))) for _ in range(count))]


@pytest.mark.parametrize("add_space", [True, False])
@pytest.mark.parametrize("byte_fallback", [True, False])
def test_ids_are_those_of_sentencepiece(add_space, byte_fallback):
    model = trained(
        vocab_size=400 if byte_fallback else 140, byte_fallback=byte_fallback, add_space=add_space
    )
    ours = tokenizer_from_gguf(metadata_of(model, add_space_prefix=add_space))
    for text in texts(400):
        expected = model.encode(text)
        assert ours.encode(text, add_bos=False) == expected, text
        if byte_fallback:
            assert ours.decode(expected) == model.decode(expected) == text


def test_bos_comes_once_unless_the_file_says_no(model, ours):
    assert ours.encode("hello") == [1, *model.encode("hello")]
    assert ours.encode("<s>hello", parse_special=True) == ours.encode("hello")
    assert tokenizer_from_gguf(metadata_of(model, add_bos_token=False)).encode("hello") == model.encode(
        "hello"
    )


def test_control_tokens_cannot_be_spelled_and_do_not_grow_spaces(ours):
    assert not ours.special_token_ids & set(ours.encode("<s></s><unk>", add_bos=False))
    ids = ours.encode("<s>A b</s> c", parse_special=True)
    for _ in range(3):
        assert ours.encode(ours.decode(ids, skip_special=False), parse_special=True) == ids


def test_deltas_joined_are_the_text(model, ours):
    for text in texts(100):
        detokenizer = Detokenizer(ours)
        ids = model.encode(text)
        assert "".join([detokenizer.push([i]) for i in ids]) + detokenizer.finish() == text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scores": None}, "scores: is no list of"),
        ({"scores": [1.0]}, "scores: is no list of"),
        ({"bos_token_id": None, "add_bos_token": True}, "add_bos_token: is true but"),
        ({"add_eos_token": True}, "add_eos_token: True is not supported"),
    ],
)
def test_what_contradicts_itself_is_refused_by_its_key(changes, said, model):
    with pytest.raises(BadVocabulary, match=said):
        tokenizer_from_gguf(metadata_of(model, **changes))


def test_scores_that_are_no_numbers_and_bytes_that_are_none_are_refused(model):
    metadata = metadata_of(model)
    scores = metadata["tokenizer.ggml.scores"]
    with pytest.raises(BadVocabulary, match="no finite number"):
        tokenizer_from_gguf({**metadata, "tokenizer.ggml.scores": [float("nan"), *scores[1:]]})
    types = metadata["tokenizer.ggml.token_type"]
    with pytest.raises(BadVocabulary, match="byte token 300 is"):
        tokenizer_from_gguf({**metadata, "tokenizer.ggml.token_type": [*types[:300], 6, *types[301:]]})
