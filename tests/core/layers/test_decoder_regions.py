"""Regions: pure functions of rows, whose names say all that they compute."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from core.layers import Region
from core.layers.decoder_regions import (
    FINITE_MAX,
    Heads,
    added_and_normed,
    encoded,
    gated,
    normed,
    rotated,
    silu,
)
from core.layers.norm import rms_norm
from core.quantization.codec import BFLOAT16, FLOAT32, INT8_SPLIT, INT8_WHOLE, Codec

CODECS = (FLOAT32, BFLOAT16, INT8_SPLIT, INT8_WHOLE)
LLAMA = Heads(3, 1, 16, 1e-5, has_bias=False, has_norms=False, kv_dtype=torch.float16)
QWEN2 = LLAMA._replace(has_bias=True)
QWEN3 = LLAMA._replace(has_norms=True)


def regions_between(before: Codec, after: Codec, heads: Heads = LLAMA, width: int = 40) -> list[Region]:
    """Every kind of region, for linears of these codecs."""
    return [
        encoded(after, width),
        normed(after, width, heads.eps),
        added_and_normed(before, after, width, heads.eps),
        added_and_normed(before, None, width, heads.eps),
        gated(before, after, 2 * width + 5),
        rotated(before, heads),
    ]


ALL_REGIONS = [
    region
    for before, after in itertools.product(CODECS, CODECS)
    for heads in (LLAMA, QWEN2, QWEN3, LLAMA._replace(kv_dtype=torch.float32))
    for region in regions_between(before, after, heads)
]
BY_NAME = {region.name: region for region in ALL_REGIONS}
WINDOWS = (
    (0, 1),
    (7, 1),
    (199, 1),
    (1, 2),
    (32, 3),
    (5, 4),
    (0, 5),
    (1, 7),
    (8, 8),
    (3, 17),
    (32, 33),
    (0, 128),
)
"""(first row, rows): neighbours come and go, and rows stand elsewhere, from step to step."""
EVERY_REGION = pytest.mark.parametrize("region", BY_NAME.values(), ids=list(BY_NAME))


def arguments(region: Region, *, num_rows: int = 200, seed: int = 1) -> list[Tensor]:
    """Random ones, as the examples ask for them; scales and norms' weights are positive."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for example in region.examples:
        shape = [num_rows if size == Region.ROWS else size for size in example.shape]
        values = torch.randn(shape, generator=generator)
        made.append((values if example.dim() == 3 else values.abs() + 0.1).to(example.dtype))
    return made


def rows_of(region: Region, tensors: Sequence[Tensor], rows: slice) -> list[Tensor]:
    return [
        tensor[rows].clone() if example.shape[0] == Region.ROWS else tensor
        for example, tensor in zip(region.examples, tensors, strict=True)
    ]


@EVERY_REGION
def test_a_row_does_not_depend_on_the_rows_beside_it(region):
    given = arguments(region)
    whole = region(*given)
    assert all(output.shape[0] == 200 for output in whole)
    for first, count in WINDOWS:
        rows = slice(first, first + count)
        for part, output in zip(region(*rows_of(region, given, rows)), whole, strict=True):
            assert torch.equal(part, output[rows]), (first, count)


@EVERY_REGION
def test_a_row_that_is_no_number_spoils_no_other(region):
    given = arguments(region)
    whole = region(*given)
    for example, tensor in zip(region.examples, given, strict=True):
        if example.shape[0] == Region.ROWS:
            tensor[5] = float("nan")
            tensor[6] = float("inf")
    others = [row for row in range(200) if row not in {5, 6}]
    for spoiled, output in zip(region(*given), whole, strict=True):
        assert torch.equal(spoiled[others], output[others])


@EVERY_REGION
def test_a_region_changes_nothing_that_it_is_given(region):
    given = arguments(region)
    kept = [tensor.clone() for tensor in given]
    outputs = region(*given)
    assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))
    if region.name != "encoded.float32.40":  # nothing is left to compute there
        memory = {tensor.untyped_storage().data_ptr() for tensor in given}
        assert not any(output.untyped_storage().data_ptr() in memory for output in outputs)


@EVERY_REGION
def test_examples_are_a_call_in_which_only_the_rows_have_that_many(region):
    outputs = region(*region.examples)
    assert all(output.shape[0] == Region.ROWS for output in outputs)
    assert all(Region.ROWS not in example.shape[1:] for example in region.examples)


def test_equal_names_are_equal_functions():
    """Models of one config, built apart, share what was compiled for either."""
    for region in ALL_REGIONS:
        named = BY_NAME[region.name]
        given = arguments(region)
        assert [tensor.shape for tensor in named.examples] == [tensor.shape for tensor in region.examples]
        assert [tensor.dtype for tensor in named.examples] == [tensor.dtype for tensor in region.examples]
        assert all(torch.equal(a, b) for a, b in zip(region(*given), named(*given), strict=True))


