"""Every file of the kernels folder: its error bound, its independence of the number of rows, its packing."""

from typing import cast

import pytest
import torch
from torch import nn

from core.execution.probe import kernel_row_multiple
from core.quantization import PackedLinear, RowPadded, dequantise
from core.quantization.codec import FLOAT32, INT8_SPLIT, SPLIT_LEVELS, Codec, Encoded
from core.quantization.embedding import HasRows, SharedEmbedding, StoredEmbedding
from core.quantization.ggml import BLOCK_TYPES, FLOAT_DTYPES
from core.quantization.kernels import linear_kernels
from tests.core.quantization.weights import (
    ACTIVATION_STEP,
    BFLOAT16,
    EXACT_PRODUCTS,
    WEIGHT_ERROR,
    cases,
    packed,
    stored_weights,
)

KERNELS = linear_kernels()
EVERY_CASE = pytest.mark.parametrize(("name", "ggml_type", "shape"), cases())


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_states_its_error_and_fits_some_shape(name):
    assert KERNELS[name].name == name
    assert name in WEIGHT_ERROR, f"state the error bound of {name} in tests/core/quantization/weights.py"
    assert any(case[0] == name for case in cases())


@EVERY_CASE
def test_a_product_is_within_the_kernels_stated_error(name, ggml_type, shape):
    raw = stored_weights(ggml_type, shape)
    module = packed(KERNELS[name], raw, ggml_type)
    x = torch.randn(17, shape[1], generator=torch.Generator().manual_seed(1))
    result = module(x)
    assert result.dtype == torch.float32

    weight, size = dequantise(raw, ggml_type).double(), x.double().abs()
    exact = x.double() @ weight.T
    rounding = 0.0 if name in EXACT_PRODUCTS else BFLOAT16
    weight_error = WEIGHT_ERROR[name](raw, ggml_type)
    bound = size @ weight_error.T + rounding * size @ (weight.abs() + weight_error).T
    bound = bound * (1 + rounding) + rounding * exact.abs()
    bound += shape[1] * 2.0**-23 * size @ weight.abs().T  # float32 sums
    step = ACTIVATION_STEP.get(name, 0.0) * size.amax(1, keepdim=True)
    bound += (0.5 * step * (weight.abs() + weight_error).sum(1)) * 1.001
    assert ((result.double() - exact).abs() <= bound).all()


@EVERY_CASE
def test_a_row_does_not_depend_on_the_rows_beside_it(name, ggml_type, shape):
    """With the padding that the probe asks for on this machine, a row is the same bits in any company."""
    multiple = kernel_row_multiple(KERNELS[name], ggml_type, shape, numerics="stable")
    if multiple is None:
        pytest.skip(f"{name} is not offered on this machine: the probe refuses it for {ggml_type} {shape}")
    module = packed(KERNELS[name], stored_weights(ggml_type, shape), ggml_type)
    linear = module if multiple == 1 else RowPadded(cast(PackedLinear, module), multiple)
    x = torch.randn(300, shape[1], generator=torch.Generator().manual_seed(2))
    whole = linear(x)
    for first, count in (
        (0, 1),
        (299, 1),
        (0, 2),
        (7, 3),
        (1, 16),
        (3, 33),
        (0, 64),
        (5, 127),
        (0, 256),
        (9, 290),
    ):
        assert torch.equal(linear(x[first : first + count]), whole[first : first + count]), (first, count)


@EVERY_CASE
def test_a_product_is_as_its_codec_says(name, ggml_type, shape):
    """Whoever joins decoding with what comes after calls the product alone."""
    module = cast(PackedLinear, packed(KERNELS[name], stored_weights(ggml_type, shape), ggml_type))
    x = torch.randn(5, shape[1], generator=torch.Generator().manual_seed(4))
    codes, *sides = module.codec.encode(x)
    raw = module.product(codes)
    assert raw.shape == (5, module.codec.rows, shape[0])
    assert raw.dtype == module.codec.raw_dtype
    assert torch.equal(module.codec.decode(raw, *sides), module.forward(x))


