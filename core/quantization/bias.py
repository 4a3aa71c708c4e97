"""A bias beside any packed linear."""

import torch
from torch import Tensor, nn

from core.quantization.codec import Encoded
from core.quantization.kernels import PackedLinear


class Biased(Encoded, nn.Module):
    """`linear(x) + bias`. An addition of each element on its own, so rows stay independent.

    `product` is without the bias: whoever calls it adds `bias` after decoding.
    Shapes: bias float32 `[out]`.
    """

    bias: Tensor
    linear: PackedLinear

    def __init__(self, linear: PackedLinear, out_features: int) -> None:
        super().__init__()
        self.linear, self.codec = linear, linear.codec
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("bias", torch.empty(out_features))

    def product(self, codes: Tensor) -> Tensor:
        return self.linear.product(codes)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias
