"""The reference numerics against `transformers`, on random checkpoints and on the default model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from core.config import EngineConfig
from core.execution.worker import load_worker
from core.quantization import dequantise
from core.weights import open_gguf
from core.weights.packed_file import readonly_tensor
from tests.fakes.plans import planned, step
from tests.fakes.tiny_llama import TinyShape, load_transformers, transformers_llama, write_tiny_llama

SHAPES = {
    "float": TinyShape(),
    "untied": TinyShape(tied=False),
    "one-head-each": TinyShape(num_heads=4, num_kv_heads=4),
    "quantised": TinyShape(linear_type="Q4_1", embedding_type="Q8_0"),
    "q4_0": TinyShape(linear_type="Q4_0", embedding_type="Q4_0", tied=False),
    "half": TinyShape(linear_type="F16", embedding_type="BF16"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_reference_logits_equal_the_transformers_implementation(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    path = write_tiny_llama(tmp_path / "tiny.gguf", shape)
    worker = load_worker(EngineConfig(checkpoint=str(path), numerics="reference", num_blocks=40))
    token_ids = torch.randint(
        0, shape.vocab_size, (300,), generator=torch.Generator().manual_seed(1)
    ).tolist()

    with torch.inference_mode():
        expected = transformers_llama(shape)(torch.tensor([token_ids])).logits[0]
    first, rest = token_ids[:37], token_ids[37:]
    blocks = list(range(20))
    worker.execute(step(planned("a", first, blocks=blocks, num_samples=0)))
    ours = worker.runner.logits(
        step(planned("a", rest, first_position=37, blocks=blocks, num_samples=len(rest)))
    )

    torch.testing.assert_close(ours, expected[37:], atol=1e-4, rtol=1e-4)


PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "Once upon a time, in a small village by the sea,",
    "import asyncio\n\nasync def main",
    "The quick brown fox",
    "1, 2, 3, 5, 8,",
    "Dear Sir or Madam,",
    "In 1969, the first human",
    "Recipe for pancakes:\n-",
)


def test_greedy_tokens_of_the_default_model_equal_the_transformers_implementation(
    default_model_path: Path,
) -> None:
    from core import read_checkpoint_metadata
    from tokenization import tokenizer_from_gguf

    tokenizer = tokenizer_from_gguf(read_checkpoint_metadata(str(default_model_path)))
    model = transformers_from_gguf(default_model_path)
    worker = load_worker(
        EngineConfig(checkpoint=str(default_model_path), numerics="reference", num_blocks=64)
    )

    for prompt in PROMPTS:
        prompt_ids = tokenizer.encode(prompt)
        ours = _greedy(worker, prompt_ids, 64)
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt_ids + ours])).logits[0, len(prompt_ids) - 1 : -1].argmax(-1)
        # each token is the other's best choice after the tokens before it: so are all 64
        assert ours == theirs.tolist(), prompt


def _greedy(worker, prompt_ids: list[int], count: int) -> list[int]:
    output: list[int] = []
    new, position = prompt_ids, 0
    while len(output) < count:
        result = worker.execute(step(planned("a", new, first_position=position, blocks=range(64))))
        position += len(new)
        new = list(result.samples[0].token_ids)
        output += new
    return output


def transformers_from_gguf(path: Path):
    checkpoint = open_gguf(str(path))
    m: dict[str, Any] = checkpoint.metadata
    tensors = {}
    for name, info in checkpoint.tensors.items():
        raw = readonly_tensor(checkpoint.raw(name), torch.uint8)
        rows = info.shape[0] if len(info.shape) > 1 else 1
        tensors[name] = dequantise(raw.view(rows, -1), info.ggml_type).view(info.shape)
    config = LlamaConfig(
        vocab_size=len(m["tokenizer.ggml.tokens"]),
        hidden_size=m["llama.embedding_length"],
        intermediate_size=m["llama.feed_forward_length"],
        num_hidden_layers=m["llama.block_count"],
        num_attention_heads=m["llama.attention.head_count"],
        num_key_value_heads=m["llama.attention.head_count_kv"],
        head_dim=m["llama.rope.dimension_count"],
        max_position_embeddings=m["llama.context_length"],
        rms_norm_eps=m["llama.attention.layer_norm_rms_epsilon"],
        rope_theta=m["llama.rope.freq_base"],
        tie_word_embeddings=True,
    )
    return load_transformers(config, tensors)