@EVERY_CASE
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_no_number_spoils_no_other_and_does_not_look_like_one(name, ggml_type, shape, bad):
    module = packed(KERNELS[name], stored_weights(ggml_type, shape), ggml_type)
    x = torch.randn(9, shape[1], generator=torch.Generator().manual_seed(5))
    clean = module(x)
    x[4, 3] = bad
    result = module(x)
    others = [row for row in range(9) if row != 4]
    assert torch.equal(result[others], clean[others])
    assert not result[4].isfinite().any()


@EVERY_CASE
def test_packing_in_runs_equals_packing_at_once(name, ggml_type, shape):
    kernel = KERNELS[name]
    raw = stored_weights(ggml_type, shape)
    at_once = dict(packed(kernel, raw, ggml_type).named_buffers())
    in_runs = dict(packed(kernel, raw, ggml_type, rows_at_a_time=kernel.row_granularity).named_buffers())
    assert at_once.keys() == in_runs.keys()
    assert at_once
    for buffer, value in at_once.items():
        assert torch.equal(value.view(torch.uint8), in_runs[buffer].view(torch.uint8)), buffer


@EVERY_CASE
def test_what_a_kernel_reads_is_all_in_its_buffers(name, ggml_type, shape):
    """So that memory is counted and a cache file holds everything."""
    kernel = KERNELS[name]
    module = packed(kernel, stored_weights(ggml_type, shape), ggml_type)
    copy = kernel.empty(*shape)
    copy.load_state_dict(module.state_dict())
    x = torch.randn(4, shape[1], generator=torch.Generator().manual_seed(3))
    assert torch.equal(copy(x), module(x))
    assert not list(module.parameters())
    assert (module.out_features, module.in_features) == shape


@EVERY_CASE
def test_a_tied_embedding_reads_the_kernels_own_rows(name, ggml_type, shape):
    raw = stored_weights(ggml_type, shape)
    module = packed(KERNELS[name], raw, ggml_type)
    if not hasattr(module, "rows"):
        pytest.skip(f"{name} has no plain rows: an embedding keeps the stored bytes instead")
    ids = torch.tensor([shape[0] - 1, 0, 5, 5])
    linear = cast(HasRows, module)
    embedding = SharedEmbedding(linear)
    rows = embedding(ids)
    assert rows.dtype == torch.float32
    assert torch.equal(rows, linear.rows(ids))
    error = (rows.double() - dequantise(raw, ggml_type)[ids].double()).abs()
    assert (error <= WEIGHT_ERROR[name](raw, ggml_type)[ids]).all()
    assert not list(embedding.buffers()), "one copy serves both"


@pytest.mark.parametrize("ggml_type", [*BLOCK_TYPES, *FLOAT_DTYPES])
def test_a_stored_embedding_gives_exactly_what_the_file_means(ggml_type):
    raw = stored_weights(ggml_type, (40, 96))
    embedding = StoredEmbedding(40, raw.shape[1], ggml_type)
    embedding.raw.copy_(raw)
    ids = torch.tensor([39, 0, 0, 17])
    assert torch.equal(embedding(ids), dequantise(raw, ggml_type)[ids])


class CountsRows(Encoded, nn.Module):
    """Doubles, and writes down how many rows it was given."""

    in_features = out_features = 5

    def __init__(self, codec: Codec) -> None:
        super().__init__()
        self.codec = codec
        self.seen: list[int] = []

    def product(self, codes: torch.Tensor) -> torch.Tensor:
        self.seen.append(codes.shape[0])
        return codes * 2


@pytest.mark.parametrize("codec", [FLOAT32, INT8_SPLIT], ids=lambda codec: codec.name)
@pytest.mark.parametrize("multiple", [1, 2, 8, 32])
def test_padding_feeds_whole_multiples_and_returns_the_rows_alone(codec, multiple):
    counts = CountsRows(codec)
    linear = RowPadded(counts, multiple)
    assert (linear.codec, linear.in_features, linear.out_features) == (codec, 5, 5)
    for num_rows in (1, 2, 7, 8, 9, 31, 64):
        x = torch.randn(num_rows, 5)
        unpadded = counts(x)
        assert torch.equal(linear(x), unpadded)
        torch.testing.assert_close(unpadded, x * 2, rtol=0.0, atol=2 * x.abs().max().item() / SPLIT_LEVELS)
        assert counts.seen[-1] % multiple == 0
        assert num_rows <= counts.seen[-1] < num_rows + multiple
