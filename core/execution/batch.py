"""`StepPlan` -> `ForwardBatch`: flat ids, positions, slots and the attention's plan."""

from dataclasses import dataclass

import torch
from torch import Tensor

from core.attention import AttentionBackend, AttentionPlan, Span
from core.attention.kv_storage import KVStorage, TokenRows
from core.scheduler.plan import PlannedTokens, StepPlan


@dataclass(slots=True)
class ForwardBatch:
    """One step as tensors; the `BatchView` that models see."""

    token_ids_T: Tensor
    positions_T: Tensor
    sample_rows_R: Tensor
    """Rows whose logits are needed, in plan order."""
    _write_rows: TokenRows
    _storage: KVStorage
    _attention: AttentionPlan

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        self._storage.write(layer, self._write_rows, k_TKD, v_TKD)
        return self._attention.attend(layer, q_THD)


def build_batch(
    plan: StepPlan, storage: KVStorage, attention: AttentionBackend, *, device: torch.device
) -> ForwardBatch:
    """Lay the planned tokens out in plan order."""
    block_size = storage.block_size
    spans: list[Span] = []
    token_ids: list[int] = []
    positions, blocks, offsets = [], [], []
    sample_rows: list[int] = []
    for item in plan.items:
        first_row, num_tokens = len(token_ids), len(item.token_ids)
        token_ids.extend(item.token_ids)
        position_T = torch.arange(item.first_position, item.first_position + num_tokens)
        table = _block_table(item, block_size)
        positions.append(position_T)
        blocks.append(table[position_T // block_size])
        offsets.append(position_T % block_size)
        spans.append(Span(first_row, num_tokens, item.first_position, table))
        sample_rows.extend(range(len(token_ids) - item.num_samples, len(token_ids)))
    return ForwardBatch(
        token_ids_T=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions_T=torch.cat(positions).to(device),
        sample_rows_R=torch.tensor(sample_rows, dtype=torch.int64, device=device),
        _write_rows=storage.token_rows(torch.cat(blocks).to(device), torch.cat(offsets).to(device)),
        _storage=storage,
        _attention=attention.plan(spans, storage, num_tokens=len(token_ids), device=device),
    )


def copy_blocks(plan: StepPlan, storage: KVStorage, *, device: torch.device) -> None:
    """Do the plan's copies, all of them at once: one gather and one scatter per layer."""
    if not plan.block_copies:
        return
    counts = [copy.num_tokens for copy in plan.block_copies]
    repeats = torch.tensor(counts)
    offsets = torch.cat([torch.arange(count) for count in counts]).to(device)

    def rows(block_ids: list[int]) -> TokenRows:
        return storage.token_rows(torch.tensor(block_ids).repeat_interleave(repeats).to(device), offsets)

    storage.copy_rows(
        rows([copy.source for copy in plan.block_copies]), rows([copy.target for copy in plan.block_copies])
    )


def _block_table(item: PlannedTokens, block_size: int) -> Tensor:
    """The blocks up to the last planned position, int64."""
    table = torch.frombuffer(bytearray(item.block_table), dtype=torch.int32)
    needed = (item.first_position + len(item.token_ids) - 1) // block_size + 1
    assert len(table) >= needed, f"{item.request_id}: {len(table)} blocks for {needed}"
    return table[:needed].long()
