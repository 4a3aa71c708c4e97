"""Functions taken apart into plain values, and put together again."""

from functools import partial

import msgspec
import pytest
import torch

from core.attention.tiled import RowRule, TiledAttention
from core.compiled import keys
from core.compiled.job import CompileJob, wanted_region
from core.compiled.keys import region_key
from core.compiled.references import NoReference, describe, restore
from core.layers.decoder_regions import Heads, added_and_normed, encoded, gated, normed, rotated
from core.layers.region import Region
from core.quantization import codec
from tests.core.compiled.regions import normed_region, picked_region, scaled, scaled_region

CODECS = [codec.FLOAT32, codec.BFLOAT16, codec.INT8_WHOLE, codec.INT8_SPLIT]


def scaled_twice(factor: object, heads: object) -> object:
    return factor, heads


def sent(value):
    """As it arrives in another process."""
    return restore(msgspec.json.decode(msgspec.json.encode(describe(value))))


@pytest.mark.parametrize("value", [None, True, 3, 1e-5, "x", (1, (2.5, None)), [1, (2,)], torch.float16])
def test_plain_values_arrive_as_they_are(value):
    assert sent(value) == value
    assert type(sent(value)) is type(value)


def test_a_codec_arrives_as_the_very_one_of_its_module():
    assert sent(codec.INT8_SPLIT) is codec.INT8_SPLIT


def test_a_partial_function_arrives_with_what_is_bound_to_it():
    heads = Heads(9, 3, 64, 1e-5, has_bias=False, has_norms=True, kv_dtype=torch.float16)
    arrived = sent(partial(scaled_twice, 0.25, heads=heads))
    assert (arrived.func, arrived.args, arrived.keywords) == (scaled_twice, (0.25,), {"heads": heads})
    assert type(arrived.keywords["heads"]) is Heads


@pytest.mark.parametrize(
    "value", [lambda x: x, torch.ones(3), object(), {1: 2}, partial(scaled_twice, torch.ones(1))]
)
def test_what_has_no_name_is_refused(value):
    with pytest.raises(NoReference):
        describe(value)


def regions_of_a_model() -> list[Region]:
    heads = Heads(9, 3, 64, 1e-5, has_bias=True, has_norms=True, kv_dtype=torch.float16)
    regions = [picked_region(), scaled_region()]
    for kind in CODECS:
        regions += [normed(kind, 64, 1e-5), rotated(kind, heads), encoded(kind, 64)]
        regions += [added_and_normed(kind, None, 64, 1e-6), gated(kind, codec.INT8_SPLIT, 96)]
    attention = TiledAttention(num_heads=9, num_kv_heads=3, head_dim=64, row_rule=RowRule(4))
    return [*regions, *attention.regions(16, torch.float16)]


@pytest.mark.parametrize("region", regions_of_a_model(), ids=lambda region: region.name)
def test_every_region_of_a_model_can_be_built_again_elsewhere(region):
    wanted = wanted_region(region, region_key(region))
    job = msgspec.json.decode(msgspec.json.encode(CompileJob("folder", [wanted])), type=CompileJob)
    again = job.wanted[0].build()
    assert region_key(again) == region_key(region)
    for mine, theirs in zip(region.eager(*region.examples), again.eager(*region.examples), strict=True):
        assert torch.equal(mine, theirs) or mine.isnan().any()


def test_a_key_covers_the_sources_a_function_uses_and_no_others(monkeypatch):
    before = region_key(encoded(codec.INT8_SPLIT, 64)), region_key(scaled_region())
    real = keys._source
    for module in ("core.quantization.codec", "core.layers.decoder_regions"):
        monkeypatch.setattr(keys, "_source", lambda name, module=module: real(name) + b"x" * (name == module))
        after = region_key(encoded(codec.INT8_SPLIT, 64)), region_key(scaled_region())
        assert (before[0] == after[0], before[1] == after[1]) == (False, True)


def test_the_key_of_a_region_depends_on_its_name_sizes_and_rounding():
    found = {
        region_key(region)
        for region in (
            scaled_region(0.5),
            scaled_region(0.25),
            normed_region(),
            Region("a", scaled, (torch.zeros(Region.ROWS, 8), torch.ones(8))),
            Region("a", scaled, (torch.zeros(Region.ROWS, 9), torch.ones(9))),
            Region("a", scaled, (torch.zeros(Region.ROWS, 8), torch.ones(8)), fused_multiply_add=True),
            Region("a", scaled, (torch.zeros(Region.ROWS, 8).half(), torch.ones(8))),
        )
    }
    assert len(found) == 7
    assert region_key(scaled_region()) == region_key(scaled_region())
