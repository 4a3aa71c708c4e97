"""Root-mean-square normalisation (arXiv:1910.07467)."""

import torch
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, in float32.

    Each row is reduced on its own and in one order, so the result does not depend on the number of rows.
    """
    return nn.functional.rms_norm(x, weight.shape, weight, eps)


class RMSNorm(nn.Module):
    """The weight of a norm; what computes with it is a region."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