ANOTHER_EPS = 9.999999747378752e-06
"""What 1e-5 is to a checkpoint that keeps it as float32."""
OTHER_HEADS: dict[str, Any] = {
    "num_heads": 6, "num_kv_heads": 3, "head_dim": 32, "eps": ANOTHER_EPS, "has_bias": True,
    "has_norms": True, "kv_dtype": torch.bfloat16,
}  # fmt: skip


@pytest.mark.parametrize("field", Heads._fields)
def test_whatever_changes_what_is_rotated_changes_the_name(field):
    changed = LLAMA._replace(**{field: OTHER_HEADS[field]})
    assert rotated(FLOAT32, changed).name != rotated(FLOAT32, LLAMA).name


@pytest.mark.parametrize(
    ("make", "arguments", "others"),
    [
        (encoded, (FLOAT32, 40), (BFLOAT16, 41)),
        (normed, (FLOAT32, 40, 1e-5), (BFLOAT16, 41, ANOTHER_EPS)),
        (added_and_normed, (FLOAT32, FLOAT32, 40, 1e-5), (BFLOAT16, BFLOAT16, 41, ANOTHER_EPS)),
        (added_and_normed, (FLOAT32, FLOAT32, 40, 1e-5), (INT8_SPLIT, None, 41, 1e-6)),
        (added_and_normed, (FLOAT32, None, 40, 1e-5), (BFLOAT16, INT8_WHOLE, 41, ANOTHER_EPS)),
        (gated, (FLOAT32, FLOAT32, 40), (BFLOAT16, BFLOAT16, 41)),
    ],
)
def test_whatever_changes_a_region_changes_its_name(make, arguments, others):
    name = make(*arguments).name
    for place, other in enumerate(others):
        changed = [*arguments]
        changed[place] = other
        assert make(*changed).name != name


@pytest.mark.parametrize("kv_dtype", FINITE_MAX)
def test_keys_and_values_are_finite_whatever_comes_in(kv_dtype):
    """A masked slot of the KV counts as nothing only if it is a number."""
    region = rotated(FLOAT32, LLAMA._replace(kv_dtype=kv_dtype))
    *tables, raw = arguments(region)
    raw[3], raw[4], raw[5], raw[6] = float("nan"), float("inf"), float("-inf"), 3e38
    _, k, v = region(*tables, raw)
    assert k.dtype == v.dtype == kv_dtype
    assert k.isfinite().all()
    assert v.isfinite().all()


def test_the_end_of_one_linear_and_the_beginning_of_the_next_are_joined_in_order():
    """Against the same arithmetic written apart, with codecs that round nothing."""
    generator = torch.Generator().manual_seed(2)
    x, raw = torch.randn(7, 40, generator=generator), torch.randn(7, 1, 40, generator=generator)
    weight = torch.rand(40, generator=generator)
    added, codes = added_and_normed(FLOAT32, FLOAT32, 40, 1e-5)(x, weight, raw)
    assert torch.equal(added, x + raw[:, 0])
    assert torch.equal(codes[:, 0], rms_norm(added, weight, 1e-5))
    plain = added_and_normed(FLOAT32, None, 40, 1e-5)(x, weight, raw)
    assert torch.equal(plain[1], codes[:, 0])
    assert torch.equal(normed(FLOAT32, 40, 1e-5)(x, weight)[0][:, 0], rms_norm(x, weight, 1e-5))
    gate, up = raw[:, 0].chunk(2, -1)
    assert torch.equal(gated(FLOAT32, FLOAT32, 20)(raw)[0][:, 0], silu(gate) * up)


def test_bias_comes_before_the_norm_of_heads_and_the_norm_before_the_rotation():
    heads = QWEN3._replace(has_bias=True)
    region = rotated(FLOAT32, heads)
    cos, sin, bias, q_norm, k_norm, raw = arguments(region, num_rows=7)
    y = (raw[:, 0] + bias).view(7, 5, 16).double()

    def by_hand(part: Tensor, weight: Tensor) -> Tensor:
        scaled = part / (part.square().mean(-1, keepdim=True) + heads.eps).sqrt() * weight
        return scaled * cos + torch.cat((scaled[..., 8:], scaled[..., :8]), -1) * sin

    q, k, v = region(cos, sin, bias, q_norm, k_norm, raw)
    torch.testing.assert_close(q, by_hand(y[:, :3], q_norm).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(k, by_hand(y[:, 3:4], k_norm).half(), rtol=2.0**-10, atol=1e-4)
    assert torch.equal(v, y[:, 4:].half())


def test_whoever_has_compiled_a_region_runs_in_its_place():
    region = encoded(FLOAT32, 8)
    region.run = lambda x: (x * 3,)
    x = torch.ones(2, 8)
    assert torch.equal(region(x)[0], x * 3)
    assert torch.equal(region.function(x)[0], x.unsqueeze(1)), "the function itself stays"
    assert repr(region) == "Region(encoded.float32.8)"
