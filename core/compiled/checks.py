"""A compiled function against the one it stands for: close, the same bits for any rows, or equal bits.

Inductor may order a reduction otherwise than the eager operators do, and divide by multiplying; what
must hold for `stable` is that a row's result depends on the row alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from core.compiled.keys import row_dims
from core.layers.region import Function, Region

NUM_ROWS = 96
WINDOWS = tuple(
    (first, count)
    for count in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 24, 31, 48, 64)
    for first in (0, 1, 7, 30)
    if first + count <= NUM_ROWS
)
"""(first, count): neighbours come and go between steps."""
FEW_WINDOWS = ((0, 1), (7, 3), (30, 17), (1, 48))
RELATIVE_BOUND = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""Largest difference, relative to the largest value of its row."""
MOST_OTHER_CODES = 0.01
"""Share of an output of whole numbers (codes) that may be rounded to a neighbour."""
EQUALITY_SEEDS = range(4)


def find_problem(region: Region, compiled: Function, *, again: bool = False) -> str:
    """Why a compiled function cannot stand for the region's; empty: it can.

    Every row count takes part, so that functions chosen by it are held against each other.

    Args:
        again: it was found good on such a machine before; look briefly, for a start waits.
    """
    if region.must_equal:
        return (
            ""
            if is_bit_equal(region, compiled, again=again)
            else "its bits are not those of the eager function"
        )
    inputs = sample_inputs(region, seed=0)
    whole = compiled(*inputs)
    if problem := _distance_problem(region.function(*inputs), whole):
        return problem
    outputs_dims = row_dims(region.function(*region.examples))
    inputs_dims = row_dims(region.examples)
    most_threads = torch.get_num_threads()
    try:
        for num_threads in {1, most_threads if again else max(2, most_threads)}:
            torch.set_num_threads(num_threads)
            for first, count in FEW_WINDOWS if again else WINDOWS:
                part = compiled(*_rows(inputs, inputs_dims, first, count))
                for mine, expected in zip(part, _rows(whole, outputs_dims, first, count), strict=True):
                    if not same_numbers(mine, expected):
                        return f"{count} of {NUM_ROWS} rows on {num_threads} threads differ from the whole"
    finally:
        torch.set_num_threads(most_threads)
    return ""


def is_bit_equal(region: Region, compiled: Function, *, again: bool = False) -> bool:
    """Whether both functions give the same bits on many random rows, tiny and huge ones too."""
    dims = row_dims(region.examples)
    for seed in EQUALITY_SEEDS[:1] if again else EQUALITY_SEEDS:
        for extreme in (True,) if again else (False, True):
            inputs = sample_inputs(region, seed=seed, extreme=extreme)
            for count in (3, 17) if again else (1, 3, 16, 17, NUM_ROWS):
                rows = _rows(inputs, dims, 0, count)
                pairs = zip(region.eager(*rows), compiled(*rows), strict=True)
                if not all(same_numbers(mine, theirs) for mine, theirs in pairs):
                    return False
    return True


def sample_inputs(region: Region, *, seed: int, extreme: bool = False) -> list[Tensor]:
    """`NUM_ROWS` rows like the examples': other floats, and whole numbers by the row.

    Args:
        extreme: rows from 1e-12 to 1e6 in size, and one of zeros.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs: list[Tensor] = []
    for example, dim in zip(region.examples, row_dims(region.examples), strict=True):
        shape = [NUM_ROWS if d == dim else size for d, size in enumerate(example.shape)]
        if not example.dtype.is_floating_point:
            rows = torch.randint(Region.ROWS, (NUM_ROWS,), generator=generator)
            inputs.append(example if dim is None else example.index_select(dim, rows))
            continue
        values = torch.randn(shape, generator=generator)
        if extreme and dim is not None:
            sizes = torch.logspace(-12, 6, NUM_ROWS)
            sizes[NUM_ROWS // 2] = 0.0
            values *= sizes.view([-1 if d == dim else 1 for d in range(len(shape))])
        inputs.append(values.to(example.dtype))
    return inputs


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but that zeros have no sign and one NaN is like another."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    return bool(((a == b) | ((a != a) & (b != b))).all())  # noqa: PLR0124  -- NaN


def _rows(
    tensors: Sequence[Tensor], dims: Sequence[int | None], first: int, count: int
) -> tuple[Tensor, ...]:
    return tuple(
        tensor if dim is None else tensor.narrow(dim, first, count).contiguous()
        for tensor, dim in zip(tensors, dims, strict=True)
    )


def _distance_problem(expected: Sequence[Tensor], got: Sequence[Tensor]) -> str:
    if [(t.shape, t.dtype) for t in expected] != [(t.shape, t.dtype) for t in got]:
        return "the outputs' shapes or types are others"
    for number, (mine, theirs) in enumerate(zip(expected, got, strict=True)):
        if not mine.dtype.is_floating_point or torch.equal(mine, mine.round()):
            share = (mine != theirs).double().mean().item()
            if share > MOST_OTHER_CODES:
                return f"output {number}: {share:.1%} of the codes are others"
            continue
        largest = mine.double().abs().amax(-1, keepdim=True)
        difference = (mine.double() - theirs.double()).abs()
        if not bool((difference <= RELATIVE_BOUND[mine.dtype] * largest + 1e-30).all()):
            worst = (difference / (largest + 1e-30)).max().item()
            return f"output {number} is {worst:.1e} off, relative to its row"
    return ""
