"""GGML's block formats against a decoder written from the format's description, one weight at a time."""

import random
import struct

import pytest
import torch

from core.quantization import decode_rows, dequantise, quantise
from core.quantization.ggml import BLOCK_TYPES, FLOAT_DTYPES, GROUP

ALL_TYPES = (*BLOCK_TYPES, *FLOAT_DTYPES)
SMALLEST_HALF, LARGEST_HALF = 2.0**-24, 65504.0
SCALES = (0.0, SMALLEST_HALF, 6e-5, 0.0123, 1.0, LARGEST_HALF)


def half(raw: bytes) -> float:
    value: float = struct.unpack("<e", raw)[0]
    return value


def decoded_by_hand(raw: bytes, ggml_type: str) -> list[float]:
    """A tensor's weights in exact arithmetic, rounded to float32 at the end."""
    weights: list[float] = []
    if ggml_type == "F32":
        weights = list(struct.unpack(f"<{len(raw) // 4}f", raw))
    elif ggml_type == "F16":
        weights = [half(raw[i : i + 2]) for i in range(0, len(raw), 2)]
    elif ggml_type == "BF16":  # a float32 without its lower half
        weights = [struct.unpack("<f", b"\0\0" + raw[i : i + 2])[0] for i in range(0, len(raw), 2)]
    elif ggml_type == "Q8_0":
        for i in range(0, len(raw), 34):
            weights += [half(raw[i : i + 2]) * q for q in struct.unpack("<32b", raw[i + 2 : i + 34])]
    else:
        header = 2 if ggml_type == "Q4_0" else 4
        for i in range(0, len(raw), header + 16):
            d = half(raw[i : i + 2])
            m = -8 * d if ggml_type == "Q4_0" else half(raw[i + 2 : i + 4])
            nibbles = raw[i + header : i + header + 16]
            weights += [d * (byte % 16) + m for byte in nibbles] + [d * (byte // 16) + m for byte in nibbles]
    return [struct.unpack("<f", struct.pack("<f", weight))[0] for weight in weights]


def random_rows(ggml_type: str, rng: random.Random, *, rows: int, columns: int) -> bytes:
    """Stored bytes whose scales reach from 0 over the smallest to the largest that a half can hold."""
    if ggml_type in FLOAT_DTYPES:
        values = [rng.choice((-1, 1)) * 2.0 ** rng.uniform(-24, 15) for _ in range(rows * columns)]
        if ggml_type == "BF16":
            return b"".join(struct.pack("<f", value)[2:] for value in values)
        return struct.pack(f"<{len(values)}{'f' if ggml_type == 'F32' else 'e'}", *values)
    blocks = []
    for _ in range(rows * columns // GROUP):
        numbers = [rng.choice((-1, 1)) * rng.choice(SCALES) for _ in range(2 if ggml_type == "Q4_1" else 1)]
        blocks.append(
            struct.pack(f"<{len(numbers)}e", *numbers) + rng.randbytes(32 if ggml_type == "Q8_0" else 16)
        )
    return b"".join(blocks)


def as_tensor(raw: bytes, rows: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(rows, -1)


@pytest.mark.parametrize("ggml_type", ALL_TYPES)
@pytest.mark.parametrize("seed", range(5))
def test_stored_bytes_mean_the_weights_that_the_format_describes(ggml_type, seed):
    rng = random.Random(seed)
    rows, columns = rng.randint(1, 5), GROUP * rng.randint(1, 6)
    raw = random_rows(ggml_type, rng, rows=rows, columns=columns)
    weights = dequantise(as_tensor(raw, rows), ggml_type)
    assert weights.dtype == torch.float32
    assert weights.shape == (rows, columns)
    assert weights.flatten().tolist() == decoded_by_hand(raw, ggml_type)


@pytest.mark.parametrize("ggml_type", BLOCK_TYPES)
def test_the_split_of_a_block_gives_back_its_weights(ggml_type):
    raw = random_rows(ggml_type, random.Random(1), rows=4, columns=96)
    rows = decode_rows(as_tensor(raw, 4), ggml_type)
    assert rows.q.dtype == torch.int16
    assert rows.q.shape == (4, 96)
    assert rows.scale.shape == rows.minimum.shape == (4, 3)
    low, high = (-128, 127) if ggml_type == "Q8_0" else (0, 15)
    assert low <= rows.q.min() < rows.q.max() <= high
    weights = rows.q.view(4, 3, GROUP) * rows.scale.unsqueeze(-1) + rows.minimum.unsqueeze(-1)
    assert torch.equal(weights.flatten(1), dequantise(as_tensor(raw, 4), ggml_type))


def allowed_error(blocks: torch.Tensor, ggml_type: str) -> torch.Tensor:
    """Per weight of `[N, groups, 32]`: half a step, and what rounding scale and offset to halves adds."""
    largest = blocks.abs().amax(-1, keepdim=True)
    if ggml_type == "Q8_0":
        step = largest / 127
    elif ggml_type == "Q4_0":
        # Levels are -8 to 7 around 0: the highest value may be a whole step beyond the last.
        step = 2 * largest / 8
    else:
        step = (blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)) / 15
    # A half is within 2^-11 of its number, or within 2^-25 of it where it is subnormal.
    return step / 2 + largest * 2.0**-9 + (127 if ggml_type == "Q8_0" else 16) * 2.0**-25


@pytest.mark.parametrize("ggml_type", BLOCK_TYPES)
@pytest.mark.parametrize("size", [1e-4, 0.02, 1.0, 1000.0])
def test_quantising_errs_by_at_most_half_a_step(ggml_type, size):
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(3)) * size
    restored = dequantise(quantise(weight, ggml_type), ggml_type)
    blocks = weight.view(64, -1, GROUP)
    error = (restored.view_as(blocks) - blocks).abs()
    assert (error <= allowed_error(blocks, ggml_type)).all()


@pytest.mark.parametrize(("ggml_type", "relative"), [("F32", 0.0), ("F16", 2.0**-11), ("BF16", 2.0**-8)])
def test_float_types_round_once(ggml_type, relative):
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(4))
    restored = dequantise(quantise(weight, ggml_type), ggml_type)
    assert ((restored - weight).abs() <= relative * weight.abs() + 2.0**-25 * (relative > 0)).all()


@pytest.mark.parametrize("ggml_type", ALL_TYPES)
def test_a_block_of_zeros_stays_one(ggml_type):
    assert not dequantise(quantise(torch.zeros(2, 64), ggml_type), ggml_type).any()


@pytest.mark.parametrize("ggml_type", ALL_TYPES)
def test_quantising_what_was_quantised_changes_little(ggml_type):
    """What a file holds is a fixed point up to the rounding of its scales."""
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(5))
    once = dequantise(quantise(weight, ggml_type), ggml_type)
    twice = dequantise(quantise(once, ggml_type), ggml_type)
    assert (twice - once).norm() <= (once - weight).norm() + 1e-6
