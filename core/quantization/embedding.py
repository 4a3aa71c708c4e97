"""Embeddings whose rows stay as they are stored, or are a linear's own rows."""

from typing import Protocol

import torch
from torch import Tensor, nn

from core.quantization.ggml import dequantise


class HasRows(Protocol):
    """A packed linear in plain row order."""

    def rows(self, row_ids: Tensor) -> Tensor: ...


class StoredEmbedding(nn.Module):
    """Looks rows up in a copy of the file's bytes and widens only those.

    Shapes: raw uint8 `[V, row bytes]`; ids int64 `[T]` -> float32 `[T, E]`.
    """

    raw: Tensor

    def __init__(self, num_embeddings: int, row_bytes: int, ggml_type: str) -> None:
        super().__init__()
        self.ggml_type = ggml_type
        self.register_buffer("raw", torch.empty(num_embeddings, row_bytes, dtype=torch.uint8))

    def forward(self, token_ids_T: Tensor) -> Tensor:
        return dequantise(self.raw.index_select(0, token_ids_T), self.ggml_type)


class SharedEmbedding(nn.Module):
    """Reads the rows of the tied output linear: one copy serves both."""

    def __init__(self, linear: HasRows) -> None:
        super().__init__()
        self._linear = (linear,)  # in a tuple: the module is registered once, under the linear's own name

    def forward(self, token_ids_T: Tensor) -> Tensor:
        return self._linear[0].rows(token_ids_T)
