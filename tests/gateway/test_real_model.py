"""The default model behind the whole server, asked by the official client."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from core import EngineConfig
from gateway.backends.local import open_local_backend
from tests.gateway.serving import Server, get, metric, serving

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of France? Answer in one short sentence."


@asynccontextmanager
async def served(model: Path) -> AsyncIterator[tuple[Server, AsyncOpenAI]]:
    # One server per test, since each test has its own loop; few blocks, so that it is small.
    engine = EngineConfig(
        checkpoint=str(model),
        num_blocks=512,
        cache_dir=os.environ.get("TIDEGATE_CACHE_DIR", ""),
        compile="off",
    )
    async with (
        serving(open_local_backend, engine=engine, model_id="smollm2-135m") as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        yield server, client
        server.check_nothing_is_held()


async def test_the_official_client_streams_a_chat_from_the_real_model(default_model_path: Path) -> None:
    async with served(default_model_path) as (server, client):
        stream = await client.chat.completions.create(
            model="smollm2-135m",
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=48,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert "Paris" in streamed
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.completion_tokens > 3

        whole = await client.chat.completions.create(
            model="smollm2-135m",
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=48,
        )
        assert whole.choices[0].message.content == streamed
        assert whole.usage is not None
        assert whole.usage.completion_tokens == usage.completion_tokens
        assert whole.usage.prompt_tokens_details is not None
        # The second time all that the first left in whole blocks is found, but for the last token.
        written = (usage.prompt_tokens + usage.completion_tokens - 1) // 16 * 16
        assert whole.usage.prompt_tokens_details.cached_tokens == min(usage.prompt_tokens - 1, written)

        text = (await get(server, "/metrics")).body
        assert metric(text, "tidegate_packed_weight_bytes") > 50e6
        assert metric(text, 'tidegate_kv_blocks{state="held"}') == 0


async def test_a_seed_gives_the_same_answer_whoever_else_is_there(default_model_path: Path) -> None:
    async with served(default_model_path) as (_, client):

        async def tell(seed: int, subject: str) -> str:
            answer = await client.chat.completions.create(
                model="smollm2-135m",
                messages=[{"role": "user", "content": f"Tell me about {subject}."}],
                temperature=1,
                top_p=0.9,
                seed=seed,
                max_tokens=16,
            )
            return answer.choices[0].message.content or ""

        alone = await tell(7, "the sea")
        subjects = ("cats", "the sea", "mountains", "bread")
        together = await asyncio.gather(*(tell(7, subject) for subject in subjects))
        assert together[1] == alone
        assert await tell(8, "the sea") != alone
