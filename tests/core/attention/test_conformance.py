"""Every attention backend: equal to plain attention, and blind to neighbours, chunks and places.

On a processor the second means bit for bit; on a GPU, where `stable` is not promised, closely.
"""

import pkgutil
import random

import pytest
import torch

import core.attention
from tests.core.attention.walks import BACKENDS, Heads, Pool, attention_original
from tests.gpu.devices import ON_EVERY_DEVICE

EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
HEADS = (Heads(4, 2, 16), Heads(3, 3, 8), Heads(8, 1, 32), Heads(9, 3, 64))
GROUPED = HEADS[0]
BLOCK_SIZES = (1, 16, 64, 48)
"""48 does not divide a tile of 256 tokens."""


def assert_same(ours: torch.Tensor, expected: torch.Tensor, device: str) -> None:
    if device == "cpu":
        assert torch.equal(ours, expected)
    else:
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_every_file_of_the_folder_is_tested():
    files = {module.name for module in pkgutil.iter_modules(core.attention.__path__)}
    assert files - {"kv_storage"} == set(BACKENDS)


@EVERY_BACKEND
@ON_EVERY_DEVICE
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_mixed_step_equals_plain_attention(backend, device, block_size, heads):
    """Decoding rows of several lengths beside chunks from the start, the middle and across tiles."""
    pool = Pool(backend, heads, block_size=block_size, device=device)
    spans = [
        (1, 0, 1),
        (300, 299, 300),
        (40, 0, 40),
        (600, 250, 262),
        (17, 16, 17),
        (520, 515, 518),
        (512, 511, 512),
    ]
    parts = [(pool.request(length, seed=i), first, last) for i, (length, first, last) in enumerate(spans)]
    for ours, (walked, first, last) in zip(pool.attend(*parts), parts, strict=True):
        assert ours.dtype == torch.float32
        expected = attention_original(walked, first, last)
        torch.testing.assert_close(ours.double().cpu(), expected, rtol=1e-5, atol=2e-6)


@EVERY_BACKEND
@ON_EVERY_DEVICE
def test_contexts_longer_than_a_wave_of_tiles_equal_plain_attention(backend, device):
    pool = Pool(backend, GROUPED, block_size=16, device=device)
    long, longer, short = (pool.request(n, seed=n) for n in (2500, 4300, 30))
    parts = [
        (long, 2046, 2051),
        (long, 2499, 2500),
        (longer, 4095, 4098),
        (longer, 4299, 4300),
        (short, 29, 30),
    ]
    for ours, (walked, first, last) in zip(pool.attend(*parts), parts, strict=True):
        expected = attention_original(walked, first, last)
        torch.testing.assert_close(ours.double().cpu(), expected, rtol=1e-5, atol=2e-6)


@EVERY_BACKEND
@ON_EVERY_DEVICE
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_query_gives_the_same_in_any_chunk_and_any_company(backend, device, heads):
    rng = random.Random(str(heads))
    pool = Pool(backend, heads, block_size=16, device=device)
    requests = [pool.request(n, seed=n) for n in (5, 255, 257, 400, 700, 900)]
    whole = [pool.attend((walked, 0, len(walked.q_THD)))[0] for walked in requests]
    for _ in range(12):
        parts, expected = [], []
        for index in rng.sample(range(len(requests)), rng.randint(1, len(requests))):
            length = len(requests[index].q_THD)
            first = rng.randrange(length)
            last = first + 1 if rng.random() < 0.5 else rng.randint(first + 1, length)
            parts.append((requests[index], first, last))
            expected.append(whole[index][first:last])
        for ours, alone in zip(pool.attend(*parts), expected, strict=True):
            assert_same(ours, alone, device)


@EVERY_BACKEND
@ON_EVERY_DEVICE
@pytest.mark.parametrize("edge", [128, 256, 1024, 2048, 4096])
def test_tokens_around_the_borders_of_tiles_and_waves_are_the_same_alone_and_in_chunks(backend, device, edge):
    pool = Pool(backend, GROUPED, block_size=16, device=device)
    walked, neighbour = pool.request(edge + 6, seed=1), pool.request(edge // 2, seed=2)
    chunk = pool.attend((walked, edge - 6, edge + 6))[0]
    for position in range(edge - 6, edge + 6):
        ours = pool.attend((neighbour, 3, 4), (walked, position, position + 1))[1]
        assert_same(ours, chunk[position - edge + 6 : position - edge + 7], device)


@EVERY_BACKEND
@ON_EVERY_DEVICE
def test_what_lies_after_a_query_and_in_other_blocks_leaves_no_trace(backend, device):
    pool = Pool(backend, GROUPED, block_size=16, device=device)
    walked = pool.request(330, seed=1)
    parts = ((walked, 100, 140), (walked, 299, 300))
    before = pool.attend(*parts)
    pool.spoil(pool.free, 65000.0)
    for tensor in (walked.k_TKD, walked.v_TKD):
        tensor[300:] = 3e4
    pool.store(walked, 0)
    for ours, expected in zip(pool.attend(*parts), before, strict=True):
        assert torch.equal(ours, expected)


@EVERY_BACKEND
@ON_EVERY_DEVICE
def test_where_the_blocks_lie_does_not_matter(backend, device):
    pool = Pool(backend, GROUPED, block_size=16, device=device)
    walked = pool.request(600, seed=1)
    here = pool.attend((walked, 550, 600))[0]
    walked.blocks = [pool.free.pop() for _ in walked.blocks]
    pool.store(walked, 0)
    assert torch.equal(pool.attend((walked, 550, 600))[0], here)


@EVERY_BACKEND
@ON_EVERY_DEVICE
def test_layers_read_their_own_keys_and_values(backend, device):
    pool = Pool(backend, GROUPED, block_size=16, device=device)
    walked = pool.request(60, seed=1)
    first = pool.attend((walked, 40, 60))[0]
    other = pool.request(60, seed=2)
    walked.k_TKD, walked.v_TKD = other.k_TKD, other.v_TKD
    pool.store(walked, 1)
    expected = attention_original(walked, 40, 60)
    ours = pool.attend((walked, 40, 60), layer=1)[0]
    torch.testing.assert_close(ours.double().cpu(), expected, rtol=1e-5, atol=2e-6)
    assert torch.equal(pool.attend((walked, 40, 60))[0], first)


@EVERY_BACKEND
@ON_EVERY_DEVICE
def test_a_first_token_attends_to_itself_alone(backend, device):
    pool = Pool(backend, GROUPED, block_size=16, device=device)
    walked = pool.request(20, seed=1, size=1e3)
    for last in (1, 20):
        ours = pool.attend((walked, 0, last))[0][0]
        torch.testing.assert_close(ours, walked.v_TKD[0].repeat_interleave(2, 0), rtol=3e-7, atol=0.0)


@EVERY_BACKEND
@ON_EVERY_DEVICE
@pytest.mark.parametrize("size", [1e-30, 1e3, 1e6])
def test_scores_of_any_size_stay_finite(backend, device, size):
    """Weights that are all but 0 or 1, and differences of tiles that underflow."""
    pool = Pool(backend, GROUPED, block_size=16, device=device)
    walked = pool.request(2600, seed=1, size=size)
    ours = pool.attend((walked, 2590, 2600), (walked, 30, 31))[0]
    expected = attention_original(walked, 2590, 2600)
    assert torch.isfinite(ours).all()
    if size < 1e4:  # beyond, float32 scores no longer tell close keys apart
        torch.testing.assert_close(ours.double().cpu(), expected, rtol=1e-3, atol=1e-3)
