"""Which kernel computes a weight: the best ranked that works here, or a refusal by name."""

import itertools

import pytest

from core.errors import ConfigError
from core.quantization import choose_kernel
from core.quantization.ggml import BLOCK_TYPES, FLOAT_DTYPES
from core.quantization.int8 import MOST_FEATURES
from core.quantization.kernels import linear_kernels

KERNELS = linear_kernels()
ALL_TYPES = (*BLOCK_TYPES, *FLOAT_DTYPES)


def chosen(*ggml_types, shape=(64, 64), boundaries=(0,), numerics="stable", device="cpu", refused=()):
    """The chosen kernel's name, its multiple, and the names asked in order, where `refused` do not work."""
    asked = []

    def row_multiple(kernel):
        asked.append(kernel.name)
        return None if kernel.name in refused else 4

    kernel, multiple = choose_kernel(
        ggml_types,
        shape,
        boundaries=boundaries,
        numerics=numerics,
        device=device,
        row_multiple=row_multiple,
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


def test_quantised_weights_are_computed_exactly_where_that_works_and_as_they_are_stored_elsewhere():
    for ggml_type, stored_as in (("Q4_0", "int4_packed"), ("Q4_1", "int4_packed"), ("Q8_0", "int8_packed")):
        assert chosen(ggml_type)[0] == "int8_split"
        assert chosen(ggml_type, refused={"int8_split"})[0] == stored_as
        assert chosen(ggml_type, refused={"int8_split", stored_as})[0] == "bfloat16"
    for ggml_type in FLOAT_DTYPES:
        assert chosen(ggml_type)[0] == "bfloat16"


@pytest.mark.parametrize("ggml_types", list(itertools.combinations(ALL_TYPES, 2)))
def test_a_weight_of_two_types_goes_to_a_kernel_that_both_are_offered(ggml_types):
    """And to the one that the worse served of them likes best: widening one type must not cost the other."""
    everything_but_one = {name for name in KERNELS if name != "float32"}
    name, _, asked = chosen(*ggml_types, refused=everything_but_one)
    worst = [max(KERNELS[kernel].rank[ggml_type] for ggml_type in ggml_types) for kernel in asked]
    assert worst == sorted(worst)
    assert set(asked) == {name for name, kernel in KERNELS.items() if kernel.rank.keys() >= set(ggml_types)}
    assert name == "float32"
    assert chosen(*reversed(ggml_types))[0] == chosen(*ggml_types)[0] == asked[0]


def test_a_weight_of_which_one_part_is_of_floats_is_computed_in_bfloat16():
    assert chosen("Q8_0", "Q4_1")[0] == "int8_split"
    assert chosen("Q4_1", "F16")[0] == chosen("BF16", "Q8_0")[0] == "bfloat16"


def test_a_kernel_that_interleaves_rows_gets_no_part_that_begins_inside_a_tile():
    refused = {"int8_split"}
    assert chosen("Q4_1", shape=(192, 64), boundaries=(0, 64, 128), refused=refused)[0] == "int4_packed"
    assert chosen("Q4_1", shape=(192, 64), boundaries=(0, 128, 160), refused=refused)[0] == "bfloat16"
    assert chosen("Q8_0", shape=(192, 64), boundaries=(0, 128, 160), refused=refused)[0] == "int8_packed"
    assert chosen("Q4_1", shape=(192, 64), boundaries=(0, 128, 160))[0] == "int8_split"


@pytest.mark.parametrize("ggml_type", ALL_TYPES)
def test_the_reference_computes_everything_in_float32(ggml_type):
    assert chosen(ggml_type, numerics="reference")[2] == ["float32"]


def test_a_shape_that_does_not_fit_goes_to_the_next_kernel():
    assert chosen("Q4_1", shape=(100, 64), refused={"int8_split"})[2] == ["int8_split", "bfloat16"]
    assert chosen("Q8_0", shape=(33, 64), refused={"int8_split"})[2] == ["int8_split", "bfloat16"]
    assert chosen("Q8_0", shape=(64, MOST_FEATURES))[2] == ["int8_split"]
    assert chosen("Q4_0", shape=(64, MOST_FEATURES + 1))[2] == ["bfloat16"], "not a multiple of 32 either"


@pytest.mark.parametrize("ggml_type", ALL_TYPES)
def test_a_gpu_gets_only_kernels_that_run_there(ggml_type):
    name, _, asked = chosen(ggml_type, device="cuda")
    assert "cuda" in KERNELS[name].devices
    assert not {"int4_packed", "int8_packed", "int8_split"} & set(asked)


@pytest.mark.parametrize("numerics", ["stable", "fast", "reference"])
def test_where_nothing_works_the_refusal_names_type_shape_and_numerics(numerics):
    with pytest.raises(ConfigError, match=rf"numerics={numerics}: .* Q4_1 weights of shape \(64, 96\)"):
        chosen("Q4_1", shape=(64, 96), numerics=numerics, refused=set(KERNELS))
    with pytest.raises(ConfigError, match=r"no linear kernel for Q4_1, Q8_0 weights of shape \(64, 96\)"):
        chosen("Q4_1", "Q8_0", shape=(64, 96), numerics=numerics, refused=set(KERNELS))


def test_a_type_nobody_offers_is_refused():
    with pytest.raises(ConfigError, match="no linear kernel for Q9_9"):
        chosen("Q9_9")
    with pytest.raises(ConfigError, match="no linear kernel for Q4_0, Q9_9"):
        chosen("Q4_0", "Q9_9")


@pytest.mark.parametrize("ggml_type", ALL_TYPES)
@pytest.mark.parametrize("numerics", ["stable", "fast", "reference"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_stored_type_has_a_kernel_for_any_shape(ggml_type, numerics, device):
    assert chosen(ggml_type, shape=(1, 32), numerics=numerics, device=device)[0]
