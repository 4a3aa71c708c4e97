"""The K and V tensors: gathered as they were written, padded with zeros, in memory once touched."""

import itertools
import random

import pytest
import torch

from core.attention.kv_storage import KVStorage, kv_bytes_per_token
from core.execution.memory import kilobyte_fields
from tests.gpu.devices import ON_EVERY_DEVICE

LAYERS, HEADS, WIDTH = 2, 3, 8
BLOCK_SIZES = pytest.mark.parametrize("block_size", [1, 16, 64])


def storage(block_size: int, *, num_blocks: int = 40, dtype=torch.float32, device: str = "cpu") -> KVStorage:
    return KVStorage(
        num_blocks,
        block_size,
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=WIDTH,
        dtype=dtype,
        device=torch.device(device),
    )


def write_tokens(
    kv: KVStorage, layer: int, blocks: list[int], *, first: int, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Positions `first ...` of a request that owns these blocks."""
    positions = torch.arange(first, first + len(k))
    block_ids = torch.tensor(blocks)[positions // kv.block_size].to(k.device)
    rows = kv.token_rows(block_ids, (positions % kv.block_size).to(k.device))
    kv.write(layer, rows, k.to(kv.dtype), v.to(kv.dtype))


@ON_EVERY_DEVICE
@BLOCK_SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_written_in_pieces_is_gathered_in_token_order(block_size, dtype, device):
    rng = random.Random(block_size)
    kv = storage(block_size, dtype=dtype, device=device)
    blocks = rng.sample(range(40), 5)
    num_tokens = 5 * block_size
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(LAYERS, num_tokens, HEADS, WIDTH, generator=generator).to(device) for _ in range(2))
    cuts = sorted({0, num_tokens, *(rng.randrange(num_tokens) for _ in range(4))})
    for layer in range(LAYERS):
        for first, last in itertools.pairwise(cuts):
            write_tokens(kv, layer, blocks, first=first, k=k[layer, first:last], v=v[layer, first:last])

    for layer in range(LAYERS):
        rows = kv.block_rows(torch.tensor([blocks], device=device))
        keys, values = kv.gather(layer, rows)
        assert keys.dtype == values.dtype == torch.float32
        assert torch.equal(keys, k[layer].to(dtype).float().permute(1, 2, 0))
        assert torch.equal(values, v[layer].to(dtype).float().transpose(0, 1))


@ON_EVERY_DEVICE
@BLOCK_SIZES
def test_several_tiles_are_gathered_tile_by_tile_and_head_by_head(block_size, device):
    kv = storage(block_size, device=device)
    for block in range(8):
        number = torch.full((block_size, HEADS, WIDTH), float(block), device=device)
        number += torch.arange(HEADS, device=device).view(1, HEADS, 1) / 10
        write_tokens(kv, 0, list(range(8)), first=block * block_size, k=number, v=-number)
    tiles = torch.tensor([[3, 1], [7, 40], [0, 0]], device=device)
    keys, values = kv.gather(0, kv.block_rows(tiles))
    assert values.shape == (3 * HEADS, 2 * block_size, WIDTH)
    assert torch.equal(keys, -values.transpose(1, 2))
    for tile, blocks in enumerate(tiles.tolist()):
        for head in range(HEADS):
            found = values[tile * HEADS + head].view(2, block_size, WIDTH)[:, 0, 0].tolist()
            assert found == pytest.approx([0 if block == 40 else -block - head / 10 for block in blocks])


@ON_EVERY_DEVICE
@BLOCK_SIZES
def test_the_padding_block_is_zeros_and_stays_so_when_every_block_is_full(block_size, device):
    kv = storage(block_size, num_blocks=6, device=device)
    ones = torch.ones(6 * block_size, HEADS, WIDTH, device=device)
    write_tokens(kv, 1, list(range(6)), first=0, k=ones, v=ones)
    padding = kv.block_rows(torch.tensor([[6]], device=device))
    keys, values = kv.gather(1, padding)
    assert not keys.any()
    assert not values.any()
    everything = kv.block_rows(torch.tensor([list(range(6))], device=device))
    assert kv.gather(1, everything)[0].min() == 1
    assert not kv.gather(0, everything)[0].any(), "layers share nothing"


@ON_EVERY_DEVICE
@BLOCK_SIZES
def test_copied_rows_are_the_same_bits_in_every_layer_and_nothing_else_is_touched(block_size, device):
    kv = storage(block_size, num_blocks=8, dtype=torch.float16, device=device)
    generator = torch.Generator().manual_seed(2)
    k, v = (torch.randn(2 * block_size, HEADS, WIDTH, generator=generator).to(device) for _ in range(2))
    for layer in range(LAYERS):
        write_tokens(kv, layer, [3, 5], first=0, k=k + layer, v=v - layer)
    count = block_size - block_size // 2
    offsets = torch.arange(count, device=device)
    source, target = (torch.full((count,), block, device=device) for block in (5, 6))
    kv.copy_rows(kv.token_rows(source, offsets), kv.token_rows(target, offsets))
    for layer in range(LAYERS):
        keys, values = kv.gather(layer, kv.block_rows(torch.tensor([list(range(8))], device=device)))
        for stored in (keys.transpose(1, 2), values):
            blocks = stored.reshape(HEADS, 8, block_size, WIDTH)
            assert torch.equal(blocks[:, 6, :count], blocks[:, 5, :count])
            assert not blocks[:, 6, count:].any()
            assert not blocks[:, [0, 1, 2, 4, 7]].any()
            assert blocks[:, [3, 5]].any(-1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_pools_size_is_what_a_token_takes_times_the_tokens(dtype):
    kv = storage(16, num_blocks=9, dtype=dtype)
    per_token = kv_bytes_per_token(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=WIDTH, dtype=dtype)
    assert per_token == 2 * LAYERS * HEADS * WIDTH * dtype.itemsize
    assert kv.num_bytes == (9 + 1) * 16 * per_token  # the padding block is counted


def resident_bytes() -> int:
    return kilobyte_fields("/proc/self/smaps_rollup").get("Rss", 0)


def test_a_pool_takes_memory_only_where_it_is_written():
    before = resident_bytes()
    if not before:
        pytest.skip("this system has no /proc/self/smaps_rollup")
    kv = storage(16, num_blocks=200_000)
    assert kv.num_bytes > 600_000_000
    assert resident_bytes() - before < 20_000_000
    ones = torch.ones(1600, HEADS, WIDTH)
    write_tokens(kv, 0, list(range(0, 200_000, 2000)), first=0, k=ones, v=ones)
    assert 0 < resident_bytes() - before < 40_000_000
