"""Sixteen clients at once, with too little memory for all, get what each gets alone.

Through real sockets, on the default model and the default kernels: prompts from a word to 2,000
tokens, several with a common beginning, a pool so small that requests must be preempted.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from core import EngineConfig
from gateway.backends.local import open_local_backend
from tests.gateway.serving import Server, get, metric, serving

pytestmark = pytest.mark.slow

MAX_TOKENS = 64
PROMPT_WORDS = (1, 3, 20, 48, 64, 90, 110, 120, 130, 150, 160, 180, 200, 230, 330, 1750)
"""About 1.1 tokens each; the longest prompt has some 2,000 tokens with the template's own."""
NUM_BLOCKS = 124
"""Of 16 tokens: the longest request takes 116, all sixteen together some 300."""
COMMON = "You are a careful assistant on a sailing ship and you answer in one plain sentence. "


def conversations() -> list[str]:
    rng = random.Random(7)
    words = ("wind", "sail", "rope", "harbour", "gull", "wave", "tide", "lantern", "captain", "map", "storm")
    return [
        (COMMON if index % 3 else "") + " ".join(rng.choice(words) for _ in range(count))
        for index, count in enumerate(PROMPT_WORDS)
    ]


async def answer(client: AsyncOpenAI, content: str) -> tuple[str, str, int, int]:
    """Stream one answer: its text, finish reason, number of tokens, and cached prompt tokens."""
    text, finish_reason, num_tokens, num_cached = "", "", 0, 0
    stream = await client.chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish_reason = choice.finish_reason or finish_reason
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
            assert chunk.usage.prompt_tokens_details is not None
            num_cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
    return text, finish_reason, num_tokens, num_cached


@asynccontextmanager
async def served(model: Path, cache: Path, **engine: Any) -> AsyncIterator[tuple[Server, AsyncOpenAI]]:
    config = EngineConfig(checkpoint=str(model), cache_dir=str(cache), compile="off", **engine)
    async with (
        serving(open_local_backend, engine=config, model_id="smollm2-135m") as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600) as client,
    ):
        yield server, client
        server.check_nothing_is_held()


async def test_sixteen_streams_with_preemption_and_prefix_hits_are_what_each_is_alone(
    default_model_path: Path, tmp_path: Path
) -> None:
    async with served(default_model_path, tmp_path, num_blocks=NUM_BLOCKS, max_prefill_tokens=200) as (
        server,
        client,
    ):
        together = await asyncio.gather(*(answer(client, content) for content in conversations()))
        metrics = (await get(server, "/metrics")).body
    assert metric(metrics, "tidegate_preemptions_total") > 0
    assert metric(metrics, "tidegate_prefix_hit_tokens_total") > 0
    assert metric(metrics, 'tidegate_kv_blocks{state="held"}') == 0

    async with served(
        default_model_path, tmp_path, num_blocks=1000, max_prefill_tokens=512, prefix_cache=False
    ) as (_, client):
        alone = [await answer(client, content) for content in conversations()]
    assert [result[:3] for result in together] == [result[:3] for result in alone]
    assert all(num_cached == 0 for *_, num_cached in alone)
