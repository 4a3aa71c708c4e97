"""What of attention is compiled: the loops for a compiler compute what the batched products do."""

import pytest
import torch
from torch import Tensor

from core.attention.tiled import RowRule, TiledAttention
from core.attention.tiled.parts import (
    FAINTEST,
    WHOLE_VECTORS,
    softmax_part,
    summed,
    weights_of,
)
from core.execution.probe import attention_row_rule

POOL_ROWS, NUM_PARTS, NUM_ROWS = 60, 12, 5


def random_parts(backend: TiledAttention, *, block_size: int = 16) -> tuple[Tensor, ...]:
    """Arguments of the first region: parts of five rows, tiles from anywhere in a pool."""
    generator = torch.Generator().manual_seed(1)
    heads, width = backend.num_kv_heads, backend.head_dim
    pool = torch.randn(2, POOL_ROWS, block_size * width, generator=generator).half()
    return (
        torch.randint(POOL_ROWS, (NUM_PARTS, heads, 128 // block_size), generator=generator),
        torch.randint(128, (NUM_PARTS,), generator=generator),
        torch.randint(NUM_ROWS, (NUM_PARTS,), generator=generator),
        torch.randn(NUM_ROWS, heads, backend.queries_per_kv, width, generator=generator),
        *pool,
    )


@pytest.fixture
def backend() -> TiledAttention:
    return TiledAttention(
        num_heads=9, num_kv_heads=3, head_dim=64, row_rule=attention_row_rule(64, 128, num_rows=64)
    )


def test_loops_and_products_give_the_same_parts(backend: TiledAttention) -> None:
    parts, _ = backend.regions(16, torch.float16)
    arguments = random_parts(backend)
    # Scores differ in their last bits, so a highest one may be rounded up to the next integer.
    batched, looped = parts.eager(*arguments), parts.function(*arguments)
    assert [each.shape for each in batched] == [each.shape for each in looped]
    (_, total, out, *_), (_, other_total, other_out, *_) = batched, looped
    torch.testing.assert_close(
        out / total.unsqueeze(-1), other_out / other_total.unsqueeze(-1), rtol=1e-5, atol=1e-5
    )


def test_parts_merge_alike_in_loops_and_steps_whatever_lies_in_other_places(backend: TiledAttention) -> None:
    parts, merged = backend.regions(16, torch.float16)
    highest, total, out, *_ = parts(*random_parts(backend))
    place_GW = torch.randint(NUM_PARTS, (4, 6), generator=torch.Generator().manual_seed(2))
    count_G = torch.tensor([1, 2, 5, 6])
    steps, _ = merged.eager(place_GW, count_G, highest, total, out)
    loops, _ = merged.function(place_GW, count_G, highest, total, out)
    torch.testing.assert_close(steps, loops, rtol=1e-5, atol=1e-5)
    for row, count in enumerate(count_G.tolist()):
        alone, _ = merged.eager(place_GW[row : row + 1, :count], count_G[row : row + 1], highest, total, out)
        assert torch.equal(alone[0], steps[row])


def test_examples_are_arguments(backend: TiledAttention) -> None:
    for region in backend.regions(16, torch.float16):
        assert all(torch.is_tensor(result) for result in region.eager(*region.examples))
        assert region.must_equal


@pytest.mark.parametrize("length", [1, 2, 96, 120, 128, 160, 240, 256])
def test_a_sum_by_halves_is_the_sum_and_does_not_change_with_company(length: int) -> None:
    rows = torch.rand(7, length, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(summed(rows).double(), rows.double().sum(-1), rtol=1e-6, atol=0.0)
    for row in rows:
        assert torch.equal(summed(row.unsqueeze(0))[0], summed(rows)[(rows == row).all(-1)][0])


def test_highest_scores_are_integers_so_that_bringing_parts_together_rounds_nothing() -> None:
    scores = torch.randn(50, 128, generator=torch.Generator().manual_seed(4)) * 30
    exact = scores.double()
    highest, total, weights = softmax_part(scores.clone())
    assert torch.equal(highest, highest.round())
    assert bool((highest >= exact.amax(-1)).all())
    expected = torch.exp2(exact - highest.double().unsqueeze(-1))
    expected[exact - highest.double().unsqueeze(-1) <= FAINTEST] = 0.0
    torch.testing.assert_close(weights.double(), expected, rtol=2e-6, atol=1e-12)
    torch.testing.assert_close(total.double(), expected.sum(-1), rtol=2e-6, atol=0.0)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5, 7])
def test_weights_are_the_same_bits_on_any_number_of_threads(num_threads: int) -> None:
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(6)) * 6 - 8
    alone = torch.cat([weights_of(piece.clone()) for piece in x.split(WHOLE_VECTORS)])
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for count in (1, 33, 120, 128, 32896, 98304, 100_000, 115_200, 1 << 18):
            assert torch.equal(weights_of(x[:count].clone()), alone[:count]), count
    finally:
        torch.set_num_threads(before)


def test_a_row_rule_that_accumulates_adds_the_same_as_one_that_does_not() -> None:
    rule = attention_row_rule(64, 128, num_rows=64)
    generator = torch.Generator().manual_seed(5)
    weights, values = (
        torch.rand(3, 32, 128, generator=generator),
        torch.randn(3, 128, 64, generator=generator),
    )
    start = torch.randn(3, 32, 64, generator=generator)
    sums = []
    for accumulates in {False, rule.accumulates}:
        added = start.clone()
        RowRule(rule.multiple, rule.exact, accumulates).add_bmm(added, weights, values)
        sums.append(added)
    assert all(torch.equal(sums[0], other) for other in sums)
