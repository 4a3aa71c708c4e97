"""Sharing in flight, copies inside a block, and the modes for comparison, on the default model by socket."""

import asyncio
from pathlib import Path

import pytest

from tests.gateway.serving import get, metric
from tests.gateway.test_company import served
from tests.gateway.test_real_model_tenants import ask

pytestmark = pytest.mark.slow

LOG = "Day 1: wind from the west, all well on board. " * 12
QUESTIONS = ("Who writes?", "Which day is it?", "Where does the wind come from?")
LATE = "Who writes this log?"


async def test_what_questions_have_in_common_is_computed_once_and_cached_to_the_token(
    default_model_path: Path, tmp_path: Path
) -> None:
    async with served(default_model_path, tmp_path, num_blocks=400) as (server, client):
        together = await asyncio.gather(*(ask(client, LOG + each, max_tokens=20) for each in QUESTIONS))
        late = await ask(client, LOG + LATE, max_tokens=4)
        text = (await get(server, "/metrics")).body
    async with served(
        default_model_path,
        tmp_path,
        num_blocks=400,
        prefix_cache=False,
        kv_reservation="power_of_two",
        batching="static",
        chunked_prefill=False,
    ) as (server, client):
        compared = await asyncio.gather(*(ask(client, LOG + each, max_tokens=20) for each in QUESTIONS))
        late_compared = await ask(client, LOG + LATE, max_tokens=4)
        plain = (await get(server, "/metrics")).body
    assert [answer for answer, _ in (*together, late)] == [answer for answer, _ in (*compared, late_compared)]
    cached = sorted(num_cached for _, num_cached in together)
    assert cached[0] == 0, "one computed it"
    assert cached[1] > 120, "the others waited for it, though nothing was cached when they came"
    assert late[1] % 16, "it parts from another inside a block"
    assert metric(text, "tidegate_prefix_hit_tokens_total") == sum(cached) + late[1]
    assert metric(plain, "tidegate_prefix_hit_tokens_total") == 0
