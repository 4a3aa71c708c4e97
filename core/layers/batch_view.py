"""What a model sees of the batch it computes."""

from typing import Protocol

from torch import Tensor


class BatchView(Protocol):
    """One step, flattened over requests. The model neither knows the requests nor the cache."""

    @property
    def positions_T(self) -> Tensor:
        """Absolute position of every token, int64 `[T]`."""
        ...

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Store the new keys and values, then attend causally within each request.

        Shapes: q float32; k and v in the KV's type, finite; returns float32 `[T, H, D]`.
        """
        ...
