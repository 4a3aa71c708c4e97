"""How a checkpoint stretches its rotary angles to contexts longer than it was first trained on."""

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class RopeScaling(Protocol):
    """Changes the angle per position of each rotated pair, float64 `[D/2]`."""

    def scaled(self, inv_freq: Tensor) -> Tensor: ...


class LinearScaling(NamedTuple):
    """Every angle divided by `factor` (arXiv:2306.15595)."""

    factor: float

    def scaled(self, inv_freq: Tensor) -> Tensor:
        return inv_freq / self.factor


class Llama3Scaling(NamedTuple):
    """Slow pairs divided by `factor`, fast ones kept, those between blended.

    Source: Llama 3.1's model card; `transformers` `modeling_rope_utils.py`, rope type "llama3".
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: float

    def scaled(self, inv_freq: Tensor) -> Tensor:
        turns = self.original_max_position * inv_freq / (2 * math.pi)  # over the first training's context
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = blend.clamp(0, 1)
        return blend * inv_freq + (1 - blend) * inv_freq / self.factor


class FactorPerPair(NamedTuple):
    """A divisor for each pair, as GGUF files keep them (`rope_freqs.weight`)."""

    factors: tuple[float, ...]

    def scaled(self, inv_freq: Tensor) -> Tensor:
        return inv_freq / torch.tensor(self.factors, dtype=torch.float64)
