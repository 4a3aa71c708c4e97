"""Rotary position embedding (arXiv:2104.09864), half-split as published checkpoints have it."""

import math

import torch
from torch import Tensor, nn

from core.layers.rope_scaling import RopeScaling

POSITIONS_AT_A_TIME = 4096


class Rotary(nn.Module):
    """Rotates pairs `(i, i + D/2)` of each head by an angle that grows with the position.

    Invariant: the tables depend on the position alone, computed in float64 and rounded once.
    """

    def __init__(
        self, head_dim: int, max_positions: int, *, theta: float, scaling: RopeScaling | None = None
    ) -> None:
        super().__init__()
        assert head_dim % 2 == 0, head_dim
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        inv_freq = torch.exp(-exponents * math.log(theta))
        if scaling is not None:
            inv_freq = scaling.scaled(inv_freq)
        cos_PD = torch.empty(max_positions, head_dim)
        sin_PD = torch.empty(max_positions, head_dim)
        for first in range(
            0, max_positions, POSITIONS_AT_A_TIME
        ):  # float64 tables of a long context are large
            last = min(first + POSITIONS_AT_A_TIME, max_positions)
            angles = torch.outer(torch.arange(first, last, dtype=torch.float64), inv_freq)
            cos_PD[first:last] = angles.cos().repeat(1, 2)
            # half of it negated, so that rotation is one roll: x * cos + roll(x, D/2) * sin
            sin_PD[first:last] = torch.cat((-angles.sin(), angles.sin()), 1)
        self.register_buffer("cos_PD", cos_PD, persistent=False)
        self.register_buffer("sin_PD", sin_PD, persistent=False)

    cos_PD: Tensor
    sin_PD: Tensor

    def tables(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the tables for these positions, float32 `[T, 1, D]` each."""
        return (
            self.cos_PD.index_select(0, positions_T).unsqueeze(1),
            self.sin_PD.index_select(0, positions_T).unsqueeze(1),
        )


def rotate(x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Apply the tables to every head. Shapes: `[T, N, D]` -> `[T, N, D]`."""
    return x_TND * cos_T1D + x_TND.roll(x_TND.shape[-1] // 2, -1) * sin_T1D
