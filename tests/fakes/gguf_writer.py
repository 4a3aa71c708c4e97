"""Writes small GGUF files: sound ones from plain Python values, and lying ones through `Typed`.

The tests' own implementation of the format, kept apart from the reader so that each checks the other.
"""

import random
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

BLOCKS = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q8_0": (8, 32, 34),
    "BF16": (30, 1, 2),
}
"""Type name -> its number, elements per block, bytes per block."""

KINDS = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"),
    "f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d"),
}  # fmt: skip
STRING, ARRAY = 8, 9


@dataclass(slots=True, frozen=True)
class Typed:
    """A metadata value of a chosen type: `Typed("u64", 3)`, or an array of it: `Typed("i32", [1, 2])`."""

    kind: str
    value: "bool | int | float | list[int] | list[float] | list[bool]"


Metadata = Mapping[str, object]
"""Key -> bool, int, float, str, `Typed`, or a list of one of them (lists too)."""


@dataclass(slots=True, frozen=True)
class Tensor:
    """A tensor to write. `shape` is in torch order (out, in); `data` holds the blocks as they are stored."""

    name: str
    ggml_type: str
    shape: tuple[int, ...]
    data: bytes


def write_gguf(
    path: Path, metadata: Metadata, *, tensors: Iterable[Tensor] = (), alignment: int = 32, version: int = 3
) -> Path:
    """Write a file and return its path. `alignment` is only used, not recorded: put it in the metadata."""
    path.write_bytes(gguf_bytes(metadata, tensors=tensors, alignment=alignment, version=version))
    return path


def gguf_bytes(
    metadata: Metadata, *, tensors: Iterable[Tensor] = (), alignment: int = 32, version: int = 3
) -> bytes:
    """As `write_gguf`, in memory. Nothing follows the last tensor's last byte."""
    tensors = list(tensors)
    parts = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    for key, value in metadata.items():
        kind, payload = encode_value(value)
        parts += [encode_string(key), struct.pack("<I", kind), payload]
    offset, data = 0, []
    for tensor in tensors:
        number, block, block_bytes = BLOCKS[tensor.ggml_type]
        assert len(tensor.data) == prod(tensor.shape) // block * block_bytes, tensor.name
        parts += [encode_string(tensor.name), struct.pack("<I", len(tensor.shape))]
        parts += [struct.pack("<Q", size) for size in reversed(tensor.shape)]
        parts += [struct.pack("<IQ", number, offset)]
        padding = -len(tensor.data) % alignment
        data += [tensor.data, bytes(padding)]
        offset += len(tensor.data) + padding
    header = b"".join(parts)
    if not tensors:
        return header
    return header + bytes(-len(header) % alignment) + b"".join(data[:-1])


def random_tensor(
    name: str, ggml_type: str, shape: tuple[int, ...], *, rng: random.Random, scale: float = 0.02
) -> Tensor:
    """A tensor with finite values of about `scale`, whatever its type; the same for the same `rng`."""
    _, block, block_bytes = BLOCKS[ggml_type]
    num_blocks = prod(shape) // block
    if block == 1:
        values = [rng.gauss(0.0, scale) for _ in range(num_blocks)]
        if ggml_type == "BF16":
            data = b"".join(struct.pack("<f", value)[2:] for value in values)
        else:
            data = struct.pack(f"<{num_blocks}{'f' if ggml_type == 'F32' else 'e'}", *values)
        return Tensor(name, ggml_type, shape, data)
    num_scales = 2 if ggml_type == "Q4_1" else 1
    step = scale / (40.0 if ggml_type == "Q8_0" else 4.0)
    blocks = []
    for _ in range(num_blocks):
        scales = [step * rng.uniform(0.5, 1.5)] + [-8.0 * step] * (num_scales - 1)
        blocks.append(struct.pack(f"<{num_scales}e", *scales) + rng.randbytes(block_bytes - 2 * num_scales))
    return Tensor(name, ggml_type, shape, b"".join(blocks))


def encode_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def encode_value(value: object) -> tuple[int, bytes]:
    """Return the type number and the bytes. Plain ints become u32 or the smallest that holds them."""
    match value:
        case Typed(kind, list() as values):
            number, letter = KINDS[kind]
            return ARRAY, struct.pack(f"<IQ{len(values)}{letter}", number, len(values), *values)
        case Typed(kind, value):
            number, letter = KINDS[kind]
            return number, struct.pack("<" + letter, value)
        case bool():
            return encode_value(Typed("bool", value))
        case int():
            return encode_value(Typed(_smallest_kind([value]), value))
        case float():
            return encode_value(Typed("f32", value))
        case str():
            return STRING, encode_string(value)
        case list():
            return ARRAY, _encode_list(value)
    raise TypeError(f"{type(value).__name__} has no place in a GGUF file")


def _encode_list(values: list[object]) -> bytes:
    if values and all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        numbers = [value for value in values if isinstance(value, int)]
        return encode_value(Typed(_smallest_kind(numbers), numbers))[1]
    encoded = [encode_value(value) for value in values]
    kinds = {kind for kind, _ in encoded} or {STRING}
    assert len(kinds) == 1, "the elements of an array have one type"
    return struct.pack("<IQ", kinds.pop(), len(values)) + b"".join(payload for _, payload in encoded)


def _smallest_kind(values: list[int]) -> str:
    ranges = {"u32": (0, 2**32), "i32": (-(2**31), 2**31), "u64": (0, 2**64), "i64": (-(2**63), 2**63)}
    return next(kind for kind, (low, high) in ranges.items() if low <= min(values) and max(values) < high)
