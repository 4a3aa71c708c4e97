"""The gated feed-forward block (SwiGLU, arXiv:2002.05202)."""

import torch
from torch import Tensor, nn

from core.layers.linear import Linear


def silu(x: Tensor) -> Tensor:
    """`x * sigmoid(x)`, written with operations that treat every element alike.

    torch's own `silu` computes the last elements of a buffer with another exponential than the
    rest: an element's value would depend on its place in the batch.
    """
    return x / (torch.exp(-x) + 1)


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`. Shapes: `[T, E]` -> `[T, E]` through width F."""

    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, hidden_width)
        self.up_proj = Linear(width, hidden_width)
        self.down_proj = Linear(hidden_width, width)

    def forward(self, x_TE: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu(self.gate_proj(x_TE)) * self.up_proj(x_TE))
        return out
