"""The dense linear that models are written with. Loading replaces it by a packed kernel's module."""

import torch
from torch import Tensor, nn


class Linear(nn.Module):
    """`y = x @ weight.T + bias`, float32 in and out.

    The weight has no memory (device "meta") until loading gives it some.

    Shapes: weight `[out, in]`; x `[T, in]` -> `[T, out]`.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device="meta"), requires_grad=False)
        self.bias = (
            nn.Parameter(torch.empty(out_features, device="meta"), requires_grad=False) if bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)
