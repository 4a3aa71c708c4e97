"""Attention over KV tiles at fixed absolute boundaries, reduced in a fixed order.

A query's result is a function of its own row and of the KV before it: neighbours, chunking, prefix
hits and preemption leave no trace in it, bit for bit. What makes it so:

- positions are cut into tiles of about 128 tokens, counted from position 0;
- each tile is two batched products whose rows do not depend on the number of rows (on CPU they do
  below some small multiple of rows, found at load: `RowRule`), and one softmax part per row;
- parts are added in the order of positions, brought to one highest score by powers of two, which rounds
  nothing; a tile that a query does not see is left out, which is the same as adding zeros.

Source: arXiv:1805.02867 (online softmax); arXiv:2309.06180 (paged KV).
Shapes: T tokens, H heads, K key/value heads, R = H/K query heads per key/value head, D head width,
S tokens of a tile.
"""

from core.attention.tiled.backend import TILE_TOKENS, TiledAttention
from core.attention.tiled.row_rule import RowRule

__all__ = ["TILE_TOKENS", "RowRule", "TiledAttention"]
