"""Tenants and salts on the default model through a socket; `test_sessions.py` has the other cases."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from core import EngineConfig
from gateway.backends.local import open_local_backend
from gateway.keys import ADMISSION
from tests.gateway.serving import Server, serving

pytestmark = pytest.mark.slow

MODEL = "smollm2-135m"
LOG = "Day 1: wind from the west, all well. " * 4
KEYS = {"flood": "key-of-the-flood-tenant", "quiet": "key-of-the-quiet-tenant"}


@asynccontextmanager
async def served(model: Path, *, api_key_file: str = "", **options: Any) -> AsyncIterator[Server]:
    engine = EngineConfig(
        checkpoint=str(model),
        cache_dir=os.environ.get("TIDEGATE_CACHE_DIR", ""),
        compile="off",
        **{"num_blocks": 256, **options},
    )
    async with serving(
        open_local_backend, engine=engine, model_id=MODEL, api_key_file=api_key_file
    ) as server:
        yield server
        server.check_nothing_is_held()


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    file = tmp_path / "keys"
    file.write_text("".join(f"{tenant}: {key}\n" for tenant, key in KEYS.items()))
    file.chmod(0o600)
    return str(file)


def client_of(server: Server, key: str = "none") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=120)


async def num_cached(client: AsyncOpenAI, content: str, **extra: Any) -> int:
    """Ask in chat; how many prompt tokens came from the cache."""
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=2,
        extra_body=extra,
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


async def test_a_salt_shares_with_itself_alone_and_a_quiet_tenant_goes_before_a_flood(
    default_model_path: Path, key_file: str
) -> None:
    async with (
        served(default_model_path, api_key_file=key_file, policy="fair_tenants", max_running=1) as server,
        client_of(server, KEYS["flood"]) as client,
    ):
        cached = [await num_cached(client, LOG, cache_salt=salt) for salt in ("a", "a", "b")]
        assert cached[0] == cached[2] == 0
        assert cached[1] > 32

        asked = [("first", "flood"), *((f"flood{n}", "flood") for n in range(3)), ("late", "quiet")]
        ended = await order_of_ends(server, [(name, KEYS[tenant]) for name, tenant in asked])
        assert ended.index("late") < ended.index("flood2"), ended


async def order_of_ends(server: Server, asked: Sequence[tuple[str, str]]) -> list[str]:
    """Send (name, key) one after the other while the first is running; who ended when."""
    ended: list[str] = []

    async def ask(name: str, key: str) -> None:
        async with client_of(server, key) as client:
            await client.completions.create(
                model=MODEL,
                prompt=f"{name}:",
                max_tokens=64 if name == "first" else 2,
                temperature=0,
                extra_body={"session_id": name, "ignore_eos": True},
            )
        ended.append(name)

    async with asyncio.TaskGroup() as tasks:
        for count, (name, key) in enumerate(asked, 1):
            tasks.create_task(ask(name, key))
            async with asyncio.timeout(60):
                while server.app[ADMISSION].num_admitted + len(ended) < count:  # noqa: ASYNC110 -- a count
                    await asyncio.sleep(0.002)
    return ended
