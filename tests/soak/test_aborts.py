"""Thousands of clients that leave at any moment: no block, task, descriptor or permit is lost."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from core import Engine, EngineConfig
from gateway.backends import Backend
from gateway.backends.local import open_local_backend
from gateway.config import ServerConfig
from tests.gateway.serving import Server, ask, chat_body, connected, http_request, serving
from tests.gateway.test_local_backend import Opened, alone, greedy, served
from tests.gateway.test_real_model import QUESTION
from tests.soak.clients import crowd
from tests.soak.footprint import SOAKING, Footprint, live_gauges, report, settled

CROWDED = {"num_blocks": 160, "max_running": 12, "max_step_tokens": 96, "max_prefill_tokens": 48}
"""Too little for all, so that requests wait, are preempted and evict each other's prefixes."""


async def check_nothing_is_lost(server: Server, opened: Opened, before: Footprint) -> Footprint:
    after = await settled(server, opened, before=before)
    assert after.counts == before.counts
    assert set(live_gauges(server).values()) == {0.0}
    server.check_nothing_is_held()
    opened.engine._scheduler.check()
    return after


@pytest.mark.parametrize("executor", ["thread", "process"] if SOAKING else ["thread"])
async def test_random_aborts_lose_no_block_task_or_descriptor(executor: str) -> None:
    num_visits = 10_000 if SOAKING else 400
    async with served(engine_fields=CROWDED | {"executor": executor}, access_log=False) as (server, opened):
        await crowd(server, num_visits=100, at_once=24, seed=1, max_tokens=24)
        before = await settled(server, opened)
        began_at = time.monotonic()
        ways = await crowd(server, num_visits=num_visits, at_once=24, seed=2, max_tokens=24)
        took_s = time.monotonic() - began_at
        after = await check_nothing_is_lost(server, opened, before)
        assert min(ways.values()) > 0
        stats = opened.engine.stats()
        assert stats.scheduler.num_preemptions > 0
        answer = (await ask(server, greedy("Hello", max_tokens=8))).json
        assert answer["usage"]["completion_tokens"] == len(alone("Hello", max_tokens=8))
    assert after.rss_bytes - before.rss_bytes < 64 << 20
    report(
        f"{sum(ways.values())} random visits ({executor})",
        took=f"{took_s:.1f} s",
        ways=ways,
        ended=dict(stats.num_finished),
        preemptions=stats.scheduler.num_preemptions,
        rss_mib=f"{before.rss_bytes >> 20} -> {after.rss_bytes >> 20}",
        counts=f"{before.counts} -> {after.counts}",
    )


async def test_every_stream_killed_at_once_leaves_the_pool_and_the_gauges_as_they_were() -> None:
    num_streams = 200
    fields = {"num_blocks": 4000, "max_running": 64}
    async with served(engine_fields=fields, access_log=False) as (server, opened):
        await crowd(server, num_visits=60, at_once=12, seed=5, max_tokens=8)
        before = await settled(server, opened)
        arrived = asyncio.Barrier(num_streams + 1)

        async def stream() -> None:
            async with connected(server) as connection:
                connection.send(http_request(greedy("Go on and on", max_tokens=900, stream=True)))
                await connection.head()
                await arrived.wait()
                connection.leave()

        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for _ in range(num_streams):
                tasks.create_task(stream())
            await arrived.wait()
            assert live_gauges(server)["tidegate_requests_admitted"] == num_streams
        await check_nothing_is_lost(server, opened, before)
        assert (await ask(server, greedy("Hello", max_tokens=8))).status == 200


@asynccontextmanager
async def real_model(path: Path) -> AsyncIterator[tuple[Server, Opened]]:
    opened = Opened()
    engine = EngineConfig(
        checkpoint=str(path),
        num_blocks=96,
        max_running=8,
        cache_dir=os.environ.get("TIDEGATE_CACHE_DIR", ""),
        compile="off",
    )

    @asynccontextmanager
    async def open_backend(config: ServerConfig) -> AsyncIterator[Backend]:
        async with open_local_backend(config) as backend:
            opened.engines.append(_engine_of(backend))
            yield backend

    async with serving(open_backend, engine=engine, access_log=False) as server:
        yield server, opened


def _engine_of(backend: Backend) -> Engine:
    engine = vars(backend)["_engine"]
    assert isinstance(engine, Engine)
    return engine


@pytest.mark.slow
async def test_random_aborts_of_the_real_model_lose_nothing_either(default_model_path: Path) -> None:
    num_visits = 400 if SOAKING else 40
    question = chat_body(messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=16)
    async with real_model(default_model_path) as (server, opened):
        first = (await ask(server, question)).json["choices"][0]["message"]["content"]
        await crowd(server, num_visits=20, at_once=12, seed=3, max_tokens=12)
        before = await settled(server, opened)
        worker_before = (await opened.engine.memory()).anonymous_bytes
        began_at = time.monotonic()
        ways = await crowd(server, num_visits=num_visits, at_once=12, seed=4, max_tokens=12)
        took_s = time.monotonic() - began_at
        after = await check_nothing_is_lost(server, opened, before)
        worker_after = (await opened.engine.memory()).anonymous_bytes
        assert (await ask(server, question)).json["choices"][0]["message"]["content"] == first
        preemptions = opened.engine.stats().scheduler.num_preemptions
    assert "Paris" in first
    report(
        f"{sum(ways.values())} random visits (real model)",
        took=f"{took_s:.1f} s",
        preemptions=preemptions,
        rss_mib=f"{before.rss_bytes >> 20} -> {after.rss_bytes >> 20}",
        worker_anonymous_mib=f"{worker_before >> 20} -> {worker_after >> 20}",
        counts=f"{before.counts} -> {after.counts}",
    )
