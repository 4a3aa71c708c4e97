"""Weights widened to float32: the reference, and the last resort of `stable`.

Stores   weight float32 `[out, in]`.
Computes float32.
"""

import torch
from torch import Tensor, nn

from core.quantization.codec import FLOAT32, Encoded
from core.quantization.ggml import dequantise
from core.quantization.kernels import LinearKernel


class Float32Linear(Encoded, nn.Module):
    codec = FLOAT32
    weight: Tensor

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("weight", torch.empty(out_features, in_features))

    def product(self, codes: Tensor) -> Tensor:
        return nn.functional.linear(codes, self.weight)

    def rows(self, row_ids: Tensor) -> Tensor:
        """The weights of some rows: an embedding's lookup."""
        return self.weight.index_select(0, row_ids)


def pack(module: nn.Module, first_row: int, raw: Tensor, ggml_type: str, factors: Tensor | None) -> None:
    assert isinstance(module, Float32Linear)
    module.weight[first_row : first_row + raw.shape[0]] = (
        dequantise(raw, ggml_type) if factors is None else dequantise(raw, ggml_type) * factors
    )


KERNEL = LinearKernel(
    name="float32",
    rank={"F32": 9, "F16": 9, "BF16": 9, "Q8_0": 9, "Q4_0": 9, "Q4_1": 9},
    fits=lambda out_features, in_features: True,
    empty=Float32Linear,
    pack=pack,
    numerics=frozenset({"stable", "fast", "reference"}),
)
