"""A single row's attention over one tile of the KV, and the sum of a row's tiles.

Each in two ways that give the same bits where a processor's product adds one number after the other
(whoever adopts the compiled one compares them): with batched products on gathered tiles, and as loops
that read the pool where it lies, which only a compiler makes fast.

A tile's part is `(highest, total, out)`: the highest score rounded up to an integer, the sum of
`2 ** (score - highest)`, and the values weighted by those. As parts are brought to another highest by
powers of two, that rounds nothing: only the order of the sums counts, which is that of the positions.

Shapes: U parts, G rows, W parts of a row, P rows of the pool, K key/value heads, R query heads per
key/value head, D head width, B blocks of a tile, S tokens of a tile.
"""

import torch
from torch import Tensor

from core.attention import gather_blocks
from core.attention.tiled.row_rule import RowRule
from core.layers.region import Region

LOWEST = -1e30
"""Stands for minus infinity where a difference of two is taken."""
FAINTEST = -45.0
"""Below `2 ** FAINTEST` of the highest a weight is zero, so that no product underflows."""
WHOLE_VECTORS = 32
"""Elements that torch's vectorised loops take at a time, at most."""
SHARE = 32768
"""Elements below which torch's loops stay on one thread."""
PARTS_AT_ONCE = 64
"""Gathered as float32 at a time, so that a long context stays in the cache."""


def powers(differences: Tensor) -> Tensor:
    """`2 ** x` of integers below zero, in place; zero below `FAINTEST`. Exact, wherever they stand."""
    return torch.threshold_(differences, FAINTEST, -1e4).exp2_()


def weights_of(differences: Tensor) -> Tensor:
    """`2 ** x` below zero, in place where that can be; zero below `FAINTEST`. The tensor is contiguous.

    torch computes what is left of a thread's share after whole vectors with another function, which
    differs in the last bit. So the shares are made whole here.
    """
    flat = torch.threshold_(differences, FAINTEST, -1e4).view(-1)
    rest = len(flat) % WHOLE_VECTORS
    if rest:
        flat = torch.nn.functional.pad(flat, (0, WHOLE_VECTORS - rest))
    first, count = 0, len(flat)
    while first < count:
        size = _whole_shares(count - first)
        flat[first : first + size].exp2_()
        first += size
    return flat[: differences.numel()].view(differences.shape) if rest else differences


