"""GGML's block formats: bytes of a GGUF tensor -> quantised values and scales, or float32.

A row of K weights is K / 32 blocks; a block is `d` (float16), for Q4_1 then `m` (float16), then
the values: Q8_0 32 signed bytes; Q4_* 16 bytes, low nibbles are weights 0-15, high ones 16-31.

    Q4_0  w = d * (q - 8)      Q4_1  w = d * q + m      Q8_0  w = d * q

Source: the GGUF specification and the block structures it names (ggml `docs/gguf.md`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32
HEADER_BYTES = {"Q4_0": 2, "Q4_1": 4, "Q8_0": 2}
VALUE_BYTES = {"Q4_0": 16, "Q4_1": 16, "Q8_0": 32}
FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCK_TYPES = tuple(HEADER_BYTES)


class QuantisedRows(NamedTuple):
    """`w = q * scale + minimum` per group of 32 weights.

    Shapes: q int16 `[N, K]` (4-bit types: 0 to 15; Q8_0: -128 to 127); scale and minimum float32 `[N, K/32]`.
    """

    q: Tensor
    scale: Tensor
    minimum: Tensor


def decode_rows(raw: Tensor, ggml_type: str) -> QuantisedRows:
    """Split the blocks of a quantised tensor.

    Shapes: raw uint8 `[N, K/32 * block bytes]`.
    """
    header, values = HEADER_BYTES[ggml_type], VALUE_BYTES[ggml_type]
    blocks = raw.reshape(raw.shape[0], -1, header + values)
    halves = blocks[..., :header].contiguous().view(torch.float16).float()
    scale = halves[..., 0]
    stored = blocks[..., header:].contiguous()
    if ggml_type == "Q8_0":
        q = stored.view(torch.int8).to(torch.int16)
        minimum = torch.zeros_like(scale)
    else:
        q = torch.cat((stored & 15, stored >> 4), -1).to(torch.int16)
        minimum = halves[..., 1] if ggml_type == "Q4_1" else scale * -8
    return QuantisedRows(q.flatten(1), scale.contiguous(), minimum.contiguous())


def dequantise(raw: Tensor, ggml_type: str) -> Tensor:
    """Return the float32 weights `[N, K]` that the stored bytes `[N, row bytes]` mean."""
    if ggml_type in FLOAT_DTYPES:
        return raw.contiguous().view(FLOAT_DTYPES[ggml_type]).float()
    rows = decode_rows(raw, ggml_type)
    grouped = rows.q.view(rows.q.shape[0], -1, GROUP).float()
    return (grouped * rows.scale.unsqueeze(-1) + rows.minimum.unsqueeze(-1)).flatten(1)


def quantise(weight: Tensor, ggml_type: str) -> Tensor:
    """Write float32 weights `[N, K]` as a file would store them, uint8 `[N, row bytes]`.

    Plain rounding between each block's extremes; the engine needs it to try kernels out.
    """
    if ggml_type in FLOAT_DTYPES:
        return weight.to(FLOAT_DTYPES[ggml_type]).contiguous().view(torch.uint8)
    blocks = weight.float().view(weight.shape[0], -1, GROUP)
    if ggml_type == "Q4_1":
        low, high = blocks.amin(-1).half(), blocks.amax(-1)
        scale = ((high - low.float()) / 15).half()
        header = torch.stack((scale, low), -1)
        offset = low.float()
    else:
        levels = 8 if ggml_type == "Q4_0" else 127
        scale = (blocks.abs().amax(-1) / levels).half()
        header = scale.unsqueeze(-1)
        offset = scale.float() * -8 if ggml_type == "Q4_0" else torch.zeros_like(scale).float()
    q = ((blocks - offset.unsqueeze(-1)) / scale.float().clamp(min=1e-8).unsqueeze(-1)).round()
    if ggml_type == "Q8_0":
        values = q.clamp(-127, 127).to(torch.int8).view(torch.uint8)
    else:
        q = q.clamp(0, 15).to(torch.uint8)
        values = q[..., : GROUP // 2] | (q[..., GROUP // 2 :] << 4)
    return torch.cat((header.contiguous().view(torch.uint8), values), -1).flatten(1)
