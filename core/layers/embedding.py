"""Token embedding. Loading replaces it where the rows stay quantised."""

import torch
from torch import Tensor, nn


class Embedding(nn.Module):
    """Row lookup. Shapes: weight `[V, E]`; ids int64 `[T]` -> float32 `[T, E]`."""

    def __init__(self, num_embeddings: int, width: int) -> None:
        super().__init__()
        self.num_embeddings, self.width = num_embeddings, width
        self.weight = nn.Parameter(torch.empty(num_embeddings, width, device="meta"), requires_grad=False)

    def forward(self, token_ids_T: Tensor) -> Tensor:
        return self.weight.index_select(0, token_ids_T).float()
