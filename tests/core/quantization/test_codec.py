"""Codecs: what rounding activations costs, and that no row's codes know of another row."""

from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.quantization import PackedLinear
from core.quantization.codec import (
    BFLOAT16,
    FLOAT32,
    INT8_SPLIT,
    INT8_WHOLE,
    SMALLEST,
    SPLIT_LEVELS,
    WHOLE_LEVELS,
    Codec,
)
from core.quantization.kernels import linear_kernels

CODECS = (FLOAT32, BFLOAT16, INT8_SPLIT, INT8_WHOLE)
LEVELS = {INT8_SPLIT.name: SPLIT_LEVELS, INT8_WHOLE.name: WHOLE_LEVELS}
"""Steps from zero to a row's largest value, of those codecs whose codes are whole numbers."""
EVERY_CODEC = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
WHOLE_NUMBERS = pytest.mark.parametrize("codec", [INT8_SPLIT, INT8_WHOLE], ids=lambda codec: codec.name)


def through(codec: Codec, x: Tensor) -> Tensor:
    """Coded and decoded with nothing between: what a product with the identity would give."""
    codes, *sides = codec.encode(x)
    return codec.decode(codes.to(codec.raw_dtype), *sides)


def rows_of_every_size(width: int = 96, *, seed: int = 1) -> Tensor:
    """Rows from far below the smallest step to nearly the largest float32, some with one value above all."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.linspace(-36, 36, 37)
    x = torch.randn(len(sizes), width, generator=generator) * sizes.unsqueeze(1)
    x[::3, 5] *= 100
    return x


def allowed(codec: Codec, x: Tensor) -> Tensor:
    """Half a step of the row, and what float32 adds in finding and undoing it."""
    if codec.name in LEVELS:
        largest = x.abs().amax(1, keepdim=True).clamp(min=SMALLEST)  # no row has smaller steps than that
        return largest * (0.5 / LEVELS[codec.name] + 2.0**-22)
    return x.abs() * (2.0**-8 if codec is BFLOAT16 else 0.0)


def test_every_kernel_names_one_of_these_codecs_and_equal_names_are_one_codec():
    known = {codec.name: codec for codec in CODECS}
    assert len(known) == len(CODECS)
    for kernel in linear_kernels().values():
        codec = cast(PackedLinear, kernel.empty(64, 64)).codec
        assert codec is known[codec.name], kernel.name


@EVERY_CODEC
def test_decoding_gives_a_row_back_to_within_half_a_step(codec):
    x = rows_of_every_size()
    result = through(codec, x)
    assert result.dtype == torch.float32
    assert ((result.double() - x.double()).abs() <= allowed(codec, x).double()).all()


@EVERY_CODEC
@settings(max_examples=60, deadline=None)
@given(
    row=st.lists(
        st.floats(-(2.0**127), 2.0**127, width=32, allow_subnormal=False) | st.sampled_from([0.0, 1.0]),
        min_size=1,
        max_size=9,
    )
)
def test_no_row_of_numbers_comes_back_further_off(codec, row):
    x = torch.tensor([row])
    assert ((through(codec, x).double() - x.double()).abs() <= allowed(codec, x).double()).all()


@EVERY_CODEC
def test_a_row_of_zeros_stays_one(codec):
    assert not through(codec, torch.zeros(3, 32)).any()


@EVERY_CODEC
def test_codes_have_the_shape_that_the_codec_says(codec):
    codes, *sides = codec.encode(torch.randn(5, 32))
    assert codes.shape == (5, codec.rows, 32)
    assert all(side.shape == (5, 1) for side in sides)


@WHOLE_NUMBERS
def test_codes_are_whole_numbers_that_reach_the_last_level(codec):
    x = torch.cat((rows_of_every_size(), torch.ones(1, 96), -torch.ones(1, 96)))
    x = x[x.abs().amax(1) > SMALLEST]
    codes, scale = codec.encode(x)
    assert torch.equal(codes, codes.round())
    levels = LEVELS[codec.name]
    joined = codec.decode(codes, torch.ones_like(scale))
    assert torch.equal(joined.abs().amax(1), torch.full((len(x),), float(levels)))
    torch.testing.assert_close(scale * levels, x.abs().amax(1, keepdim=True))


def test_both_halves_of_every_level_fit_seven_bits_and_a_sign():
    """So that two products with 8-bit weights fit 16 bits: 2 * 128 * 127 < 2^15, shifted to unsigned."""
    levels = torch.arange(-SPLIT_LEVELS, SPLIT_LEVELS + 1, dtype=torch.float32).unsqueeze(0)
    (codes, scale) = INT8_SPLIT.encode(levels)
    assert codes.shape == (1, 2, 2 * SPLIT_LEVELS + 1)
    assert (codes.min().item(), codes.max().item()) == (-64, 64), "every code that a half can have is there"
    assert torch.equal(INT8_SPLIT.decode(codes, torch.ones_like(scale)), levels)


@EVERY_CODEC
def test_a_rows_codes_do_not_depend_on_the_rows_beside_it(codec):
    x = rows_of_every_size(101)  # no vector length divides it
    codes, *sides = codec.encode(x)
    for first in range(0, len(x), 5):
        for count in (1, 2, 7):
            rows = slice(first, first + count)
            some, *some_sides = codec.encode(x[rows].clone())
            assert torch.equal(some, codes[rows])
            assert all(torch.equal(a, b[rows]) for a, b in zip(some_sides, sides, strict=True))
            raw = codes.to(codec.raw_dtype)
            assert torch.equal(
                codec.decode(raw[rows].clone(), *(side[rows] for side in sides)),
                codec.decode(raw, *sides)[rows],
            )


@EVERY_CODEC
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_no_number_says_so_and_spoils_no_other(codec, bad):
    x = rows_of_every_size()
    clean = through(codec, x)
    x[7, 3] = bad
    result = through(codec, x)
    others = [row for row in range(len(x)) if row != 7]
    assert torch.equal(result[others], clean[others])
    assert not result[7, 3].isfinite()
