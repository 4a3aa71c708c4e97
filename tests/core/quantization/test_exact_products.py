"""Kernels that multiply whole numbers: every sum is what 64-bit integers give, whatever the numbers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from core.execution.probe import kernel_row_multiple
from core.quantization import LinearKernel, dequantise, quantise
from core.quantization.int8 import LARGEST, MOST_FEATURES, Int8Linear, rounded_rows
from core.quantization.kernels import linear_kernels
from tests.core.quantization.weights import packed, stored_weights

LARGEST_CODE = {"int8_split": 64, "int8_whole": 127}
"""Kernel -> the largest code its codec makes, to either side of zero."""
SIGNS: dict[str, Callable[[Tensor], Tensor]] = {
    "all positive": torch.ones_like,
    "all negative": lambda x: -torch.ones_like(x),
    "alternating": lambda x: 1 - 2 * (torch.arange(x.shape[-1]) % 2).expand_as(x).to(x.dtype),
    "in pairs": lambda x: 1 - 2 * (torch.arange(x.shape[-1]) // 2 % 2).expand_as(x).to(x.dtype),
    "random": lambda x: torch.randint(0, 2, x.shape, generator=torch.Generator().manual_seed(1)) * 2.0 - 1,
}


def exact_kernels() -> Iterator[str]:
    for name, kernel in linear_kernels().items():
        if isinstance(kernel.empty(64, 64), Int8Linear):
            yield name


@pytest.fixture(params=exact_kernels())
def kernel(request) -> LinearKernel:
    kernel = linear_kernels()[request.param]
    if kernel_row_multiple(kernel, "Q8_0", (64, 64), numerics="stable") is None:
        pytest.skip(f"{kernel.name} is not offered on this machine")
    return kernel


def module_of(kernel: LinearKernel, raw: Tensor) -> Int8Linear:
    module = packed(kernel, raw, "Q8_0")
    assert isinstance(module, Int8Linear)
    return module


def exact(codes: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The raw result: 64-bit sums, rounded to float32 once, times the row's scale."""
    sums = codes.flatten(0, 1).long() @ weight.long().T
    return (sums.float() * scale).view(*codes.shape[:2], -1)


def test_the_kernels_that_are_tried_here_state_their_largest_code():
    assert set(exact_kernels()) == set(LARGEST_CODE)


@pytest.mark.parametrize("signs", SIGNS)
@pytest.mark.parametrize("weight_signs", SIGNS)
@pytest.mark.parametrize("width", [2, 32, 160, 4096])
def test_the_largest_codes_on_the_largest_weights_do_not_saturate(kernel, signs, weight_signs, width):
    """Where two products of neighbours were added in 16 bits, these would show it."""
    weight = SIGNS[weight_signs](torch.empty(24, -(-width // 32) * 32))
    module = module_of(kernel, quantise(weight, "Q8_0"))
    assert module.weight.abs().max() >= (LARGEST + 1) // 2
    codes = LARGEST_CODE[kernel.name] * torch.ones(3, module.codec.rows, weight.shape[1])
    codes *= SIGNS[signs](codes)
    codes[..., width:] = 0
    expected = exact(codes, module.weight, module.scale)
    assert torch.equal(module.product(codes), expected)


def test_at_the_widest_weight_sums_still_fit(kernel):
    width = MOST_FEATURES // 32 * 32
    assert kernel.fits(8, MOST_FEATURES)
    assert not kernel.fits(8, MOST_FEATURES + 1)
    module = module_of(kernel, quantise(torch.ones(8, width), "Q8_0"))
    for sign in (1, -1):
        codes = torch.full((2, module.codec.rows, width), float(sign * LARGEST_CODE[kernel.name]))
        assert torch.equal(module.product(codes), exact(codes, module.weight, module.scale))


def test_random_numbers_are_summed_exactly(kernel):
    module = module_of(kernel, stored_weights("Q8_0", (70, 576)))
    codes, *_ = module.codec.encode(torch.randn(300, 576, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(module.product(codes), exact(codes, module.weight, module.scale))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 16, 130, 512])
def test_the_number_of_threads_changes_no_bit(kernel, num_rows):
    module = module_of(kernel, stored_weights("Q8_0", (256, 576)))
    x = torch.randn(num_rows, 576, generator=torch.Generator().manual_seed(2))
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append(module(x))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_sealed_module_gives_up_its_buffers_and_computes_the_same(kernel):
    module = module_of(kernel, stored_weights("Q8_0", (64, 96)))
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(3))
    before = module(x)
    module.seal()
    assert [name for name, buffer in module.named_buffers() if buffer.numel()] == []
    assert (module.out_features, module.in_features) == (64, 96)
    assert torch.equal(module(x), before)


def test_a_module_sealed_before_its_first_product_computes_the_same(kernel):
    raw = stored_weights("Q8_0", (64, 96))
    fresh, sealed = module_of(kernel, raw), module_of(kernel, raw)
    sealed.seal()
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(3))
    assert torch.equal(sealed(x), fresh(x))


@pytest.mark.parametrize("pairs_limited", [False, True])
@pytest.mark.parametrize("width", [32, 97])
def test_weights_are_rounded_to_within_half_a_step_and_no_pair_passes_its_limit(pairs_limited, width):
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(200, width, generator=generator)
    weight[:40] = weight[:40].sign()  # every neighbour as large as any
    weight[40:80].abs_()
    weight[80] = 0
    rows, scale = rounded_rows(weight, pairs_limited=pairs_limited)
    assert rows.dtype == torch.int8
    assert rows.abs().max() <= LARGEST
    steps = (weight.double() / scale.double().unsqueeze(1) - rows.double()).abs()
    assert steps.max() <= 0.5 + 1e-5
    largest = weight.abs().amax(1)
    assert (scale >= largest / LARGEST * (1 - 1e-6)).all()
    if not pairs_limited:
        torch.testing.assert_close(scale[81:], largest[81:] / LARGEST)
        return
    assert (scale[81:] <= 2.02 * largest[81:] / LARGEST).all()
    even = torch.nn.functional.pad(rows.long(), (0, width % 2)).view(200, -1, 2)
    assert even.clamp(min=0).sum(-1).max() <= 128
    assert even.clamp(max=0).sum(-1).min() >= -128


def test_columns_that_move_from_the_inputs_into_the_weights_cancel(kernel):
    """As calibration does it: inputs that are always large are divided before they set a row's step."""
    assert kernel.is_calibrated
    raw = stored_weights("Q8_0", (64, 96))
    weight = dequantise(raw, "Q8_0").double()
    generator = torch.Generator().manual_seed(6)
    columns = 2.0 ** torch.randint(-2, 3, (96,), generator=generator)
    x = torch.randn(9, 96, generator=generator) * columns
    module = kernel.empty(64, 96)
    kernel.pack(module, 0, raw, "Q8_0", columns)
    exact_result = x.double() @ weight.T
    error = (module(x / columns).double() - exact_result).norm()
    assert error < 0.03 * exact_result.norm()
    assert (module(x).double() - exact_result).norm() > 0.3 * exact_result.norm(), "they were there to cancel"
