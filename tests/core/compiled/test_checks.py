"""What a compiled function must hold up to before it stands for a region's own."""

import pytest
import torch

from core.compiled.checks import find_problem, is_bit_equal, same_numbers, sample_inputs
from core.layers.region import Region
from tests.core.compiled.regions import centred, normed, normed_region, picked_region, scaled_region

REGIONS = [scaled_region, normed_region, picked_region]


@pytest.mark.parametrize("make", REGIONS)
def test_a_function_stands_for_itself(make):
    region = make()
    assert find_problem(region, region.function) == ""
    assert is_bit_equal(region, region.function)


def test_another_order_of_a_sum_is_close_but_not_equal():
    region = normed_region()

    def other_order(x, weight):
        scale = torch.rsqrt(x.flip(-1).double().pow(2).mean(-1, keepdim=True).float() + 1e-5)
        return x * weight * scale, scale

    assert find_problem(region, other_order) == ""
    assert not is_bit_equal(region, other_order)


def test_what_is_a_thousandth_off_is_refused_with_the_number():
    assert "output 0 is 1.0e-03 off" in find_problem(
        normed_region(), lambda x, w: (normed(x, w)[0] * 1.001, normed(x, w)[1])
    )


def test_rows_that_depend_on_their_company_are_refused():
    region = Region("centred", centred, (torch.zeros(Region.ROWS, 8),))
    assert "rows on 1 threads differ from the whole" in find_problem(region, centred)


def test_variants_that_disagree_are_refused():
    def by_count(x, weight):
        y, scale = normed(x, weight)
        return (y if len(x) > 16 else y * (1 + 1e-7)), scale

    assert "differ from the whole" in find_problem(normed_region(), by_count)


def test_other_shapes_and_types_are_refused():
    region = scaled_region()
    assert "types are others" in find_problem(region, lambda x, _: (x.double(),))
    assert "types are others" in find_problem(region, lambda x, _: (x, x))


def test_codes_may_round_to_a_neighbour_now_and_then():
    region = Region("codes", lambda x: (x.mul(100).round(),), (torch.zeros(Region.ROWS, 64),))

    def nearly(x, *, step=0.0):
        return (x.mul(100).add(step).round(),)

    assert find_problem(region, lambda x: nearly(x, step=1e-4)) == ""
    assert "of the codes are others" in find_problem(region, lambda x: nearly(x, step=0.2))


def test_a_region_with_a_quicker_eager_function_takes_equal_bits_alone():
    region = picked_region()
    assert find_problem(region, lambda p, pool: (pool[p].sum(1),)) == ""
    assert "bits" in find_problem(region, lambda p, pool: (pool[p].sum(1) * (1 + 1e-7),))


def test_samples_are_places_that_are_valid_and_rows_that_differ():
    places, pool = sample_inputs(picked_region(), seed=3)
    assert len(places) > Region.ROWS
    assert int(places.max()) < len(pool) == Region.POOL_ROWS
    ordinary, _ = sample_inputs(scaled_region(), seed=3)
    extreme, _ = sample_inputs(scaled_region(), seed=3, extreme=True)
    assert not torch.equal(ordinary[0], ordinary[1])
    assert float(extreme.abs().max()) > 1e5
    assert (extreme == 0).all(-1).sum() == 1


def test_same_numbers_means_every_bit_but_the_sign_of_zero():
    one = torch.tensor([1.0, float("nan"), 0.0, float("inf")])
    assert same_numbers(one, torch.tensor([1.0, float("nan"), -0.0, float("inf")]))
    assert not same_numbers(one, torch.tensor([1.0, 2.0, 0.0, float("inf")]))
    assert not same_numbers(one, one.double())
    assert not same_numbers(one, one[:3])
    assert not same_numbers(torch.tensor([1.0]), torch.tensor([1.0]).nextafter(torch.tensor([2.0])))
