import random
import struct
from pathlib import Path

import pytest

from tests.fakes.gguf_writer import Tensor, Typed, gguf_bytes, random_tensor


@pytest.fixture
def small_metadata() -> dict[str, object]:
    """One entry of every kind a GGUF file may hold."""
    return {
        "general.architecture": "llama",
        "general.alignment": Typed("u32", 64),
        "small.u8": Typed("u8", 255),
        "small.i8": Typed("i8", -128),
        "small.u16": Typed("u16", 65535),
        "small.i16": Typed("i16", -32768),
        "llama.block_count": 2,
        "small.i32": Typed("i32", -5),
        "small.f32": 0.5,
        "small.f64": Typed("f64", 0.1),
        "small.u64": Typed("u64", 2**64 - 1),
        "small.i64": Typed("i64", -(2**63)),
        "small.yes": True,
        "small.empty": "",
        "tokenizer.ggml.tokens": ["<s>", "Ġhello", "", "水"],
        "tokenizer.ggml.scores": Typed("f32", [0.0, -1.5]),
        "tokenizer.ggml.flags": Typed("bool", [True, False]),
        "small.nested": [["a"], ["b", "c"]],
        "small.nothing": Typed("u8", []),
    }


@pytest.fixture
def small_tensors() -> list[Tensor]:
    """One tensor of every supported type, of several ranks."""
    rng = random.Random(7)
    return [
        Tensor("norm.weight", "F32", (4,), struct.pack("<4f", 1.0, 2.0, 3.0, 4.0)),
        random_tensor("half.weight", "F16", (3, 2), rng=rng),
        random_tensor("brain.weight", "BF16", (2, 2, 5), rng=rng),
        random_tensor("q4_0.weight", "Q4_0", (3, 64), rng=rng),
        random_tensor("q4_1.weight", "Q4_1", (2, 32), rng=rng),
        random_tensor("q8_0.weight", "Q8_0", (1, 2, 2, 32), rng=rng),
    ]


@pytest.fixture
def small_file(tmp_path: Path, small_metadata: dict[str, object], small_tensors: list[Tensor]) -> Path:
    path = tmp_path / "small.gguf"
    path.write_bytes(gguf_bytes(small_metadata, tensors=small_tensors, alignment=64))
    return path
