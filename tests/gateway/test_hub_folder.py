"""Model folders behind the whole server: a tiny random one, and the default model as a folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from core import EngineConfig, read_checkpoint_metadata
from gateway.backends.local import open_local_backend
from tests.core.execution.test_reference_logits import transformers_from_gguf
from tests.fakes.hub_folders import tiny_model, write_folder
from tests.gateway.serving import ask, chat_body, serving, sse_data, streamed_text
from tests.tokenization.vocabularies import byte_level_json, spm_json, write_tokenizer

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def served(folder: Path, **engine: Any):
    config = EngineConfig(checkpoint=str(folder), executor="thread", num_blocks=64, **engine)
    return serving(open_local_backend, engine=config)


def tiny_folder(
    folder: Path, kind: str = "llama", *, document: dict[str, Any] | None = None, **names: str
) -> Path:
    write_folder(
        folder, tiny_model(kind, vocab_size=512), shard_size="100KB", eos_token_id=None, bos_token_id=None
    )
    (folder / "generation_config.json").write_text("{}")
    document = document or byte_level_json()
    names = names or {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    return write_tokenizer(folder, document, chat_template=TEMPLATE, **names)


def greedy_by_transformers(folder: Path, token_ids: list[int], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([token_ids]), max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=[],
            attention_mask=torch.ones(1, len(token_ids)),
        )  # fmt: skip
    ids: list[int] = output[0, len(token_ids) :].tolist()
    return ids


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
async def test_a_folder_is_served_as_transformers_reads_it(kind: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, kind)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    message = {"role": "user", "content": "hello world"}
    prompt_ids = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
    ids = greedy_by_transformers(folder, prompt_ids, 24)
    end = next((n for n, token_id in enumerate(ids) if token_id in {0, 2}), len(ids))
    expected = bytes_of(tokenizer, ids[:end])
    async with served(folder, numerics="reference") as server:
        body = chat_body(messages=[message], temperature=0, max_tokens=24)
        whole = (await ask(server, body)).json
        assert whole["choices"][0]["message"]["content"] == expected
        assert whole["usage"]["prompt_tokens"] == len(prompt_ids)
        streamed = await ask(server, chat_body(messages=[message], temperature=0, max_tokens=24, stream=True))
        assert sse_data(streamed.body)[-1] == "[DONE]"
        assert streamed_text(streamed.body) == expected


def bytes_of(tokenizer: Any, ids: list[int]) -> str:
    """What the library decodes, ids without a token left out."""
    text: str = tokenizer.decode([n for n in ids if n < len(tokenizer)], skip_special_tokens=True)
    return text


async def test_a_sentencepiece_style_folder_is_served(tmp_path: Path) -> None:
    document = spm_json("each")
    folder = tiny_folder(tmp_path, document=document, bos_token="<s>", eos_token="</s>")
    async with served(folder, numerics="reference") as server:
        answer = (await ask(server, chat_body(temperature=0, max_tokens=12))).json
        theirs = RustTokenizer.from_str(json.dumps(document))
        prompt = "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n"
        prompt_ids = theirs.encode(prompt).ids
        assert answer["usage"]["prompt_tokens"] == len(prompt_ids)
        ids = greedy_by_transformers(folder, prompt_ids, 12)
        end = next((n for n, token_id in enumerate(ids) if token_id in {2, 3, 5}), len(ids))
        tokens = [theirs.id_to_token(n) or "" for n in ids[:end] if n not in range(3)]
        raw = [bytes.fromhex(t[3:5]) if t.startswith("<0x") else t.replace("▁", " ").encode() for t in tokens]
        # Random bytes: the library gives up on a whole run of them, we only on those that are wrong.
        text = b"".join(raw).decode(errors="replace").removeprefix(" ")
        assert answer["choices"][0]["message"]["content"] == text


async def test_a_plain_prompt_is_continued_with_its_spaces(tmp_path: Path) -> None:
    document = spm_json("each")
    folder = tiny_folder(tmp_path, document=document, bos_token="<s>", eos_token="</s>")
    theirs = RustTokenizer.from_str(json.dumps(document))
    body = {"model": "scripted", "prompt": "hello", "max_tokens": 1, "temperature": 0}
    spaced = theirs.token_to_id("▁world")
    body["logit_bias"] = {str(spaced): 100}  # whatever else the model would say
    async with served(folder, numerics="reference") as server:
        answer = (await ask(server, json.dumps(body).encode(), path="/v1/completions")).json
        assert answer["choices"][0]["text"] == " world"
        chat = (await ask(server, chat_body(max_tokens=1, temperature=0, logit_bias=body["logit_bias"]))).json
        assert chat["choices"][0]["message"]["content"] == "world"


def default_model_folder(gguf: Path, folder: Path) -> Path:
    """The default model as the hub would have it, its weights widened from Q4_1."""
    transformers_from_gguf(gguf).half().save_pretrained(folder)
    metadata: dict[str, Any] = read_checkpoint_metadata(str(gguf))
    tokens = metadata["tokenizer.ggml.tokens"]
    vocab = {text: token_id for token_id, text in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    rust = RustTokenizer(models.BPE(vocab, merges))
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(
        [tokens[n] for n, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind == 3]
    )
    return write_tokenizer(
        folder, json.loads(rust.to_str()), bos_token="<|im_start|>", eos_token="<|im_end|>",
        chat_template=metadata["tokenizer.chat_template"],
    )  # fmt: skip


@pytest.mark.slow
async def test_the_default_model_as_a_folder_says_what_the_original_file_says(
    default_model_path: Path, tmp_path: Path
) -> None:
    folder = default_model_folder(default_model_path, tmp_path)
    question = {"role": "user", "content": "What is the capital of France? Answer in one short sentence."}
    body = chat_body(messages=[question], temperature=0, max_tokens=24)
    answers = []
    for model in (folder, default_model_path):
        async with served(model, numerics="reference") as server:
            answers.append((await ask(server, body)).json)
    from_folder, from_file = answers
    text = from_folder["choices"][0]["message"]["content"]
    assert "Paris" in text
    assert from_folder["usage"]["prompt_tokens"] == from_file["usage"]["prompt_tokens"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt_ids = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_dict=False)
    ids = greedy_by_transformers(folder, prompt_ids, 24)
    end = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else len(ids)
    assert text == tokenizer.decode(ids[:end])
