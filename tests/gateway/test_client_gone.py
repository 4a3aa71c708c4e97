"""A client that leaves takes its generation with it, streamed or not, through every shipped middleware."""

import asyncio

import pytest

from gateway.backends.scripted import Script
from gateway.keys import METRICS
from tests.gateway.serving import ask, chat_body, connected, http_request, metric, scripted

ENDLESS = Script(deltas=("word ",) * 1_000_000, every_s=0.002)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_in_the_middle_ends_its_generation(stream: bool) -> None:
    async with scripted(ENDLESS) as (server, backend):
        async with connected(server) as connection, asyncio.timeout(10):
            connection.send(http_request(chat_body(stream=stream)))
            if stream:
                await connection.head()
                await connection.chunk()
            await backend.until_running(1)
            connection.leave()
            await backend.until_running(0)
        after = backend.num_deltas
        assert (await ask(server, b"", path="/livez", method="GET")).status == 200
        assert backend.num_deltas == after
        assert metric(server.app[METRICS].scrape(), 'tidegate_requests_total{outcome="client_gone"}') == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_closes_politely_ends_its_generation_too(stream: bool) -> None:
    async with scripted(ENDLESS) as (server, backend), connected(server) as connection, asyncio.timeout(10):
        connection.send(http_request(chat_body(stream=stream)))
        await backend.until_running(1)
        connection.writer.close()
        await backend.until_running(0)


async def test_a_client_that_leaves_before_the_backend_took_its_request_is_forgotten() -> None:
    script = Script(start_after_s=60)
    async with scripted(script) as (server, backend), connected(server) as connection, asyncio.timeout(10):
        connection.send(http_request(chat_body(stream=True)))
        await backend.until_running(1)
        connection.leave()
        await backend.until_running(0)


async def test_a_client_that_leaves_in_the_middle_of_its_body_costs_nothing() -> None:
    async with scripted() as (server, backend):
        async with connected(server) as connection:
            connection.send(http_request(chat_body())[:-5])
            connection.leave()
        assert (await ask(server, chat_body())).status == 200
        assert backend.num_opened == 1


async def test_of_many_clients_only_those_that_leave_lose_their_answers() -> None:
    script = Script(deltas=("x",) * 100, every_s=0.002)
    async with scripted(script) as (server, backend), asyncio.timeout(20):

        async def leave_early() -> None:
            async with connected(server) as connection:
                connection.send(http_request(chat_body(stream=True)))
                await connection.head()
                await connection.chunk()
                connection.leave()

        async def stay() -> bytes:
            return (await ask(server, chat_body(stream=True))).body

        async with asyncio.TaskGroup() as tasks:
            staying = [tasks.create_task(stay()) for _ in range(10)]
            for _ in range(10):
                tasks.create_task(leave_early())
        assert all(task.result().endswith(b"data: [DONE]\n\n") for task in staying)
        assert all(task.result().count(b'"content":"x"') == 100 for task in staying)
        await backend.until_running(0)


async def test_the_live_gauges_are_zero_within_one_scrape_of_everybody_leaving() -> None:
    async with scripted(ENDLESS) as (server, backend), asyncio.timeout(20):
        async with asyncio.TaskGroup() as tasks:

            async def leave() -> None:
                async with connected(server) as connection:
                    connection.send(http_request(chat_body(stream=True)))
                    await connection.head()
                    await backend.until_running(8)
                    connection.leave()

            for _ in range(8):
                tasks.create_task(leave())
        await backend.until_running(0)
        text = (await ask(server, path="/metrics", method="GET")).body
        assert metric(text, "tidegate_requests_running") == 0
        assert metric(text, "tidegate_requests_admitted") == 0
