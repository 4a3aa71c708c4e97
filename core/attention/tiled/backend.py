"""The backend: single rows of all requests at once, and chunks run by run.

A prompt's chunk is cut into runs of rows that end at the same tile, so that what lies after them is not
computed; the KV of a wave of tiles is gathered once for all runs.

Shapes: see the package; M rows of a run (tokens x R), W tiles of a wave.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from core.attention import AttentionPlan, KVStorage, Span
from core.attention.tiled.parts import MergedParts, TileParts, TileSizes, mask_after, powers, softmax_part
from core.attention.tiled.row_rule import RowRule
from core.layers.region import Region

TILE_TOKENS = 128
WAVE_TILES = 8
"""Tiles of a prompt's chunk that are gathered at a time."""
RUN_ROWS = 512
"""Most rows of a run: its scores stay in the cache."""
LOG2_E = 1.4426950408889634


def tile_blocks(block_size: int) -> int:
    """Blocks of a tile."""
    return max(1, TILE_TOKENS // block_size)


class TiledAttention:
    """The backend for processors; on a GPU the same arithmetic runs without the bit-for-bit promise."""

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_dim: int, row_rule: RowRule) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.queries_per_kv = num_heads // num_kv_heads
        self.row_rule = row_rule
        self.scale = head_dim**-0.5 * LOG2_E
        """Scores are exponents of two."""
        self._regions: dict[tuple[int, torch.dtype], tuple[Region, Region]] = {}

    def regions(self, block_size: int, dtype: torch.dtype) -> list[Region]:
        """What of this is worth compiling, for a storage of such blocks."""
        return list(self.regions_of(block_size, dtype))

    def plan(
        self, spans: list[Span], storage: KVStorage, *, num_tokens: int, device: torch.device
    ) -> AttentionPlan:
        single = [span for span in spans if span.num_tokens == 1]
        chunks = [_Chunk(self, span, storage, device) for span in spans if span.num_tokens > 1]
        rows = _SingleRows(self, single, storage, device) if single else None
        return _TiledPlan(rows, chunks, num_tokens=num_tokens)

    def regions_of(self, block_size: int, dtype: torch.dtype) -> tuple[Region, Region]:
        """Parts of single rows, and their sum."""
        made = self._regions.get((block_size, dtype))
        if made is None:
            sizes = TileSizes(
                num_kv_heads=self.num_kv_heads,
                queries_per_kv=self.queries_per_kv,
                head_dim=self.head_dim,
                block_size=block_size,
                tile_blocks=tile_blocks(block_size),
            )
            made = (TileParts(sizes, self.row_rule).region(dtype), MergedParts(sizes).region())
            self._regions[block_size, dtype] = made
        return made


class _TiledPlan:
    def __init__(self, single: "_SingleRows | None", chunks: "list[_Chunk]", *, num_tokens: int) -> None:
        self._single, self._chunks, self._num_tokens = single, chunks, num_tokens

    def attend(self, layer: int, q_THD: Tensor) -> Tensor:
        if not self._chunks and self._single is not None:
            return self._single.attend(layer, q_THD)
        out_THD = torch.empty_like(q_THD)
        if self._single is not None:
            rows = self._single.token_rows
            out_THD.index_copy_(0, rows, self._single.attend(layer, q_THD.index_select(0, rows)))
        for chunk in self._chunks:
            chunk.attend(layer, q_THD, out_THD)
        return out_THD


class _SingleRows:
    """Requests that compute one token each. Parts lie request by request, in the order of positions."""

    def __init__(
        self, backend: TiledAttention, spans: Sequence[Span], storage: KVStorage, device: torch.device
    ) -> None:
        self._backend, self._storage = backend, storage
        self._parts, self._merged = backend.regions_of(storage.block_size, storage.dtype)
        blocks = tile_blocks(storage.block_size)
        tile = blocks * storage.block_size
        padding = torch.full((blocks,), storage.num_blocks, dtype=torch.int64)
        tables: list[Tensor] = []
        for span in spans:
            tables.append(span.block_table)
            tables.append(padding[: -len(span.block_table) % blocks])
        position_G = torch.tensor([span.first_position for span in spans])
        count_G = position_G // tile + 1
        end_G = count_G.cumsum(0)
        owner_U = torch.repeat_interleave(torch.arange(len(spans)), count_G)
        last_U = torch.full((len(owner_U),), tile - 1)
        last_U[end_G - 1] = position_G % tile
        self.token_rows = torch.tensor([span.first_row for span in spans]).to(device)
        self._rows_UKB = storage.block_rows(torch.cat(tables).view(-1, blocks).to(device))
        self._owner_U, self._last_U, self._count_G = owner_U.to(device), last_U.to(device), count_G.to(device)
        most = int(count_G.max())
        places = (end_G - count_G).unsqueeze(1) + torch.arange(most).clamp(max=count_G.unsqueeze(1) - 1)
        self._place_GW = places.to(device)

    def attend(self, layer: int, q_GHD: Tensor) -> Tensor:
        b = self._backend
        q_GKRD = (q_GHD * b.scale).view(-1, b.num_kv_heads, b.queries_per_kv, b.head_dim)
        highest, total, out, *_ = self._parts(
            self._rows_UKB, self._last_U, self._owner_U, q_GKRD, *self._storage.block_pools(layer)
        )
        if self._place_GW.shape[1] == 1:
            out = out / total.unsqueeze(-1)
        else:
            out, _ = self._merged(self._place_GW, self._count_G, highest, total, out)
        return out.reshape(q_GHD.shape)