def _whole_shares(count: int) -> int:
    """The most of so many elements that torch's threads divide into whole vectors."""
    while True:
        num_shares = min(torch.get_num_threads(), -(-count // SHARE))
        if num_shares <= 1 or count % (num_shares * WHOLE_VECTORS) == 0:
            return count
        count -= count % (num_shares * WHOLE_VECTORS)


def summed(weights: Tensor) -> Tensor:
    """The sum over the last dimension, halves added to halves: the same in any company."""
    while weights.shape[-1] > 1:
        half = weights.shape[-1] // 2
        added = weights[..., :half] + weights[..., half : 2 * half]
        if weights.shape[-1] % 2:
            added = torch.cat((added, weights[..., 2 * half :]), -1)
        weights = added
    return weights.squeeze(-1)


def softmax_part(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Highest, total and weights of tiles of scores `[..., S]`, which are overwritten."""
    highest = scores.amax(-1).clamp_min_(LOWEST).ceil_()
    weights = weights_of(scores.sub_(highest.unsqueeze(-1)))
    return highest, summed(weights), weights


def mask_after(last: Tensor, tile: int) -> Tensor:
    """0 up to the last seen slot of each row, minus infinity after it. `[...]` -> `[..., tile]`."""
    seen = torch.arange(tile, device=last.device) <= last.unsqueeze(-1)
    return torch.where(seen, 0.0, float("-inf"))


class TileSizes:
    """What the regions below are made for."""

    def __init__(
        self, *, num_kv_heads: int, queries_per_kv: int, head_dim: int, block_size: int, tile_blocks: int
    ) -> None:
        self.num_kv_heads, self.queries_per_kv, self.head_dim = num_kv_heads, queries_per_kv, head_dim
        self.block_size, self.tile_blocks = block_size, tile_blocks
        self.tile = block_size * tile_blocks

    @property
    def name(self) -> str:
        return (
            f"{self.num_kv_heads}x{self.queries_per_kv}x{self.head_dim}.{self.tile_blocks}x{self.block_size}"
        )


class TileParts:
    """rows `[U, K, B]`, last seen slot `[U]`, owner `[U]`, q `[T, K, R, D]`, pools -> parts, R x weights."""

    def __init__(self, sizes: TileSizes, rule: RowRule) -> None:
        self.sizes, self.rule = sizes, rule

    def region(self, dtype: torch.dtype) -> Region:
        s = self.sizes
        pool = torch.zeros(Region.POOL_ROWS, s.block_size * s.head_dim, dtype=dtype)
        examples = (
            torch.arange(Region.ROWS * s.num_kv_heads * s.tile_blocks)
            .remainder(Region.POOL_ROWS)
            .view(Region.ROWS, s.num_kv_heads, s.tile_blocks),
            torch.arange(Region.ROWS).mul(5).remainder(s.tile),
            torch.arange(Region.ROWS),
            torch.zeros(Region.GROUPS, s.num_kv_heads, s.queries_per_kv, s.head_dim),
            pool,
            pool.clone(),
        )
        kind = str(dtype).removeprefix("torch.")
        return Region(
            f"tile_parts.{s.name}.{kind}", self.looped, examples, eager=self.batched, fused_multiply_add=True
        )

    def batched(
        self, rows_UKB: Tensor, last_U: Tensor, owner_U: Tensor, q_TKRD: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, ...]:
        """With products of gathered tiles."""
        count = rows_UKB.shape[0]
        if count <= PARTS_AT_ONCE:
            return self._batched(rows_UKB, last_U, owner_U, q_TKRD, keys, values)
        runs = [slice(first, first + PARTS_AT_ONCE) for first in range(0, count, PARTS_AT_ONCE)]
        pieces = [
            self._batched(rows_UKB[run], last_U[run], owner_U[run], q_TKRD, keys, values) for run in runs
        ]
        return tuple(torch.cat(column) for column in zip(*pieces, strict=True))

    def _batched(
        self, rows_UKB: Tensor, last_U: Tensor, owner_U: Tensor, q_TKRD: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, ...]:
        s = self.sizes
        k, v = gather_blocks(keys, values, rows_UKB, block_size=s.block_size, head_dim=s.head_dim)
        q = q_TKRD.index_select(0, owner_U).flatten(0, 1)
        num_rows = s.queries_per_kv
        padding = -num_rows % self.rule.multiple
        if padding:
            q = torch.nn.functional.pad(q, (0, 0, 0, padding))
        scores = self.rule.bmm(q, k).view(len(last_U), s.num_kv_heads, -1, s.tile)
        scores += mask_after(last_U, s.tile).view(-1, 1, 1, s.tile)
        highest, total, weights = softmax_part(scores)
        out = self.rule.bmm(weights.flatten(0, 1), v).view(*scores.shape[:3], s.head_dim)
        parts = (tensor[:, :, :num_rows].contiguous() for tensor in (highest, total, out))
        return (*parts, *weights[:, :, :num_rows].unbind(2))

    def looped(
        self, rows_UKB: Tensor, last_U: Tensor, owner_U: Tensor, q_TKRD: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, ...]:
        """Sums over one dimension after the other; each key is read once for all its query heads.

        The weights are a result so that they are computed once, not again for each number of a value.
        """
        s = self.sizes
        num_parts, heads = rows_UKB.shape[0], s.num_kv_heads
        shape = (num_parts, heads, s.tile_blocks, s.block_size)
        k = keys.view(-1, s.head_dim, s.block_size)[rows_UKB].float()
        v = values.view(-1, s.block_size, s.head_dim)[rows_UKB].float()
        q = q_TKRD[owner_U]
        slots = torch.arange(s.tile, device=last_U.device).view(s.tile_blocks, s.block_size)
        seen = slots <= last_U.view(-1, 1, 1, 1)
        highest, total, out, weights = [], [], [], []
        for head in range(s.queries_per_kv):
            scores = (q[:, :, head, None, :, None] * k).sum(3)
            scores = torch.where(seen, scores, float("-inf"))
            most = scores.amax((2, 3)).clamp_min(LOWEST).ceil()
            less = scores - most.view(num_parts, heads, 1, 1)
            weight = torch.exp2(torch.where(less > FAINTEST, less, -1e4))
            highest.append(most)
            weights.append(weight.view(num_parts, heads, s.tile))
            total.append(summed(weights[-1]))
            out.append((weight.view(*shape, 1) * v).sum((2, 3)))
        return (*(torch.stack(each, 2) for each in (highest, total, out)), *weights)


class MergedParts:
    """place `[G, W]`, number of parts `[G]`, parts -> attended `[G, K, R, D]`, scales."""

    def __init__(self, sizes: TileSizes) -> None:
        self.sizes = sizes

    def region(self) -> Region:
        s = self.sizes
        shape = (Region.POOL_ROWS, s.num_kv_heads, s.queries_per_kv)
        examples = (
            torch.arange(Region.ROWS * Region.GROUPS)
            .remainder(Region.POOL_ROWS)
            .view(Region.ROWS, Region.GROUPS),
            torch.arange(Region.ROWS).add(1),
            torch.zeros(shape),
            torch.ones(shape),
            torch.zeros(*shape, s.head_dim),
        )
        return Region(f"merged_parts.{s.name}", self.looped, examples, eager=self.stepwise)

    def stepwise(
        self, place_GW: Tensor, count_G: Tensor, highest: Tensor, total: Tensor, out: Tensor
    ) -> tuple[Tensor, ...]:
        """One part of every row after the other."""
        scale = self._scales(place_GW, count_G, highest)
        places = place_GW.flatten()
        total_GWKR = total.index_select(0, places).view(scale.shape).mul_(scale)
        out_GWKRD = out.index_select(0, places).view(*scale.shape, -1).mul_(scale.unsqueeze(-1))
        total_GKR, out_GKRD = torch.zeros_like(scale[:, 0]), torch.zeros_like(out_GWKRD[:, 0])
        for index in range(place_GW.shape[1]):
            total_GKR += total_GWKR[:, index]
            out_GKRD += out_GWKRD[:, index]
        return out_GKRD / total_GKR.unsqueeze(-1), scale

    def looped(
        self, place_GW: Tensor, count_G: Tensor, highest: Tensor, total: Tensor, out: Tensor
    ) -> tuple[Tensor, ...]:
        scale = self._scales(place_GW, count_G, highest)
        total_GKR = (total[place_GW] * scale).sum(1)
        out_GKRD = (out[place_GW] * scale.unsqueeze(-1)).sum(1)
        return out_GKRD / total_GKR.unsqueeze(-1), scale

    def _scales(self, place_GW: Tensor, count_G: Tensor, highest: Tensor) -> Tensor:
        """What each part is multiplied with, `[G, W, K, R]`; zero for places past a row's parts.

        Highest scores are integers already; that is written down for whoever tries other numbers.
        """
        parts = torch.arange(place_GW.shape[1], device=place_GW.device)
        own = (parts < count_G.unsqueeze(1)).view(*place_GW.shape, 1, 1)
        highest_GWKR = torch.where(own, highest[place_GW].ceil(), float("-inf"))
        less = highest_GWKR - highest_GWKR.amax(1, keepdim=True)
        return torch.exp2(torch.where(less > FAINTEST, less, -1e4))
