"""Attention over KV tiles at fixed absolute boundaries, reduced in a fixed order.

A query's result is a function of its own row and of the KV before it: neighbours, chunking, prefix
hits and preemption leave no trace in it, bit for bit. What makes it so:

- positions are cut into tiles of about 256 tokens and waves of 8 tiles, counted from position 0;
- each tile is two batched products whose rows do not depend on the number of rows (on CPU they do
  below some small multiple of rows, found at load: `RowRule`), and one softmax part per row;
- the parts of a wave, then of the waves, are added in the order of positions; a tile a query does
  not see adds exact zeros.

Source: arXiv:1805.02867 (online softmax); arXiv:2309.06180 (paged KV).
Shapes: G groups (rows that share a KV walk), I items (a group's tile), R = H/K query heads per
key/value head, M rows of a group (tokens x R, padded), D head width, B blocks of a tile.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from core.attention import AttentionPlan, KVStorage, Span

TILE_TOKENS = 256
WAVE_TILES = 8
LOWEST = -1e30
"""Stands for minus infinity where a difference of two is taken."""


@dataclass(frozen=True, slots=True)
class RowRule:
    """How many rows a product must have to be row-invariant on this machine.

    Rows are padded to a multiple of `multiple`; `exact` means that only exactly `multiple` rows
    will do, so that larger products are cut.
    """

    multiple: int = 1
    exact: bool = False

    def bmm(self, a_JMC: Tensor, b_JCN: Tensor) -> Tensor:
        """Batched product of an already padded `a`."""
        if not self.exact or a_JMC.shape[1] == self.multiple:
            return torch.bmm(a_JMC, b_JCN)
        starts = range(0, a_JMC.shape[1], self.multiple)
        parts = [torch.bmm(a_JMC.narrow(1, start, self.multiple).contiguous(), b_JCN) for start in starts]
        return torch.cat(parts, 1)


@dataclass(frozen=True, slots=True)
class Wave:
    """What a group class reads of the KV in one wave of tiles. Items are ordered by tile, then group."""

    rows: Tensor
    """Rows of the storage to gather, for `KVStorage.gather`."""
    item_groups_I: Tensor | None
    """Each item's group; None where items are the groups themselves, in order."""
    mask_I1MS: Tensor
    groups_per_tile: tuple[int, ...]
    """Groups are sorted by length, so those that reach a tile are a prefix of them."""


@dataclass(frozen=True, slots=True)
class GroupClass:
    """Groups with the same number of tokens, computed together: all decoding rows, or one prompt's chunk."""

    token_rows: Tensor
    """Rows of the flat batch, group by group, int64 `[G * tokens]`."""
    num_groups: int
    num_tokens: int
    waves: tuple[Wave, ...]


