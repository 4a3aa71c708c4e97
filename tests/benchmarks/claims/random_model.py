"""Random weights of any shape under the default model's own vocabulary and chat template."""

from dataclasses import replace
from pathlib import Path

from core import read_checkpoint_metadata
from gateway.model_store import DEFAULT_MODEL, pull
from tests.fakes.gguf_writer import Tensor, write_gguf
from tests.fakes.tiny_llama import TinyShape, tiny_metadata, tiny_tensors


def default_model() -> Path:
    return pull(DEFAULT_MODEL, report=lambda _what, _done, _total: None)


def write_random_model(path: Path, shape: TinyShape) -> Path:
    """Write a GGUF file; the shape's vocabulary becomes the default model's."""
    text_side = {
        key: value
        for key, value in read_checkpoint_metadata(str(default_model())).items()
        if key.startswith("tokenizer.")
    }
    tokens = text_side["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    shape = replace(shape, vocab_size=len(tokens))
    tensors = [
        Tensor(name, tensor.ggml_type, tuple(tensor.weight.shape), tensor.raw.numpy().tobytes())
        for name, tensor in tiny_tensors(shape).items()
    ]
    return write_gguf(path, {**tiny_metadata(shape), **text_side}, tensors=tensors)
