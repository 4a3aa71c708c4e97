"""The K and V tensors of the block pool.

Per layer and for K and V each one tensor, in this order of dimensions:

    [block 0 .. N-1, then one block of zeros] x [key/value head] x [slot in the block] x [head width]

so that one row-wise gather of `(block, head)` rows gives each head's keys in token order without
any further copy. Block N is never written: it pads tables, and what it holds is finite.
"""

import mmap
from math import prod

import torch
from torch import Tensor


def kv_bytes_per_token(*, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of KV for one token: K and V of every layer."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize


class KVStorage:
    """Owned by the worker. Memory is zero pages until a block is first written."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_kv_heads, self.head_dim, self.dtype = num_kv_heads, head_dim, dtype
        shape = ((num_blocks + 1) * num_kv_heads, block_size * head_dim)
        self._keys = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        self._values = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        self._head_rows = torch.arange(num_kv_heads, device=device)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self._keys, *self._values))

    def token_rows(self, block_ids_T: Tensor, offsets_T: Tensor) -> Tensor:
        """Where tokens are written: one row of D numbers per token and head. int64 `[T * K]`."""
        first_T = block_ids_T * (self.num_kv_heads * self.block_size) + offsets_T
        return (first_T.unsqueeze(1) + self._head_rows * self.block_size).flatten()

    def block_rows(self, block_ids_IB: Tensor) -> Tensor:
        """Rows to gather for I runs of B blocks, head by head. int64 `[I * K * B]`."""
        rows_IKB = (block_ids_IB * self.num_kv_heads).unsqueeze(1) + self._head_rows.view(1, -1, 1)
        return rows_IKB.flatten()

    def write(self, layer: int, rows: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Store new tokens, which must be finite: a masked slot counts as nothing only then."""
        for pool, new in ((self._keys[layer], k_TKD), (self._values[layer], v_TKD)):
            pool.view(-1, self.head_dim).index_copy_(0, rows, new.reshape(-1, self.head_dim))

    def copy_rows(self, source_rows: Tensor, target_rows: Tensor) -> None:
        """Copy tokens, bit by bit, in every layer. Rows as `token_rows` gives them; no row on both sides."""
        for pool in (*self._keys, *self._values):
            by_row = pool.view(-1, self.head_dim)
            by_row.index_copy_(0, target_rows, by_row.index_select(0, source_rows))

    def gather(self, layer: int, rows: Tensor, tile: int) -> tuple[Tensor, Tensor]:
        """Keys and values of whole tiles, float32 `[I * K, tile, D]` each."""
        shape = (-1, tile, self.head_dim)
        return (
            self._keys[layer].index_select(0, rows).view(shape).float(),
            self._values[layer].index_select(0, rows).view(shape).float(),
        )


def _zeros(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take memory only once written: `torch.zeros` would touch every page of the pool."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