class TiledAttention:
    """The backend for processors; on a GPU the same arithmetic runs without the bit-for-bit promise."""

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_dim: int, row_rule: RowRule) -> None:
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.queries_per_kv = num_heads // num_kv_heads
        self.row_rule = row_rule
        self.scale = head_dim**-0.5

    def plan(
        self, spans: list[Span], storage: KVStorage, *, num_tokens: int, device: torch.device
    ) -> AttentionPlan:
        single = [span for span in spans if span.num_tokens == 1]
        several = [span for span in spans if span.num_tokens > 1]
        classes = [self._plan_class([span], storage, device) for span in several]
        if single:
            classes.append(self._plan_class(single, storage, device))
        return TiledPlan(self, storage, classes, num_tokens)

    def padded_rows(self, num_tokens: int) -> int:
        rows = num_tokens * self.queries_per_kv
        return rows + -rows % self.row_rule.multiple

    def _plan_class(self, spans: list[Span], storage: KVStorage, device: torch.device) -> GroupClass:
        num_tokens = spans[0].num_tokens
        tile_blocks = max(1, TILE_TOKENS // storage.block_size)
        tile = tile_blocks * storage.block_size
        spans = sorted(spans, key=lambda span: -(span.first_position // tile))
        tiles = [(span.first_position + num_tokens - 1) // tile + 1 for span in spans]
        table_GB = torch.full((len(spans), tiles[0] * tile_blocks), storage.num_blocks, dtype=torch.int64)
        for row, span in enumerate(spans):
            table_GB[row, : len(span.block_table)] = span.block_table
        first_G = torch.tensor([span.first_position for span in spans])
        positions_GM = self._row_positions(first_G, num_tokens)
        waves = []
        for first_tile in range(0, tiles[0], WAVE_TILES):
            reached = range(first_tile, min(first_tile + WAVE_TILES, tiles[0]))
            counts = tuple(sum(1 for count in tiles if count > index) for index in reached)
            pairs = list(zip(reached, counts, strict=True))
            blocks_IB = torch.cat([table_GB[:n, t * tile_blocks : (t + 1) * tile_blocks] for t, n in pairs])
            groups_I = torch.cat([torch.arange(n) for n in counts])
            first_I = torch.cat([torch.full((n,), t * tile) for t, n in pairs])
            seen_IMS = (first_I.view(-1, 1, 1) + torch.arange(tile)) <= positions_GM[groups_I].unsqueeze(-1)
            mask_IMS = torch.zeros(seen_IMS.shape).masked_fill_(~seen_IMS, float("-inf"))
            waves.append(
                Wave(
                    rows=storage.block_rows(blocks_IB.to(device)),
                    item_groups_I=None if counts == (len(spans),) else groups_I.to(device),
                    mask_I1MS=mask_IMS.unsqueeze(1).to(device),
                    groups_per_tile=counts,
                )
            )
        rows_GT = torch.tensor([span.first_row for span in spans]).unsqueeze(1) + torch.arange(num_tokens)
        return GroupClass(rows_GT.flatten().to(device), len(spans), num_tokens, tuple(waves))

    def _row_positions(self, first_G: Tensor, num_tokens: int) -> Tensor:
        """The position each padded row looks back from, `[G, M]`; `[G, 1]` where a group's rows share it."""
        if num_tokens == 1:
            return first_G.unsqueeze(1)
        offsets_M = torch.arange(num_tokens).repeat_interleave(self.queries_per_kv)
        padding = self.padded_rows(num_tokens) - len(offsets_M)
        offsets_M = torch.nn.functional.pad(offsets_M, (0, padding))
        return first_G.unsqueeze(1) + offsets_M


class TiledPlan:
    """One step's walk over the KV."""

    def __init__(
        self, backend: TiledAttention, storage: KVStorage, classes: Iterable[GroupClass], num_tokens: int
    ) -> None:
        self._backend, self._storage, self._classes = backend, storage, list(classes)
        self._num_tokens = num_tokens

    def attend(self, layer: int, q_THD: Tensor) -> Tensor:
        if len(self._classes) == 1 and self._classes[0].num_groups == 1:
            return self._attend_class(layer, q_THD, self._classes[0])
        out_THD = torch.empty_like(q_THD)
        for group_class in self._classes:
            rows = group_class.token_rows
            out_THD.index_copy_(0, rows, self._attend_class(layer, q_THD.index_select(0, rows), group_class))
        return out_THD

    def _attend_class(self, layer: int, q_THD: Tensor, c: GroupClass) -> Tensor:
        """Shapes: q and the result `[G * tokens, H, D]`."""
        b = self._backend
        heads, per_kv, width = b.num_kv_heads, b.queries_per_kv, b.head_dim
        num_rows, padded = c.num_tokens * per_kv, b.padded_rows(c.num_tokens)
        q_GKMD = (
            (q_THD * b.scale)
            .view(c.num_groups, c.num_tokens, heads, per_kv, width)
            .transpose(1, 2)
            .reshape(c.num_groups, heads, num_rows, width)
        )
        if padded != num_rows:
            q_GKMD = torch.nn.functional.pad(q_GKMD, (0, 0, 0, padded - num_rows))
        if len(c.waves) == 1 and len(c.waves[0].groups_per_tile) == 1:
            _, total, out = self._tile_parts(layer, q_GKMD, c.waves[0])
        else:
            total, out = self._walk(layer, q_GKMD, c.waves)
        out_GKMD = out / total.unsqueeze(-1)
        return (
            out_GKMD[:, :, :num_rows]
            .view(c.num_groups, heads, c.num_tokens, per_kv, width)
            .transpose(1, 2)
            .reshape(q_THD.shape)
        )

    def _tile_parts(self, layer: int, q_GKMD: Tensor, wave: Wave) -> tuple[Tensor, Tensor, Tensor]:
        """Each item's highest score `[I, K, M]`, sum of exponentials, and weighted values `[I, K, M, D]`."""
        b = self._backend
        tile = wave.mask_I1MS.shape[-1]
        k, v = self._storage.gather(layer, wave.rows, tile)
        q = q_GKMD if wave.item_groups_I is None else q_GKMD.index_select(0, wave.item_groups_I)
        shape = q.shape[:3]
        scores = b.row_rule.bmm(q.flatten(0, 1), k.transpose(1, 2)).view(*shape, tile)
        scores += wave.mask_I1MS
        highest = scores.amax(-1).clamp_min_(LOWEST)
        weights = torch.exp(scores.sub_(highest.unsqueeze(-1)))
        out = b.row_rule.bmm(weights.flatten(0, 1), v).view(q.shape)
        return highest, weights.sum(-1), out

    def _walk(self, layer: int, q_GKMD: Tensor, waves: tuple[Wave, ...]) -> tuple[Tensor, Tensor]:
        """Add the parts of all tiles in the order of positions; returns sum and weighted values per group."""
        highest = torch.full(q_GKMD.shape[:3], LOWEST, device=q_GKMD.device)
        total = torch.zeros_like(highest)
        out = torch.zeros_like(q_GKMD)
        for wave in waves:
            part_highest, part_total, part_out = self._tile_parts(layer, q_GKMD, wave)
            reached = wave.groups_per_tile[0]
            before = highest[:reached].clone()
            first = 0
            for count in wave.groups_per_tile:
                torch.maximum(highest[:count], part_highest[first : first + count], out=highest[:count])
                first += count
            keep = torch.exp(before - highest[:reached])
            total[:reached] *= keep
            out[:reached] *= keep.unsqueeze(-1)
            first = 0
            for count in wave.groups_per_tile:
                weight = torch.exp(part_highest[first : first + count] - highest[:count])
                total[:count] += part_total[first : first + count] * weight
                out[:count] += part_out[first : first + count] * weight.unsqueeze(-1)
                first += count
        return total, out
