"""A bias on top of any packed linear."""

import torch
from torch import Tensor, nn


class Biased(nn.Module):
    """`linear(x) + bias`. An addition of each element on its own, so rows stay independent.

    Shapes: bias float32 `[out]`.
    """

    bias: Tensor

    def __init__(self, linear: nn.Module, out_features: int) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer("bias", torch.empty(out_features))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + self.bias
        return out
