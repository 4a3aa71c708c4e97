"""`tokenizer.json` folders: the ids and the text of the `tokenizers` library itself, and what is refused."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer

from tests.tokenization.vocabularies import byte_level_json, spm_json, write_tokenizer
from tokenization import (
    BadVocabulary,
    ChatTemplate,
    Detokenizer,
    NoChatTemplate,
    TokenizationError,
    Tokenizer,
    UnsupportedTokenizer,
    read_chat_template,
    tokenizer_from_folder,
)

DOCUMENTS = {"byte level": byte_level_json(), **{kind: spm_json(kind) for kind in ("each", "first", "none")}}
TEXTS = (
    "hello world", " hello", "  hello  world ", "Zoë 水 \U0001fae0\n\t", "", " ", "a<s>b",
    "<|im_start|>hello<|im_end|> a",
    "    indented", "hello\n\nworld",
)  # fmt: skip


def build(tmp_path: Path, document: dict[str, Any], **config: Any) -> Tokenizer:
    return tokenizer_from_folder(write_tokenizer(tmp_path, document, **config))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_ids_and_text_are_those_of_the_library(name, tmp_path):
    ours = build(tmp_path, DOCUMENTS[name])
    theirs = RustTokenizer.from_str(json.dumps(DOCUMENTS[name]))
    rng = random.Random(3)
    words = [*TEXTS, "hell", "▁▁", "x", "he", "<0x0A>", "</s>"]
    texts = [*TEXTS, *("".join(rng.choices(words, k=rng.randint(1, 5))) for _ in range(200))]
    for text in texts:
        ids = ours.encode(text, parse_special=True)
        assert ids == _one_bos(theirs.encode(text).ids, ours.bos_token_id), text


def _one_bos(ids: list[int], bos: int | None) -> list[int]:
    """The library puts BOS before a text that begins with it."""
    return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("text", [text for text in TEXTS if "<" not in text])
def test_deltas_joined_are_the_library_s_decoding_of_all_tokens(name, text, tmp_path):
    ours = build(tmp_path, DOCUMENTS[name])
    theirs = RustTokenizer.from_str(json.dumps(DOCUMENTS[name]))
    ids = theirs.encode(text).ids
    detokenizer = Detokenizer(ours)
    streamed = "".join([detokenizer.push([token_id]) for token_id in ids]) + detokenizer.finish()
    assert streamed == ours.decode(ids) == theirs.decode(ids)


def test_pieces_with_leading_spaces_keep_them_but_for_the_first(tmp_path):
    ours = build(tmp_path, spm_json("each"))
    ids = [ours.encode("hello", add_bos=False)[0], *ours.encode("world", add_bos=False)]
    assert [ours.token_bytes(token_id) for token_id in ids] == [b" hello", b" world"]
    for continues, expected in ((False, ["hello", " world"]), (True, [" hello", " world"])):
        detokenizer = Detokenizer(ours, continues_text=continues)
        assert [detokenizer.push([token_id]) for token_id in ids] == expected


@pytest.mark.parametrize("name", DOCUMENTS)
def test_text_with_control_tokens_does_not_grow_from_round_to_round(name, tmp_path):
    ours = build(tmp_path, DOCUMENTS[name])
    ids = ours.encode("<|im_start|>A<|im_end|> a hello", parse_special=True)
    for _ in range(3):
        text = ours.decode(ids, skip_special=False)
        assert ours.encode(text, parse_special=True) == ids


def test_control_tokens_cannot_be_spelled_even_where_the_vocabulary_has_merges_for_them(tmp_path):
    document = byte_level_json()
    document["model"]["ignore_merges"] = True
    document["pre_tokenizer"]["use_regex"] = False
    ours = build(tmp_path, document)
    theirs = RustTokenizer.from_str(json.dumps({**document, "added_tokens": []}))
    assert theirs.encode("<|im_end|>").ids == [2]  # what would happen without the care
    assert not ours.special_token_ids & set(ours.encode("<|im_end|>"))
    assert ours.decode(ours.encode("<|im_end|>")) == "<|im_end|>"


def test_byte_tokens_are_bytes(tmp_path):
    ours = build(tmp_path, spm_json("none"))
    ids = ours.encode("水", add_bos=False)
    assert [ours.token_bytes(token_id) for token_id in ids] == [b"\xe6", b"\xb0", b"\xb4"]


def test_end_tokens_come_from_every_file_and_from_known_names(tmp_path):
    folder = write_tokenizer(tmp_path, spm_json("each"), eos_token="</s>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0, "vocab_size": 500}))
    ours = tokenizer_from_folder(folder)
    assert ours.eos_token_id == 2
    assert ours.eos_token_ids == {0, 2, 3, 5}  # 3 and 5: <|endoftext|>, <|im_end|>
    assert ours.vocab_size == 500
    assert ours.token_bytes(499) == b""  # the model has a logit for it, no token has the id


def test_bos_follows_the_config_and_then_the_post_processor(tmp_path):
    assert build(tmp_path / "a", spm_json("none")).encode("x")[0] == 1
    assert build(tmp_path / "b", spm_json("none"), add_bos_token=False).encode("x")[0] != 1
    with_bos = build(tmp_path / "c", byte_level_json(), bos_token="<|im_start|>", add_bos_token=True)
    assert with_bos.encode("x")[0] == 1


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"model": {"type": "Unigram", "vocab": []}},
        {},
        "model.type: 'Unigram' is not supported; there is: BPE",
    ),
    ({"model": None}, {}, "model: is missing"),
    ({"decoder": {"type": "WordPiece"}}, {}, r"decoder: \['WordPiece'\] is not supported"),
    ({"post_processor": {"type": "BertProcessing"}}, {}, "post_processor: 'BertProcessing'"),
    ({"pre_tokenizer": {"type": "Nonsense"}}, {}, "cannot be used"),
    ({"pre_tokenizer": 5}, {}, "5 stands where an object should"),
    ({"added_tokens": [{"id": 3}]}, {}, "has no content and id"),
    ({"added_tokens": [{"id": 0, "content": "<|other|>"}]}, {}, "is there twice"),
    ({}, {"bos_token": "<nope>"}, "bos_token: '<nope>' is no token"),
    ({}, {"add_bos_token": True}, "is true but there is no bos_token"),
    ({}, {"add_eos_token": True}, "add_eos_token: True is not supported"),
]


@pytest.mark.parametrize(("changes", "config", "said"), REFUSED, ids=[said for _, _, said in REFUSED])
def test_what_it_does_not_understand_is_refused_by_name(changes, config, said, tmp_path):
    with pytest.raises(BadVocabulary, match=said):
        build(tmp_path, {**byte_level_json(), **changes}, **config)


def test_damaged_files_are_refused_by_name(tmp_path):
    with pytest.raises(BadVocabulary, match=r"tokenizer\.json: is missing from"):
        tokenizer_from_folder(tmp_path)
    for content, said in (
        (b"{", "is not JSON"),
        (b"\xff", "is not UTF-8"),
        (b"[" * 100_000, "is not JSON"),
        (b"3", "holds int"),
    ):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(BadVocabulary, match=rf"tokenizer\.json: {said}"):
            tokenizer_from_folder(tmp_path)


def test_a_logit_for_every_token_is_needed(tmp_path):
    folder = write_tokenizer(tmp_path, byte_level_json())
    (folder / "config.json").write_text('{"vocab_size": 100}')
    with pytest.raises(BadVocabulary, match="vocab_size: is 100; the tokens need"):
        tokenizer_from_folder(folder)


def test_mutants_of_a_tokenizer_are_refused_or_work(tmp_path, search_factor):
    rng = random.Random(5)
    folder = write_tokenizer(tmp_path, spm_json("each"), bos_token="<s>")
    text = (folder / "tokenizer.json").read_text()
    num_read = 0
    for _ in range(100 * search_factor):
        at = rng.randrange(len(text))
        piece = rng.choice(("", "0", "-1", '"', "null", "[", "}", "99999999999999999999", "\\ud800", " "))
        (folder / "tokenizer.json").write_text(text[:at] + piece + text[at + rng.randint(0, 6) :])
        try:
            tokenizer_from_folder(folder).encode("hello <s> 水")
        except TokenizationError as error:
            assert str(error)
        else:
            num_read += 1
    assert num_read


@pytest.mark.parametrize(
    ("config", "file", "expected"),
    [
        ({"chat_template": "a{{ messages[0].content }}"}, None, "ahi"),
        (
            {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]},
            None,
            "d",
        ),
        ({"chat_template": "old"}, "new{{ bos_token }}", "new<|im_start|>"),
    ],
)
def test_the_chat_template_is_found_where_it_lies(config, file, expected, tmp_path):
    folder = write_tokenizer(tmp_path, byte_level_json(), bos_token="<|im_start|>", **config)
    if file:
        (folder / "chat_template.jinja").write_text(file)
    template = ChatTemplate.from_gguf(read_chat_template(folder), tokenizer_from_folder(folder))
    assert template.render([{"role": "user", "content": "hi"}]).text == expected


def test_no_chat_template_and_one_of_an_unknown_name(tmp_path):
    folder = write_tokenizer(tmp_path, byte_level_json())
    with pytest.raises(NoChatTemplate):
        ChatTemplate.from_gguf(read_chat_template(folder), tokenizer_from_folder(folder))
    write_tokenizer(tmp_path, byte_level_json(), chat_template=[{"name": "rag", "template": "r"}])
    with pytest.raises(UnsupportedTokenizer, match=r"chat_template: \['rag'\] is not supported"):
        read_chat_template(folder)
