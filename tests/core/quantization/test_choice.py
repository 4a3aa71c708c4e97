"""Which kernel computes a weight: the best ranked that works here, or a refusal by name."""

import pytest

from core.errors import ConfigError
from core.quantization import choose_kernel
from core.quantization.ggml import BLOCK_TYPES, FLOAT_DTYPES
from core.quantization.kernels import linear_kernels

KERNELS = linear_kernels()
ALL_TYPES = (*BLOCK_TYPES, *FLOAT_DTYPES)


def chosen(ggml_type, shape=(64, 64), *, numerics="stable", device="cpu", refused=()):
    """The chosen kernel's name, its multiple, and the names asked in order, where `refused` do not work."""
    asked = []

    def row_multiple(kernel):
        asked.append(kernel.name)
        return None if kernel.name in refused else 4

    kernel, multiple = choose_kernel(
        ggml_type, shape, numerics=numerics, device=device, row_multiple=row_multiple
    )
    return kernel.name, multiple, asked


@pytest.mark.parametrize("ggml_type", ALL_TYPES)
def test_kernels_are_asked_in_the_order_of_their_rank_until_one_works(ggml_type):
    everything_but_one = {name for name in KERNELS if name != "float32"}
    name, multiple, asked = chosen(ggml_type, refused=everything_but_one)
    ranks = [KERNELS[kernel].rank[ggml_type] for kernel in asked]
    assert ranks == sorted(ranks)
    assert asked == sorted(asked, key=lambda kernel: KERNELS[kernel].rank[ggml_type])
    assert (name, multiple) == ("float32", 4)
    best, _, first_asked = chosen(ggml_type)
    assert [best] == first_asked == asked[:1]


def test_quantised_weights_are_computed_as_they_are_stored():
    assert chosen("Q4_1")[0] == chosen("Q4_0")[0] == "int4_packed"
    assert chosen("Q8_0")[0] == "int8_packed"
    assert chosen("F16")[0] == "bfloat16"


@pytest.mark.parametrize("ggml_type", ALL_TYPES)
def test_the_reference_computes_everything_in_float32(ggml_type):
    assert chosen(ggml_type, numerics="reference")[2] == ["float32"]


def test_a_shape_that_does_not_fit_goes_to_the_next_kernel():
    assert chosen("Q4_1", (100, 64))[2] == ["bfloat16"]
    assert chosen("Q8_0", (33, 64))[2] == ["bfloat16"]


@pytest.mark.parametrize("ggml_type", ALL_TYPES)
def test_a_gpu_gets_only_kernels_that_run_there(ggml_type):
    name, _, asked = chosen(ggml_type, device="cuda")
    assert "cuda" in KERNELS[name].devices
    assert not {"int4_packed", "int8_packed"} & set(asked)


@pytest.mark.parametrize("numerics", ["stable", "fast", "reference"])
def test_where_nothing_works_the_refusal_names_type_shape_and_numerics(numerics):
    with pytest.raises(ConfigError, match=rf"numerics={numerics}: .* Q4_1 weights of shape \(64, 96\)"):
        chosen("Q4_1", (64, 96), numerics=numerics, refused=set(KERNELS))


def test_a_type_nobody_offers_is_refused():
    with pytest.raises(ConfigError, match="no linear kernel for Q9_9"):
        chosen("Q9_9")


@pytest.mark.parametrize("ggml_type", ALL_TYPES)
@pytest.mark.parametrize("numerics", ["stable", "fast", "reference"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_stored_type_has_a_kernel_for_any_shape(ggml_type, numerics, device):
    assert chosen(ggml_type, (1, 32), numerics=numerics, device=device)[0]
