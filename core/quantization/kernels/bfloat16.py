"""Weights rounded to bfloat16.

Stores   weight bfloat16 `[out, in]`.
Computes bfloat16 activations, float32 accumulation, bfloat16 result.
Error    2^-8 relative per weight (8 significant bits).
"""

import torch
from torch import Tensor, nn

from core.quantization.codec import BFLOAT16, Encoded
from core.quantization.ggml import dequantise
from core.quantization.kernels import LinearKernel


class BFloat16Linear(Encoded, nn.Module):
    codec = BFLOAT16
    weight: Tensor

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("weight", torch.empty(out_features, in_features, dtype=torch.bfloat16))

    def product(self, codes: Tensor) -> Tensor:
        return nn.functional.linear(codes, self.weight)

    def rows(self, row_ids: Tensor) -> Tensor:
        """The float32 weights of some rows: an embedding's lookup."""
        return self.weight.index_select(0, row_ids).float()


def pack(module: nn.Module, first_row: int, raw: Tensor, ggml_type: str, factors: Tensor | None) -> None:
    assert isinstance(module, BFloat16Linear)
    module.weight[first_row : first_row + raw.shape[0]] = (
        dequantise(raw, ggml_type) if factors is None else dequantise(raw, ggml_type) * factors
    )


KERNEL = LinearKernel(
    name="bfloat16",
    rank={"F32": 0, "F16": 0, "BF16": 0, "Q8_0": 2, "Q4_0": 2, "Q4_1": 2},
    fits=lambda out_features, in_features: True,
    empty=BFloat16Linear,
    pack=pack,
)
