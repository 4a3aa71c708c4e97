"""Root-mean-square normalisation (arXiv:1910.07467)."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension, in float32.

    Each row is reduced on its own and in one order, so the result does not depend on the number of rows.
    """

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (self.width,), self.weight, self.eps)