@dataclass(slots=True)
class _Run:
    """Tokens `first ... last` of a chunk, which see the same tiles."""

    first: int
    last: int
    num_tiles: int
    mask_MS: Tensor
    """Minus infinity for slots of its last tile that come after each row's own."""
    state: tuple[Tensor, Tensor, Tensor] | None = field(default=None)
    """Highest `[K, M]`, total `[K, M]` and weighted values `[K, M, D]` of the tiles so far."""


class _Chunk:
    """Several tokens of one request."""

    def __init__(self, backend: TiledAttention, span: Span, storage: KVStorage, device: torch.device) -> None:
        self._backend, self._storage = backend, storage
        self._first_row, self._num_tokens = span.first_row, span.num_tokens
        blocks = tile_blocks(storage.block_size)
        self._tile = blocks * storage.block_size
        self._runs = self._cut(span, device)
        num_tiles = self._runs[-1].num_tiles
        table = torch.full((num_tiles * blocks,), storage.num_blocks, dtype=torch.int64)
        table[: len(span.block_table)] = span.block_table
        table = table.to(device)
        self._waves = [
            (first, storage.block_rows(table[first * blocks : (first + WAVE_TILES) * blocks].unsqueeze(0)))
            for first in range(0, num_tiles, WAVE_TILES)
        ]

    def _cut(self, span: Span, device: torch.device) -> list[_Run]:
        b, tile = self._backend, self._tile
        most = max(1, RUN_ROWS // b.queries_per_kv)
        runs = []
        position, end = span.first_position, span.first_position + span.num_tokens
        while position < end:
            stop = min(end, position + most, (position // tile + 1) * tile)
            offsets_M = torch.arange(position % tile, position % tile + stop - position, device=device)
            offsets_M = offsets_M.repeat_interleave(b.queries_per_kv)
            offsets_M = torch.nn.functional.pad(offsets_M, (0, self._padding(len(offsets_M))))
            runs.append(
                _Run(
                    first=position - span.first_position,
                    last=stop - span.first_position,
                    num_tiles=position // tile + 1,
                    mask_MS=mask_after(offsets_M, tile),
                )
            )
            position = stop
        return runs

    def _padding(self, num_rows: int) -> int:
        return -num_rows % self._backend.row_rule.multiple

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor) -> None:
        b = self._backend
        own = slice(self._first_row, self._first_row + self._num_tokens)
        by_head = (self._num_tokens, b.num_kv_heads, b.queries_per_kv, b.head_dim)
        num_rows = self._num_tokens * b.queries_per_kv
        # A run is padded with the rows of the next one, the last run with zeros.
        padded = num_rows + b.row_rule.multiple
        q_KMD = torch.zeros(b.num_kv_heads, padded, b.head_dim, device=q_THD.device)
        scaled = (q_THD[own] * b.scale).view(by_head).transpose(0, 1)
        q_KMD[:, :num_rows].view(b.num_kv_heads, self._num_tokens, *by_head[2:]).copy_(scaled)
        for first_tile, rows in self._waves:
            keys, values = self._storage.gather(layer, rows)
            for run in self._runs:
                if run.num_tiles > first_tile:
                    self._add_wave(run, q_KMD, first_tile, keys, values)
        out = out_THD[own].view(by_head)
        for run in self._runs:
            assert run.state is not None
            _, total, weighted = run.state
            run.state = None
            count = (run.last - run.first) * b.queries_per_kv
            attended = (weighted / total.unsqueeze(-1))[:, :count]
            out[run.first : run.last].transpose(0, 1).copy_(
                attended.view(b.num_kv_heads, -1, b.queries_per_kv, b.head_dim)
            )

    def _add_wave(self, run: _Run, q_KMD: Tensor, first_tile: int, keys: Tensor, values: Tensor) -> None:
        """Add the parts of a wave's tiles, in the order of positions."""
        rule, tile = self._backend.row_rule, self._tile
        per_kv = self._backend.queries_per_kv
        num_tiles = min(run.num_tiles - first_tile, WAVE_TILES)
        q = q_KMD[:, run.first * per_kv :][:, : len(run.mask_MS)]
        scores = rule.bmm(q, keys[:, :, : num_tiles * tile])
        if first_tile + num_tiles == run.num_tiles:
            scores[:, :, -tile:] += run.mask_MS
        highest_KMW, total_KMW, weights_KMWS = softmax_part(scores.view(*q.shape[:2], num_tiles, tile))
        highest = highest_KMW.amax(-1)
        if run.state is None:
            total = torch.zeros_like(highest)
            weighted = torch.zeros_like(q, memory_format=torch.contiguous_format)
        else:
            before, total, weighted = run.state
            highest = torch.maximum(highest, before)
            keep = powers(before - highest)
            total.mul_(keep)
            weighted.mul_(keep.unsqueeze(-1))
        scale_KMW = powers(highest_KMW.sub_(highest.unsqueeze(-1)))
        total_KMW.mul_(scale_KMW)
        weights_KMWS.mul_(scale_KMW.unsqueeze(-1))
        for index in range(num_tiles):
            total += total_KMW[:, :, index]
            rule.add_bmm(weighted, weights_KMWS[:, :, index], values[:, index * tile : (index + 1) * tile])
        run.state = (highest, total, weighted)
