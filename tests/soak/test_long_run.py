"""Requests that nobody has sent before, by the thousand: nothing grows, nothing slows down."""

import asyncio
import statistics
import time
from pathlib import Path

import pytest

from tests.gateway.serving import Server, ask, chat_body, connected, get, http_request
from tests.gateway.test_local_backend import greedy, served
from tests.soak.clients import crowd
from tests.soak.footprint import SOAKING, report, settled
from tests.soak.test_aborts import real_model

soak_only = pytest.mark.skipif(not SOAKING, reason="measures time: run by `make soak` alone")


async def test_nothing_grows_with_the_number_of_different_requests() -> None:
    num_requests = 8_000 if SOAKING else 300
    async with served(engine_fields={"num_blocks": 400}, access_log=False) as (server, opened):
        await _unlike_any(server, first=0, count=max(num_requests // 4, 150))
        before = await settled(server, opened)
        began_at = time.monotonic()
        await _unlike_any(server, first=num_requests, count=num_requests)
        took_s = time.monotonic() - began_at
        after = await settled(server, opened, before=before)
        opened.engine._scheduler.check()
        stats = opened.engine.stats().scheduler
    assert after.counts == before.counts
    assert after.num_threads == before.num_threads
    assert stats.num_held_blocks == 0
    assert stats.num_cached_blocks <= 400
    growth = after.rss_bytes - before.rss_bytes
    report(
        f"{num_requests} different requests",
        took=f"{took_s:.1f} s",
        rss_mib=f"{before.rss_bytes >> 20} -> {after.rss_bytes >> 20}",
        growth_per_request=f"{growth / num_requests:.0f} bytes",
        cached_blocks=stats.num_cached_blocks,
    )
    assert growth < 24 << 20


async def _unlike_any(server: Server, *, first: int, count: int) -> None:
    """Each with its own prompt, user, seed, id, and now and then its own mistake."""
    for number in range(first, first + count):
        headers = f"X-Request-Id: r{number}\r\nX-Header-{number}: {number}\r\n"
        match number % 8:
            case 0:
                assert (await get(server, f"/v1/nowhere/{number}")).status == 404
            case 1:
                assert (await ask(server, chat_body(model=f"model-{number}"))).status == 404
            case 2:
                assert (await ask(server, chat_body(**{f"field_{number}": 1}))).status == 400
            case _:
                body = greedy(f"Number {number} of many", max_tokens=6, seed=number, user=f"u{number}",
                              stop=[f"end {number}"], stream=number % 2 == 0)  # fmt: skip
                assert (await ask(server, body, headers=headers)).status == 200


@soak_only
async def test_a_pool_that_is_full_of_prefixes_is_as_fast_as_an_empty_one() -> None:
    num_rounds, num_blocks = 12, 6000
    fields = {"num_blocks": num_blocks, "executor": "process"}
    async with served(engine_fields=fields, access_log=False) as (server, opened):
        await _unlike_any(server, first=1 << 20, count=100)
        rounds_s: list[float] = []
        cached: list[int] = []
        for number in range(num_rounds):
            # The scheduler's processor time, not the clock's: others use this machine too.
            began_at = time.process_time()
            await _unlike_any(server, first=number * 400, count=400)
            rounds_s.append(time.process_time() - began_at)
            cached.append(opened.engine.stats().scheduler.num_cached_blocks)
    empty, full = statistics.median(rounds_s[:3]), statistics.median(rounds_s[-3:])
    report(
        "Rounds of 400 requests without a hit",
        cpu_s=[round(s, 2) for s in rounds_s],
        cached_blocks=cached,
        full_to_empty=f"{full / empty:.3f}",
    )
    assert cached[2] < num_blocks - 400  # room for everybody
    assert cached[-1] == cached[-3]  # full: each new prefix evicts an old one
    assert full < 1.25 * empty


@soak_only
async def test_after_a_long_prompt_the_model_is_as_fast_as_before(default_model_path: Path) -> None:
    async with real_model(default_model_path) as (server, _):

        async def short_s() -> float:
            times = []
            for number in range(5):
                began_at = time.monotonic()
                body = greedy(f"Count to {number}", max_tokens=12)
                assert (await ask(server, body)).status == 200
                times.append(time.monotonic() - began_at)
            return min(times)

        await short_s()
        before_s = await short_s()
        async with connected(server) as connection, asyncio.timeout(240):
            connection.send(http_request(greedy("word " * 1000, max_tokens=4)))
            assert (await connection.response()).status == 200
        after_s = await short_s()
    report("A short chat", before_a_long_prompt=f"{before_s:.3f} s", after=f"{after_s:.3f} s")
    assert after_s < 1.5 * before_s  # the best of five each; others use this machine too


@soak_only
async def test_memory_is_flat_while_clients_come_and_go_for_long() -> None:
    async with served(engine_fields={"num_blocks": 300, "max_running": 12}, access_log=False) as (
        server,
        opened,
    ):
        await crowd(server, num_visits=2_000, at_once=24, seed=10, max_tokens=24)
        marks = [await settled(server, opened)]
        for seed in range(11, 16):
            await crowd(server, num_visits=2_000, at_once=24, seed=seed, max_tokens=24)
            marks.append(await settled(server, opened, before=marks[0]))
    assert {mark.counts for mark in marks} == {marks[0].counts}
    report("Six times 2000 visits", rss_mib=[round(mark.rss_bytes / (1 << 20), 1) for mark in marks])
    assert marks[-1].rss_bytes - marks[1].rss_bytes < 8 << 20
