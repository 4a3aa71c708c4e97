"""The backends under test, and requests whose keys and values already lie in a pool."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.attention import AttentionBackend, Span
from core.attention.kv_storage import KVStorage
from core.attention.tiled import TILE_TOKENS, RowRule, TiledAttention
from core.execution.probe import attention_row_rule


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int


def _tiled(heads: Heads, block_size: int, device: str) -> TiledAttention:
    rule = RowRule()
    if device == "cpu":
        tile = max(1, TILE_TOKENS // block_size) * block_size
        rule = attention_row_rule(heads.head_dim, tile, num_rows=256)
    return TiledAttention(
        num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, row_rule=rule
    )


BACKENDS: dict[str, Callable[[Heads, int, str], AttentionBackend]] = {"tiled": _tiled}
"""File of `core/attention` -> builds its backend. A new file is added here and is tested at once."""


@dataclass
class Walked:
    """One request: its queries, keys and values, float64 twins of what is stored, and its blocks."""

    q_THD: Tensor
    k_TKD: Tensor
    v_TKD: Tensor
    blocks: list[int]


class Pool:
    """A storage in which requests are laid out by hand, filled with large numbers elsewhere."""

    def __init__(
        self, backend: str, heads: Heads, *, block_size: int, device: str, num_tokens: int = 8192
    ) -> None:
        self.heads, self.device = heads, torch.device(device)
        self.backend = BACKENDS[backend](heads, block_size, device)
        num_blocks = num_tokens // block_size
        self.storage = KVStorage(
            num_blocks,
            block_size,
            num_layers=2,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            dtype=torch.float32,
            device=self.device,
        )
        self.rng = random.Random(1)
        self.free = self.rng.sample(range(num_blocks), num_blocks)
        self.spoil(self.free)

    def spoil(self, blocks: Sequence[int], number: float = 1e4) -> None:
        """Fill blocks as if somebody else had used them."""
        size = self.storage.block_size
        shape = (len(blocks) * size, self.heads.num_kv_heads, self.heads.head_dim)
        noise = torch.full(shape, number, device=self.device)
        block_ids = torch.tensor(blocks, device=self.device).repeat_interleave(size)
        offsets = torch.arange(size, device=self.device).repeat(len(blocks))
        for layer in (0, 1):
            self.storage.write(layer, self.storage.token_rows(block_ids, offsets), noise, -noise)

    def request(self, num_tokens: int, *, seed: int, size: float = 1.0) -> Walked:
        """Store a request's random keys and values in scattered blocks, in layer 0."""
        generator = torch.Generator().manual_seed(seed)
        h = self.heads
        q = torch.randn(num_tokens, h.num_heads, h.head_dim, generator=generator) * size
        k, v = (torch.randn(num_tokens, h.num_kv_heads, h.head_dim, generator=generator) for _ in range(2))
        blocks = [self.free.pop() for _ in range(-(-num_tokens // self.storage.block_size))]
        walked = Walked(q.to(self.device), k.to(self.device), v.to(self.device), blocks)
        self.store(walked, 0)
        return walked

    def store(self, walked: Walked, layer: int) -> None:
        size = self.storage.block_size
        positions = torch.arange(len(walked.k_TKD), device=self.device)
        block_ids = torch.tensor(walked.blocks, device=self.device)[positions // size]
        rows = self.storage.token_rows(block_ids, positions % size)
        self.storage.write(layer, rows, walked.k_TKD, walked.v_TKD)

    def attend(self, *parts: tuple[Walked, int, int], layer: int = 0) -> list[Tensor]:
        """One step: positions `first` up to `last` of each request; returns each one's rows."""
        spans, queries, row = [], [], 0
        for walked, first, last in parts:
            table = torch.tensor(walked.blocks[: (last - 1) // self.storage.block_size + 1])
            spans.append(Span(row, last - first, first, table))
            queries.append(walked.q_THD[first:last])
            row += last - first
        plan = self.backend.plan(spans, self.storage, num_tokens=row, device=self.device)
        with torch.inference_mode():
            out = plan.attend(layer, torch.cat(queries))
        return list(out.split([last - first for _, first, last in parts]))


def attention_original(walked: Walked, first: int, last: int) -> Tensor:
    """Causal attention, one query and one head at a time, in float64."""
    q, k, v = (tensor.double().cpu() for tensor in (walked.q_THD, walked.k_TKD, walked.v_TKD))
    per_kv = q.shape[1] // k.shape[1]
    out = torch.empty_like(q[first:last])
    for position in range(first, last):
        for head in range(q.shape[1]):
            keys, values = k[: position + 1, head // per_kv], v[: position + 1, head // per_kv]
            weights = torch.softmax(keys @ q[position, head] * q.shape[-1] ** -0.5, 0)
            out[position - first, head] = weights @ values
    return out
