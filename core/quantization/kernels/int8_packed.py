"""8-bit weights with one scale per output row.

Stores   weight int8 `[out, in]`, scale bfloat16 `[out]`.
Computes bfloat16 activations, float32 accumulation, bfloat16 result.
Error    at most scale / 2 per weight, where the file has a finer scale per 32 weights.
Source   torch `aten::_weight_int8pack_mm`; row-wise absmax as in arXiv:2208.07339 section 2.

The layout is plain rows, so a tied embedding reads the same copy.
"""

import torch
from torch import Tensor, nn

from core.quantization.codec import BFLOAT16, Encoded
from core.quantization.ggml import dequantise
from core.quantization.kernels import LinearKernel


class Int8PackedLinear(Encoded, nn.Module):
    codec = BFLOAT16
    weight: Tensor
    scale: Tensor

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("weight", torch.empty(out_features, in_features, dtype=torch.int8))
        self.register_buffer("scale", torch.empty(out_features, dtype=torch.bfloat16))

    def product(self, codes: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(codes.squeeze(1), self.weight, self.scale).unsqueeze(1)

    def rows(self, row_ids: Tensor) -> Tensor:
        """The float32 weights of some rows: an embedding's lookup."""
        scale = self.scale.index_select(0, row_ids).float()
        return self.weight.index_select(0, row_ids).float() * scale.unsqueeze(-1)


def pack(module: nn.Module, first_row: int, raw: Tensor, ggml_type: str, factors: Tensor | None) -> None:
    assert isinstance(module, Int8PackedLinear)
    weight = dequantise(raw, ggml_type) if factors is None else dequantise(raw, ggml_type) * factors
    scale = (weight.abs().amax(1).clamp(min=1e-12) / 127).bfloat16()
    last_row = first_row + weight.shape[0]
    module.weight[first_row:last_row] = (weight / scale.float().unsqueeze(-1)).round().clamp(-127, 127)
    module.scale[first_row:last_row] = scale


KERNEL = LinearKernel(
    name="int8_packed",
    rank={"Q8_0": 1},
    fits=lambda out_features, in_features: out_features % 32 == 0 and in_features % 32 == 0,
    empty=Int8PackedLinear,
    pack=pack,
    devices=frozenset({"cpu"}),
)
