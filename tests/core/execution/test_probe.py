"""What `stable` needs of this machine: kernels and functions that break the promise are found out."""

import pytest
import torch
from torch import Tensor, nn

from core.errors import ConfigError
from core.execution import probe
from core.execution.probe import (
    ROW_COUNTS,
    attention_row_rule,
    check_elementwise,
    check_row_reductions,
    check_rows,
    is_row_invariant,
    kernel_row_multiple,
)
from core.layers.decoder_regions import silu
from core.quantization import LinearKernel, dequantise
from core.quantization.codec import FLOAT32, Encoded
from core.quantization.kernels import linear_kernels


class Faulty(Encoded, nn.Module):
    """A sound float32 product, computed row by row, with one fault."""

    codec = FLOAT32
    weight: Tensor

    def __init__(self, out_features: int, in_features: int, fault: str) -> None:
        super().__init__()
        self.out_features, self.in_features, self.fault = out_features, in_features, fault
        self.register_buffer("weight", torch.empty(out_features, in_features))

    def product(self, codes: Tensor) -> Tensor:
        out = torch.stack([(row.double() @ self.weight.double().T).float() for row in codes])
        num_rows = codes.shape[0]
        match self.fault:
            case "sees the number of rows":
                out += num_rows * 1e-3
            case "sees odd tails":
                out[num_rows - num_rows % 8 :] += 1e-3
            case "sees its neighbour":
                out[1:] += out[:-1] * 1e-4
            case "sees a long batch":
                out += 1e-3 * (num_rows > 32)
            case "wrong":
                out *= 1.05
            case "not a number":
                out[0, 0, 0] = float("nan")
            case "RuntimeError" | "AttributeError" | "NotImplementedError":
                raise {e.__name__: e for e in (RuntimeError, AttributeError, NotImplementedError)}[
                    self.fault
                ]("no such operator here")
        return out


def faulty_kernel(fault: str) -> LinearKernel:
    def pack(module: nn.Module, first_row: int, raw: Tensor, ggml_type: str, factors: Tensor | None) -> None:
        assert factors is None
        assert isinstance(module, Faulty)
        module.weight[first_row : first_row + raw.shape[0]] = dequantise(raw, ggml_type)

    return LinearKernel(
        name="faulty",
        rank={"F32": 0},
        fits=lambda *_shape: True,
        empty=lambda out_features, in_features: Faulty(out_features, in_features, fault),
        pack=pack,
    )


def multiple_of(fault: str, numerics: str = "stable") -> int | None:
    return kernel_row_multiple(faulty_kernel(fault), "F32", (32, 64), numerics=numerics)


def test_a_sound_kernel_needs_no_padding():
    assert multiple_of("none") == 1


def test_a_kernel_that_is_sound_for_whole_multiples_alone_is_padded_to_them():
    assert multiple_of("sees odd tails") == 8


@pytest.mark.parametrize("fault", ["sees the number of rows", "sees a long batch", "sees its neighbour"])
def test_a_kernel_whose_rows_depend_on_their_number_is_refused_in_stable_alone(fault):
    assert multiple_of(fault) is None
    assert multiple_of(fault, "fast") == 1


@pytest.mark.parametrize(
    "fault", ["wrong", "not a number", "RuntimeError", "AttributeError", "NotImplementedError"]
)
@pytest.mark.parametrize("numerics", ["stable", "fast", "reference"])
def test_a_kernel_that_is_wrong_or_not_there_is_refused_everywhere(fault, numerics):
    assert multiple_of(fault, numerics) is None


@pytest.mark.parametrize("name", linear_kernels())
def test_the_same_answer_is_given_every_time(name):
    kernel = linear_kernels()[name]
    ggml_type = next(iter(kernel.rank))
    first = kernel_row_multiple(kernel, ggml_type, (64, 64), numerics="stable")
    assert kernel_row_multiple(kernel, ggml_type, (64, 64), numerics="stable") == first


def test_row_invariance_is_of_bits_and_of_every_count():
    x = torch.randn(65, 4, generator=torch.Generator().manual_seed(1))
    assert is_row_invariant(lambda rows: rows * 2, x, ROW_COUNTS)
    assert not is_row_invariant(lambda rows: rows + 1e-7 * (len(rows) == 33), x, ROW_COUNTS)
    assert not is_row_invariant(lambda rows: rows - rows.mean(), x, ROW_COUNTS)


@pytest.mark.parametrize(("head_dim", "tile", "num_rows"), [(16, 256, 64), (64, 256, 192), (80, 240, 64)])
def test_under_the_rule_found_here_products_are_row_invariant(head_dim, tile, num_rows):
    """Checked on other numbers than the probe's own, and at every row count."""
    rule = attention_row_rule(head_dim, tile, num_rows=num_rows)
    generator = torch.Generator().manual_seed(9)
    q = torch.randn(3, 64, head_dim, generator=generator)
    k = torch.randn(3, tile, head_dim, generator=generator)
    for a, b in ((q, k.transpose(1, 2)), (torch.rand(3, 64, tile, generator=generator), k)):
        whole = rule.bmm(a, b)
        torch.testing.assert_close(whole, torch.bmm(a, b))
        for count in range(rule.multiple, 65, rule.multiple):
            for num_items in (1, 2, 3):
                part = rule.bmm(a[:num_items, :count].contiguous(), b[:num_items])
                assert torch.equal(part, whole[:num_items, :count]), (num_items, count)


def test_the_functions_used_here_treat_every_element_alike():
    check_elementwise()
    check_elementwise((("exp", torch.exp), ("silu", silu)))


def test_a_function_that_sees_an_elements_place_is_refused_by_name():
    def tail_differs(x: Tensor) -> Tensor:
        out = torch.exp(x)
        out[len(out) - len(out) % 8 :] *= 1 + 2.0**-22
        return out

    with pytest.raises(ConfigError, match="numerics=stable: exp depends on an element's place here"):
        check_elementwise((("exp", tail_differs), ("silu", silu)))


def test_a_difference_that_few_elements_of_a_tail_show_is_found():
    """As with torch's own silu where it is vectorised: one in twenty of the last elements differs."""

    def tail_differs_rarely(x: Tensor) -> Tensor:
        out = torch.exp(x)
        tail = torch.arange(len(x)) >= len(x) - len(x) % 8
        out[tail & ((x * 1000).int() % 20 == 0)] *= 1 + 2.0**-22
        return out

    with pytest.raises(ConfigError, match="rare depends on an element's place here"):
        check_elementwise((("rare", tail_differs_rarely),))


def test_a_reduction_that_sees_the_number_of_rows_is_refused_by_name():
    def longer_differs(x: Tensor) -> Tensor:
        return x.sum(-1) + 1e-6 * (len(x) > 60)

    check_row_reductions(96)
    check_rows((("sum", lambda x: x.sum(-1)),), 256)
    with pytest.raises(ConfigError, match="numerics=stable: sum depends on the number of rows here"):
        check_rows((("sum", longer_differs),), 256)


def test_where_no_product_is_row_invariant_loading_refuses(monkeypatch):
    """torch's own product stands in here for a processor on which not even a fixed shape agrees."""
    calls = iter(range(10**6))
    real = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: real(a, b) + 1e-5 * next(calls))
    with pytest.raises(ConfigError, match="batched product is not row-invariant; use numerics=fast"):
        attention_row_rule(16, 64, num_rows=64)


def test_the_probe_looks_at_whole_step_sizes():
    assert max(ROW_COUNTS) >= 64
    assert probe.ROW_MULTIPLES[0] == 1
