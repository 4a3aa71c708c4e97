"""Attention backends, one file each; `kv_storage.py` is what they all read. This file is the contract.

A backend is built once per worker and plans each step once; the plan is then used by every layer.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from core.attention.kv_storage import KVStorage, gather_blocks

__all__ = ["AttentionBackend", "AttentionPlan", "KVStorage", "Span", "gather_blocks"]


class Span(NamedTuple):
    """The tokens one request computes in this step: rows `first_row ...` of the flat batch."""

    first_row: int
    num_tokens: int
    first_position: int
    block_table: Tensor
    """int64, every block that holds a position up to the last one of this span."""


class AttentionPlan(Protocol):
    """One step's index tensors and masks."""

    def attend(self, layer: int, q_THD: Tensor) -> Tensor:
        """Causal attention of the new tokens over all of their request's KV, float32 `[T, H, D]`."""
        ...


class AttentionBackend(Protocol):
    def plan(
        self, spans: list[Span], storage: KVStorage, *, num_tokens: int, device: torch.device
    ) -> AttentionPlan: ...
