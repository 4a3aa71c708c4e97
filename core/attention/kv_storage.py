"""The K and V tensors of the block pool.

Per layer and for K and V each one tensor of block rows, one for each of

    [block 0 .. N-1, then one block of zeros] x [key/value head]

A row of V holds `[slot in the block] x [head width]`; a row of K `[head width] x [slot]`, so that scores
of many slots are computed side by side and their sums need no reduction across a vector. Block N is
never written: it pads tables, and what it holds is finite.
"""

import mmap
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


def kv_bytes_per_token(*, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of KV for one token: K and V of every layer."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize


class TokenRows(NamedTuple):
    """Where tokens are written, int64."""

    block_ids: Tensor
    offsets: Tensor
    """`[T]` both."""
    values: Tensor
    """`[T * K]`: rows of D numbers."""


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

    def block_pools(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer: block rows, as `block_rows` counts them."""
        return self._keys[layer], self._values[layer]

    def token_rows(self, block_ids_T: Tensor, offsets_T: Tensor) -> TokenRows:
        first_T = block_ids_T * (self.num_kv_heads * self.block_size) + offsets_T
        values = (first_T.unsqueeze(1) + self._head_rows * self.block_size).flatten()
        return TokenRows(block_ids_T, offsets_T, values)

    def block_rows(self, block_ids_IB: Tensor) -> Tensor:
        """Rows of I runs of B blocks, head by head. int64 `[I, K, B]`."""
        return (block_ids_IB * self.num_kv_heads).unsqueeze(1) + self._head_rows.view(1, -1, 1)

    def write(self, layer: int, rows: TokenRows, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Store new tokens, which must be finite: a masked slot counts as nothing only then."""
        self._key_blocks(layer)[rows.block_ids, :, :, rows.offsets] = k_TKD
        by_row = self._values[layer].view(-1, self.head_dim)
        by_row.index_copy_(0, rows.values, v_TKD.reshape(-1, self.head_dim))

    def copy_rows(self, source: TokenRows, target: TokenRows) -> None:
        """Copy tokens, bit by bit, in every layer; no row on both sides."""
        for layer in range(len(self._keys)):
            blocks = self._key_blocks(layer)
            copied_TKD = blocks[source.block_ids, :, :, source.offsets]
            blocks[target.block_ids, :, :, target.offsets] = copied_TKD
        for pool in self._values:
            by_row = pool.view(-1, self.head_dim)
            by_row.index_copy_(0, target.values, by_row.index_select(0, source.values))

    def _key_blocks(self, layer: int) -> Tensor:
        """`[block, K, D, slot]`."""
        return self._keys[layer].view(-1, self.num_kv_heads, self.head_dim, self.block_size)

    def gather(self, layer: int, rows_IKB: Tensor) -> tuple[Tensor, Tensor]:
        """Runs of blocks in token order, float32: keys `[I * K, D, tokens]`, values `[I * K, tokens, D]`."""
        return gather_blocks(
            *self.block_pools(layer), rows_IKB, block_size=self.block_size, head_dim=self.head_dim
        )


def gather_blocks(
    keys: Tensor, values: Tensor, rows_IKB: Tensor, *, block_size: int, head_dim: int
) -> tuple[Tensor, Tensor]:
    """As `KVStorage.gather`, from block pools."""
    rows, num_runs, num_blocks = rows_IKB.flatten(), rows_IKB[..., 0].numel(), rows_IKB.shape[-1]
    k = keys.index_select(0, rows).view(num_runs, num_blocks, head_dim, block_size)
    v = values.index_select(0, rows).view(num_runs, num_blocks * block_size, head_dim)
    in_order = torch.empty(num_runs, head_dim, num_blocks, block_size, device=keys.device)
    return in_order.copy_(k.transpose(1, 2)).view(num_runs, head_dim, -1), v.float()


def _zeros(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take memory only once written: `torch.zeros` would touch every page of the pool."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
