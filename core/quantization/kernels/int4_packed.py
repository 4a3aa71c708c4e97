"""4-bit weights in groups of 32, in the layout of torch's packed int4 product.

Stores   packed uint8 `[out, in/2]` (a private order of torch, different per processor),
         scales_and_zeros bfloat16 `[in/32, out, 2]`.
Computes bfloat16 activations, float32 accumulation, bfloat16 result.
Error    the 4-bit values are exact; scale and offset are rounded to bfloat16.
Source   torch `aten::_weight_int4pack_mm_for_cpu`: `w = (q - 8) * scale + zero`.
"""

import torch
from torch import Tensor, nn

from core.quantization.codec import BFLOAT16, Encoded
from core.quantization.ggml import GROUP, decode_rows
from core.quantization.kernels import LinearKernel

ROWS_PER_TILE = 64
"""The widest tile of output rows that the packed layout interleaves."""


class Int4PackedLinear(Encoded, nn.Module):
    codec = BFLOAT16
    packed: Tensor
    scales_and_zeros: Tensor

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("packed", torch.empty(out_features, in_features // 2, dtype=torch.uint8))
        self.register_buffer(
            "scales_and_zeros", torch.empty(in_features // GROUP, out_features, 2, dtype=torch.bfloat16)
        )

    def product(self, codes: Tensor) -> Tensor:
        raw: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            codes.squeeze(1), self.packed, GROUP, self.scales_and_zeros
        )
        return raw.unsqueeze(1)


def pack(module: nn.Module, first_row: int, raw: Tensor, ggml_type: str, factors: Tensor | None) -> None:
    """Fill rows `first_row ...`; runs start at multiples of `ROWS_PER_TILE`."""
    assert factors is None, "where this kernel is needed there are no calibrated ones"
    assert isinstance(module, Int4PackedLinear)
    assert first_row % ROWS_PER_TILE == 0, first_row
    rows = decode_rows(raw, ggml_type)
    last_row = first_row + rows.q.shape[0]
    module.packed[first_row:last_row] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
        rows.q.to(torch.int32), 1
    )
    zeros = rows.minimum + rows.scale * 8
    module.scales_and_zeros[:, first_row:last_row] = torch.stack((rows.scale, zeros), -1).transpose(0, 1)


KERNEL = LinearKernel(
    name="int4_packed",
    rank={"Q4_0": 1, "Q4_1": 1},
    fits=lambda out_features, in_features: out_features % ROWS_PER_TILE == 0 and in_features % GROUP == 0,
    empty=Int4PackedLinear,
    pack=pack,
    devices=frozenset({"cpu"}),
    row_granularity=ROWS_PER_TILE,
)
