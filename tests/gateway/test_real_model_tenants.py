"""API keys, tenants and limits on the default model through a socket: each fails without what it names."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, AuthenticationError, RateLimitError

from core import EngineConfig
from gateway.backends.local import open_local_backend
from gateway.keys import ADMISSION
from tests.gateway.serving import Server, serving

pytestmark = pytest.mark.slow

ORIGIN = "http://127.0.0.1:5173"
LOG = "Day 1: wind from the west, all well. " * 12


@asynccontextmanager
async def served(model: Path, **changes: Any) -> AsyncIterator[Server]:
    engine = EngineConfig(
        checkpoint=str(model),
        num_blocks=256,
        cache_dir=os.environ.get("TIDEGATE_CACHE_DIR", ""),
        compile="off",
    )
    async with serving(open_local_backend, engine=engine, model_id="smollm2-135m", **changes) as server:
        yield server
        server.check_nothing_is_held()


def client_of(server: Server, key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=120)


async def ask(client: AsyncOpenAI, content: str, *, max_tokens: int = 4) -> tuple[str, int]:
    """The answer, and how many prompt tokens came from the cache."""
    answer = await client.chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=max_tokens,
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.choices[0].message.content or "", answer.usage.prompt_tokens_details.cached_tokens or 0


async def test_a_tenant_hits_its_own_prompts_and_never_anothers(
    default_model_path: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("harbour: key-of-the-harbour\nlighthouse: key-of-the-lighthouse\n")
    keys.chmod(0o600)
    async with (
        served(default_model_path, api_key_file=str(keys)) as server,
        client_of(server, "key-of-the-harbour") as harbour,
        client_of(server, "key-of-the-lighthouse") as lighthouse,
        client_of(server, "key-of-nobody") as nobody,
    ):
        first = await ask(harbour, LOG)
        again = await ask(harbour, LOG)
        other = await ask(lighthouse, LOG)
        with pytest.raises(AuthenticationError):
            await ask(nobody, LOG)
    assert first[1] == 0
    assert again[1] > 100
    assert other[1] == 0
    assert first[0] == again[0] == other[0]


async def test_a_page_of_an_allowed_origin_may_ask_and_any_other_may_not(default_model_path: Path) -> None:
    async with served(default_model_path, cors_origins=(ORIGIN,)) as server, aiohttp.ClientSession() as page:
        body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        allowed = {}
        for origin in (ORIGIN, "http://127.0.0.1:6666"):
            async with page.post(
                f"{server.url}/v1/chat/completions", json=body, headers={"Origin": origin}
            ) as answer:
                assert (await answer.json())["choices"]
                allowed[origin] = answer.headers.get("Access-Control-Allow-Origin")
    assert allowed == {ORIGIN: ORIGIN, "http://127.0.0.1:6666": None}


async def test_who_comes_when_the_queue_is_full_is_told_when_to_come_again(default_model_path: Path) -> None:
    engine = EngineConfig(
        checkpoint=str(default_model_path),
        num_blocks=256,
        max_running=1,
        cache_dir=os.environ.get("TIDEGATE_CACHE_DIR", ""),
        compile="off",
    )
    async with (
        serving(open_local_backend, engine=engine, model_id="smollm2-135m", max_queued=1) as server,
        client_of(server, "none") as client,
    ):
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(ask(client, LOG, max_tokens=24)) for _ in range(2)]
            async with asyncio.timeout(60):
                while server.app[ADMISSION].num_admitted < 2:  # noqa: ASYNC110 -- a count, not an event
                    await asyncio.sleep(0.005)
            with pytest.raises(RateLimitError) as refusal:
                await ask(client, "Hi", max_tokens=1)
            assert 1 <= int(refusal.value.response.headers["Retry-After"]) <= 60
        assert all(task.result()[0] for task in waiting)
        assert (await ask(client, "Hi", max_tokens=1))[0]
